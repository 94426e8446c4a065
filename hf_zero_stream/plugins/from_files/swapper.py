"""What ZeRO-3 asks for partitions that stay in files, in the place of its swapper for NVMe.

DeepSpeed asks a parameter's ``nvme_swapper`` for its partition when it is about to gather it (``swap_in``), and tells
it when the parameter is released (``remove_partition_and_release_buffers``). The rest of what it would ask it for is
for partitions that are written, which these never are: see :mod:`.engine`.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import Enum, auto
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.runtime.zero.partition_parameters import Init, PartitionedParamStatus, ZeroParamStatus
from torch import nn
from transformers import PreTrainedModel

from ...errors import ConfigError, require_names
from ...plugin_api import (
    LOAD,
    Item,
    OpenCheckpoint,
    bytes_text,
    collective_device,
    count_text,
    install_model_rows,
    installed,
    local_device,
    meeting,
    own_range,
    zero3,
)
from . import FROM_FILES
from .arena import Arena
from .supply import Supply
from .weights import FrozenWeight, WeightFiles, arena_bytes


logger = logging.getLogger(__name__)

require_names("deepspeed", Init, "_ensure_availability_of_partitioned_params", purpose="frozen weights in files")


class ReadFor(Enum):
    """Whom a partition is read for, and so who says that a rank could not read one, or that a file has changed."""

    ONE_RANK = auto()
    """One, for itself: it raises."""
    GATHER = auto()
    """All ranks, which gather it: they agree before it."""
    MODULE = auto()
    """All ranks, for a module that is called by itself: the same."""
    PASS = auto()
    """All ranks, in a pass through the model: they agree at its end, or before the step of the optimizer."""


class FileSwapper:
    """The weights of one model that stay in files."""

    def __init__(self, checkpoint: OpenCheckpoint, ds_config: Mapping[str, Any]) -> None:
        """`checkpoint`: of the load, which knows its files when :meth:`take` is called."""
        _refuse_settings(ds_config)
        self._checkpoint, self._zero = checkpoint, zero3.parsed(ds_config.get("zero_optimization", {}))
        self._frozen_bytes = int(checkpoint.config.frozen_bytes)
        self.micro_batches = checkpoint.config.micro_batches_in_layers
        self._taken: dict[int, FrozenWeight] = {}
        """What was taken and has no partition yet, by the parameter's ``id``."""
        self._weights: dict[int, FrozenWeight] = {}
        """What stays in files, by the parameter's ``ds_id``."""
        self._allocate: dict[int, Callable[[], None]] = {}
        """What makes the partition of one that is read into memory after all."""
        self._files: WeightFiles
        self._in_order: dict[int, bool] = {}
        """Of the partitions that are there: whether a step has asked for them."""
        self._thread = threading.local()  # a save reads in others, beside a pass
        self._passing: list[nn.Module] = []
        """The models whose forward pass is on, one inside the other."""
        self._awaits_step = False
        """Whether a pass is over for which the optimizer will agree; checkpointing goes through modules again."""
        self._failure: BaseException | None = None
        """Why this rank has given zeros in place of a weight, since the ranks agreed last."""
        self.has_optimizer = self._has_warned_of_tokens = False
        install_model_rows()  # outside of streaming(), too, nothing is merged into what lies in files
        installed(FROM_FILES).while_alive(self)

    # ------------------------------------------------------------------------------------------------ the load

    def take(self, model: nn.Module, items: dict[int, Item]) -> str:
        """Take from `items`, by the parameter's ``id``, what stays in files; returns where values are, in words."""
        self._files = WeightFiles(self._checkpoint)
        weakref.finalize(self, self._files.close)
        smallest, without_file = self._zero.param_persistence_threshold, 0
        for param in filter(zero3.is_placeholder, model.parameters()):
            if param.numel() <= smallest:  # small ones are in full on every rank at all times
                continue
            item = items.get(id(param))  # none of what is quantised while it is loaded, or initialised
            weight = None if item is None else self._files.weight_of(item)
            if weight is None:
                without_file += 1
            else:
                self._taken[id(param)] = weight
                del items[id(param)]
        self._files.open(self._taken)
        self._refuse_small_arena(self._taken)
        nbytes = sum(weight.nbytes for weight in self._taken.values())
        ranks = "" if dist.get_world_size() == 1 else " a rank"
        text = f"ZeRO-3 partitions; {count_text(len(self._taken), 'parameter')} ({bytes_text(nbytes)}{ranks}) "
        others = f"; {count_text(without_file, 'other')}, whose values no file has, in memory" if without_file else ""
        return f"{text}stay in files{others}"

    def has_taken(self, param: nn.Parameter) -> bool:
        return id(param) in self._taken

    def adopt(self, param: Any, init: Any, allocate: Callable[[], None]) -> None:
        """Be the swapper of a parameter that was taken; `allocate` would make its partition in memory.

        `init` is the ``zero.Init`` that gathers it.
        """
        numel, _, _ = own_range(param)
        partition: Any = torch.empty(0, dtype=param.dtype)
        partition.requires_grad = False
        partition.ds_numel, partition.final_location = numel, OffloadDeviceEnum.nvme
        partition.status = PartitionedParamStatus.NOT_AVAILABLE
        param.ds_tensor, param.ds_numel_aligned, param.nvme_swapper = partition, param.aligned_size(), self
        param._hf_zero_stream_in_files = True
        self._weights[param.ds_id] = self._taken.pop(id(param))
        self._allocate[param.ds_id] = allocate
        # Gathered together, the weights of a layer's experts would be there twice.
        init.allgather_sequential = True

    def _refuse_small_arena(self, weights: Mapping[int, FrozenWeight]) -> None:
        largest = max(weights.values(), key=lambda weight: weight.nbytes, default=None)
        if largest is not None and 0 < self._frozen_bytes < largest.nbytes:
            raise ConfigError(
                f"frozen_bytes: expected at least {largest.nbytes}, this rank's part of {largest.name}; got "
                f"{self._frozen_bytes}. Twice the largest layer lets it read ahead."
            )

    # ------------------------------------------------------------------------------- what DeepSpeed asks a swapper

    def swap_in(self, params: Sequence[Any], async_op: bool = True, swap_in_buffers: Any = None) -> None:
        """Give partitions to `params`, of this swapper or of others; :attr:`ReadFor.ONE_RANK` may call it alone."""
        for param in params:
            if param.nvme_swapper is not self:
                param.nvme_swapper.swap_in([param], async_op=False)
                continue
            param.ds_tensor.data = self._bytes_of(param).view(param.ds_tensor.dtype)  # a cast does not reach it
            param.ds_tensor.status = PartitionedParamStatus.AVAILABLE

    def remove_partition_and_release_buffers(self, params: Sequence[Any]) -> None:
        for param in params:
            partition = param.ds_tensor
            # What is in flight DeepSpeed lets go of too early; its gather still reads it.
            if param.ds_status == ZeroParamStatus.INFLIGHT or partition.status != PartitionedParamStatus.AVAILABLE:
                continue
            memory = partition.data.view(torch.uint8)
            partition.data = torch.empty(0, dtype=partition.dtype)
            partition.status = PartitionedParamStatus.NOT_AVAILABLE
            # What somebody else has gathered may have been written to: on one rank, in place.
            self._supply.give_back(param.ds_id, memory, keeps=self._in_order.pop(param.ds_id))

    def synchronize_reads(self) -> None:
        """Nothing is in flight to DeepSpeed: a partition is there when it is asked for."""

    def available_swap_in_buffers(self) -> int:
        return len(self._weights)

    @cached_property
    def _supply(self) -> Supply:
        nbytes = self._frozen_bytes or arena_bytes({it.name: it.nbytes for it in self._weights.values()})
        arena, whole_layers = Arena(nbytes, local_device()), self.micro_batches > 1
        return Supply(self._weights, self._files, arena, whole_layers=whole_layers)

    def _bytes_of(self, param: Any) -> torch.Tensor:
        number, in_order = param.ds_id, self._read_for in (ReadFor.MODULE, ReadFor.PASS)
        try:
            memory = self._supply.take(number, in_order=in_order)
            if self._read_for is ReadFor.ONE_RANK:
                self._files.check()
        except Exception as error:
            if self._read_for is ReadFor.ONE_RANK or dist.get_world_size() == 1:
                raise
            # The other ranks are about to gather it with this one, and would wait for ever.
            self._failure = self._failure or error
            memory, in_order = torch.zeros(self._weights[number].nbytes, dtype=torch.uint8), False
        self._in_order[number] = in_order
        return memory

    # ---------------------------------------------------------------------------------------------- a training

    @contextmanager
    def reading_for(self, whom: ReadFor) -> Iterator[None]:
        before, self._thread.reads_for = self._read_for, whom
        try:
            yield
        finally:
            self._thread.reads_for = before

    @property
    def _read_for(self) -> ReadFor:
        return getattr(self._thread, "reads_for", ReadFor.ONE_RANK)

    def fetching(self, *, forward: bool) -> AbstractContextManager[None]:
        """Inside, DeepSpeed fetches what a module needs, on all ranks, in a `forward` pass or a backward one."""
        agrees_later = self._passing or self._awaits_step or not forward
        return self.reading_for(ReadFor.PASS if agrees_later else ReadFor.MODULE)

    @contextmanager
    def gathering(self, params: Sequence[Any]) -> Iterator[None]:
        """Inside, DeepSpeed asks for partitions of what is about to be gathered, on all ranks."""
        if self._read_for is ReadFor.PASS:
            yield
            return
        with self.reading_for(ReadFor.MODULE if self._read_for is ReadFor.MODULE else ReadFor.GATHER):
            yield
        try:
            self.agree()
        except Exception:
            self.remove_partition_and_release_buffers([param for param in params if param.nvme_swapper is self])
            raise

    def follow(self, model: nn.Module) -> None:
        """Follow passes through `model`, and through a model that it wraps: PEFT's ``generate`` calls that."""
        modules = [*model.modules()]
        models = [module for module in modules if isinstance(module, PreTrainedModel)]
        for module in modules:
            if module is model or any(inner in models for inner in module.modules()):
                module.register_forward_pre_hook(self.begin_pass, prepend=True)  # before DeepSpeed fetches for it
                module.register_forward_hook(self.end_pass, always_call=True)
        with self.together():
            self._supply  # noqa: B018 - its memory is pinned, for which a host may have no room

    def begin_pass(self, module: nn.Module, args: Any) -> None:
        """A pass through the model begins."""
        if not self._passing:
            self._supply.begin_pass(f"{'training' if torch.is_grad_enabled() else 'inference'} of {id(module)}")
        self._passing.append(module)

    def end_pass(self, module: nn.Module, args: Any, output: Any) -> None:
        """The forward pass is over: no optimizer may come and agree."""
        if module in self._passing:
            del self._passing[self._passing.index(module) :]
        has_raised = output is None
        if self._passing or has_raised:
            return
        self._awaits_step = self.has_optimizer and torch.is_grad_enabled()
        if not self._awaits_step:
            self.agree()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Raise what one rank raises inside, on all ranks, at its end."""
        try:
            yield
        except Exception as error:
            self._failure = self._failure or error
        self.agree()

    def agree(self) -> None:
        """Raise, on all ranks, if one of them could not read a weight, or sees that a file has changed."""
        try:
            self._files.check()
        except Exception as error:
            self._failure = self._failure or error
        failure, self._failure, self._awaits_step = self._failure, None, False
        if dist.get_world_size() > 1:
            failed = torch.tensor(int(failure is not None), device=collective_device())
            dist.all_reduce(failed, dist.ReduceOp.MAX)
            if failed.item():
                with meeting(LOAD, "frozen weights") as coordinator:
                    coordinator.agree(failure)
        if failure is not None:
            raise failure

    def bring_in(self, params: Collection[Any]) -> int:
        """Read `params`, or those of them that stay in files, into memory for good; returns how many (all ranks)."""
        own = [
            param for param in params if getattr(param, "nvme_swapper", None) is self and param.ds_id in self._weights
        ]
        with self.together():
            for param in own:
                weight = self._weights.pop(param.ds_id)
                memory = torch.empty(weight.nbytes, dtype=torch.uint8)
                self._files.read(weight, memory)
                self._allocate.pop(param.ds_id)()
                param.ds_tensor.copy_(memory.view(param.ds_tensor.dtype))
                param.nvme_swapper, param._hf_zero_stream_in_files = None, False
        return len(own)

    def differs_from_file(self, param: Any, partition: torch.Tensor | None = None) -> bool:
        """Whether a `partition`, or this rank's elements of a parameter in full, has other values than its file."""
        weight, (_, start, stop) = self._weights[param.ds_id], own_range(param)
        memory = torch.empty(weight.nbytes, dtype=torch.uint8)
        self._files.read(weight, memory)
        values = param.detach().contiguous().view(-1)[start:stop] if partition is None else partition[: stop - start]
        own = values.cpu().view(torch.uint8)
        return not torch.equal(own, memory[: own.numel()])

    def warn_of_tokens(self) -> None:
        if self._has_warned_of_tokens or dist.get_rank() != 0:
            return
        self._has_warned_of_tokens = True
        nbytes = sum(weight.plan.cost.bytes_read for weight in self._weights.values())
        logger.warning(
            f'generate reads {bytes_text(nbytes)} from files on every rank for each token (frozen_weights="files"). '
            "To generate much, load the model with its weights in memory, or give it to an inference engine."
        )

    def name_of(self, param: Any) -> str:
        return self._weights[param.ds_id].name

    @property
    def bytes_read(self) -> int:
        """Bytes that this rank has read in steps."""
        return self._supply.bytes_read


