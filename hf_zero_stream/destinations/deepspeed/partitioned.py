"""ZeRO-3: each parameter is partitioned over the ranks, on the device, in host memory or in swap files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.zero import partition_parameters
from deepspeed.runtime.zero.partition_parameters import Init, get_all_subclasses
from torch import nn

from ...checkpoint.lazy import LazyTensor
from ...checkpoint.nodes import Node
from ...errors import UnsupportedError
from ...holdings.deepspeed import partitions
from ...planning.plan import Target, partition_range
from ...ranks.coordinator import Coordinator
from ...registry import import_object, tool
from ..base import Batch, Destination, Item, buffer_on, flat_items, replace_lazy
from ..initialise import run_with_touched_parameters
from . import zero3


class Partitioned(Destination):
    """The partitions of a model that is built under ZeRO-3; a plan may be without a config.

    If the caller is in a ``zero.Init``, that is `around`, and `ds_config` agrees with it.
    """

    into, trained_by = "ZeRO-3 partitions", "deepspeed"

    hides_zero3 = True
    takes_packed = True
    fills_missing = True

    def __init__(
        self,
        ds_config: Mapping[str, Any],
        coordinator: Coordinator,
        around: Init | None = None,
    ) -> None:
        self.device = partitions.local_device()
        self._around = around
        self.stock_reader = "rank 0" if around is None else ""
        self._ds_config = ds_config
        self.fills_device = not zero3.offloads(ds_config)
        self._coordinator = coordinator
        self._dtype = zero3.partition_dtype(ds_config) if ds_config else None
        self._model: nn.Module | None = None
        self._swapped: list[nn.Parameter] = []
        self.file_swapper: Any = None
        """What a plug-in brings to read some partitions whenever they are needed, in place of this load."""

    def refuse_packed(self) -> None:
        zero3.refuse_packed(self._ds_config)

    def dtype(self, wanted: torch.dtype | None) -> torch.dtype | None:
        """The dtype of DeepSpeed's config, as in stock."""
        self._dtype = self._dtype or wanted
        return self._dtype

    def batches(
        self, model: nn.Module, missing: set[str], tied: set[str], *, only_planned: bool = False
    ) -> list[Batch]:
        """One batch of all that is neither quantised nor swapped to a disk; and further ones for those."""
        rank, world_size = self._coordinator.rank, self._coordinator.world_size
        if (self._ds_config.get("expert_parallel") or {}).get("enabled"):
            experts = tool("experts", "autoep", "expert_parallel")  # wants a DeepSpeed that has AutoEP
            experts.convert(model, self._ds_config, missing, rank, world_size, make_groups=not only_planned)
        parameters, buffers, self.recast = replace_lazy(
            model, missing, tied, parameter=self._parameter, buffer=partial(buffer_on, self.device)
        )
        items: dict[int, Item] = {}
        joint: list[tuple[str, Node, Callable[[torch.Tensor], None]]] = []
        for name, (param, view) in parameters.items():
            if view.node.joint_batches:
                joint.append((name, view.node, partial(_copy_own_part, param)))
                continue
            target = Target(name, param.dtype, *self._share(param))
            items[id(param)] = Item(target, view, partial(getattr, param, "ds_tensor"))
        self._model = model
        swapped = self._swap_batches(model, items) if zero3.uses_nvme(self._ds_config) else []
        if self.file_swapper is not None:
            self.into = self.file_swapper.take(model, items)
        batches = [Batch([*items.values(), *flat_items(buffers)])]
        if joint:
            batches += import_object(joint[0][1].joint_batches)(joint, self._coordinator, self.device)
        return batches + swapped

    def _swap_batches(self, model: nn.Module, items: dict[int, Item]) -> list[Batch]:
        """Move the parameters that PartitionedInit will swap from `items` into batches, before there is a swapper."""
        nvme = zero3.nvme()
        large = nvme.swap_from_bytes(self._ds_config)
        self._swapped = [
            param
            for param in filter(zero3.is_placeholder, model.parameters())
            if param.dtype == self._dtype and self._share(param)[0] * param.dtype.itemsize >= large
        ]
        swaps = [(param, items.pop(id(param), None)) for param in self._swapped]
        batches: list[Batch] = nvme.swap_batches(swaps, nvme.free_buffers(self._ds_config)) if swaps else []
        return batches

    def _share(self, param: Any) -> tuple[int, int, int]:
        place = zero3.place_in_group(param, self._coordinator.rank, self._coordinator.world_size)
        return partition_range(param.numel(), *place)

    def _parameter(self, name: str, param: torch.Tensor) -> nn.Parameter:
        dtype = self._dtype if self._dtype is not None and param.is_floating_point() else param.dtype
        requires_grad = param.requires_grad if isinstance(param, LazyTensor) else param.is_floating_point()
        return zero3.placeholder(name, param.shape, dtype, self.device, requires_grad)

    def check(self, targets: Sequence[Target]) -> None:
        if zero3.uses_nvme(self._ds_config):
            zero3.nvme().refuse_wrong_settings(self._ds_config, targets)

    def allocate(self) -> None:
        model, self._model = self._model, None
        assert model is not None
        zero3.PartitionedInit(model, self._ds_config, self._swapped, self._around, self.file_swapper)

    def initialise(self, initialise: Callable[[], None], module: nn.Module) -> None:
        run_with_touched_parameters(initialise, module, partitions.is_partitioned, self._fetched)

    def _fetched(self, touched: Sequence[Any]) -> AbstractContextManager[None]:
        if not touched:  # the checkpoint has nearly all parameters of nearly all models
            return nullcontext()
        from ...holdings.deepspeed.partitions import gathered_params

        return gathered_params(self._coordinator, touched)