def swappers_of(params: Collection[Any]) -> list[FileSwapper]:
    found = (getattr(param, "nvme_swapper", None) for param in params)
    return [*dict.fromkeys(swapper for swapper in found if isinstance(swapper, FileSwapper))]


def _refuse_settings(ds_config: Mapping[str, Any]) -> None:
    """Refuse what keeps weights in another place, or would make others of them."""
    zero = ds_config.get("zero_optimization", {})
    reasons = {
        "offload_param.device: nvme": (zero3.uses_nvme(ds_config), "writes all weights to swap files"),
        "zero_hpz_partition_size": (zero.get("zero_hpz_partition_size", 1) > 1, "keeps copies of all weights"),
        "zero_quantized_weights": (zero.get("zero_quantized_weights"), "was never tried with weights in files"),
        "zero_quantized_nontrainable_weights": (
            zero.get("zero_quantized_nontrainable_weights"),
            "quantises partitions in memory",
        ),
        "expert_parallel": ((ds_config.get("expert_parallel") or {}).get("enabled"), "converts experts in memory"),
        "tensor_parallel.autotp_size": (
            (ds_config.get("tensor_parallel") or {}).get("autotp_size", 0) > 1,
            "cuts weights in memory",
        ),
    }
    zero3.refuse_settings(
        reasons, 'with frozen_weights="files" they stay in the checkpoint\'s files. Remove one of the two.'
    )