def _copy_own_part(param: Any, row: torch.Tensor) -> None:
    """Copy this rank's elements of `row`, all of a parameter's, into its partition."""
    _, start, stop = partitions.own_range(param)
    param.ds_tensor[: stop - start].copy_(row[start:stop])


_CONSTRUCTORS = ("tensor", "empty", "zeros", "ones", "full", "arange", "eye", "randn")
"""The functions of torch that ``zero.Init`` replaces."""


@contextmanager
def outside_zero_init() -> Iterator[None]:
    """Suspend a ``zero.Init`` that the caller is in: under it, torch's constructors give other dtypes and devices.

    What somebody has put in place of DeepSpeed's wrappers, or around them, is there during and after it. DeepSpeed
    itself would restore the ``__init__`` that it noted when a class was made, also where a decorator has replaced it
    since, as transformers' do in a modeling file that is first imported inside ``zero.Init``.
    """
    context = partition_parameters.top_level_context
    if context is None or not context.patched:
        yield
        return
    inits = {cls: vars(cls)["__init__"] for cls in get_all_subclasses(nn.Module) if "__init__" in vars(cls)}
    replaced = [(torch, name) for name in _CONSTRUCTORS] + [(nn.Module, "apply")]
    found = [(owner, name, getattr(owner, name)) for owner, name in replaced]
    # Inside a decorator's __init__, DeepSpeed's stays, and there it stays when zero.Init is left, too.
    context._post_init_method = lambda module: context.patched and type(context)._post_init_method(context, module)
    partition_parameters.shutdown_init_context()
    for cls, init in inits.items():
        if vars(cls)["__init__"] is not init and not _is_of_deepspeed(init):
            cls.__init__ = init
    try:
        yield
    finally:
        partition_parameters.restore_init_context()
        for owner, name, value in found:
            setattr(owner, name, value)


def _is_of_deepspeed(function: Any) -> bool:
    return getattr(function, "__globals__", None) is vars(partition_parameters)


def open_init() -> Init | None:
    """The ``zero.Init`` that the caller is in; of nested ones the outermost, which decides on all that they hold."""
    return partition_parameters.top_level_context


def config_of(around: Init, found: Mapping[str, Any]) -> dict[str, Any]:
    """The DeepSpeed config `found`, in which `around` decides on what it has decided already.

    Raises an UnsupportedError if it partitions in another way than over all ranks in DeepSpeed's dtype.
    """
    kind, ranks = type(around), dist.get_world_size()
    if kind is not Init:
        raise UnsupportedError(
            f"from_pretrained inside {kind.__name__}: expected zero.Init itself; got a subclass, which partitions in "
            "its own way. Load without streaming()."
        )
    if around.dp_world_size != ranks:
        raise UnsupportedError(
            f"from_pretrained inside zero.Init: expected a data_parallel_group of all {ranks} ranks; got one of "
            f"{around.dp_world_size}. All ranks load together: leave the group out."
        )
    if around.tensor_overrides != partition_parameters.DEFAULT_TENSOR_OVERRIDES:
        raise UnsupportedError(
            "from_pretrained inside zero.Init: expected it to set dtype and device of all parameters, as it does by "
            f"default; got tensor_overrides={around.tensor_overrides}. Leave them out."
        )
    zero = {
        **found.get("zero_optimization", {}),
        "stage": 3,
        "offload_param": _offload(around),
        "zero_quantized_weights": around.quantized_weights,
        "zero_quantized_nontrainable_weights": around.quantized_nontrainable_weights,
        "zero_hpz_partition_size": 1 if around.zero_param_process_group is None else around.num_ranks_in_param_group,
    }
    config = {
        **found,
        "zero_optimization": zero,
        "bf16": {**(found.get("bf16") or {}), "enabled": around.dtype == torch.bfloat16},
        "fp16": {**(found.get("fp16") or {}), "enabled": around.dtype == torch.float16},
    }
    config.pop("bfloat16", None)  # another name of bf16
    if around.quantized_initialization:
        config["weight_quantization"] = {"quantized_initialization": around.quantized_initialization}
    if around.param_swapper is not None:
        config["aio"] = around.param_swapper.aio_config
        zero3.nvme().share_swapper(config, around.param_swapper)
    return config


def _offload(around: Init) -> dict[str, Any] | None:
    if around.param_swapper is not None:
        settings: dict[str, Any] = around.param_swapper.swap_config.model_dump()
        return settings
    if around.remote_device == around.local_device:
        return None
    return {"device": torch.device(around.remote_device).type, "pin_memory": around.pin_memory}
