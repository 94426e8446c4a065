"""Models that ``from_pretrained`` leaves lazy: accelerate will shard them by FSDP2, or a plug-in says what comes.

In ``from_pretrained`` a rank reads headers and buffers, alone: ranks may come to it minutes apart. They meet where the
model is prepared (:mod:`.prepare`), and compare there what each of them has opened. A model that is used before, or
never prepared, reads all of itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from transformers.utils import logging

from ..bindings.table import DEFERRED, installed
from ..checkpoint.lazy import LazyTensor, copy_attributes
from ..checkpoint.nodes import View, WritableParameter
from ..destinations.base import Batch, Destination, allocating
from ..destinations.exchange import Sharing
from ..destinations.fill import NewModel, Targets, item_in, itself
from ..destinations.initialise import run_with_touched_parameters
from ..engine.load import Load
from ..engine.opened import OpenCheckpoint
from ..errors import UnsupportedError
from ..holdings import fsdp
from ..holdings.holding import LocalShard
from ..ranks.coordinator import Coordinator
from ..reports.load import LoadReport
from ..reports.measures import collector_paused
from ..settings.config import StreamingConfig
from ..sources.by_path import mounted_by_plugin


logger = logging.get_logger(__name__)

_ATTRIBUTE = "_hf_zero_stream_deferral"
"""The attribute by which a model knows its deferral, until it is prepared."""


class Deferral:
    """Reads a lazy model's values after the load. When it is called, it reads those of one view.

    The model, its hooks and its lazy parameters keep it alive, and it keeps none of them.
    """

    def __init__(
        self,
        config: StreamingConfig,
        stock_reader: str = "each rank",
        until: str = "accelerator.prepare() shards it by FSDP2",
    ) -> None:
        self.config = config
        self.stock_reader = stock_reader
        self._until = until
        self._checkpoint: OpenCheckpoint
        self._lock = threading.RLock()
        self._has_warned = False

    def load(self, coordinator: Coordinator, packing_unsupported_reason: str) -> Load:
        """A load that leaves a model's parameters lazy; weights may be packed unless there is a reason why not."""
        lazy = Deferred(coordinator, self, self._attach, self._until, packing_unsupported_reason)
        load = Load(self.config, {}, coordinator, lazy)
        self._checkpoint = load.checkpoint
        return load

    def __call__(self, view: View) -> torch.Tensor:
        alone = Coordinator.of_this_rank()
        with self._mounts(alone), closing(self._checkpoint.reopened(alone, torch.device("cpu"))) as checkpoint:
            return checkpoint.materialise(view)

    @contextmanager
    def _mounts(self, coordinator: Coordinator) -> Iterator[None]:
        """Inside, folders whose files another source gave at the load are read from such a one again."""
        with ExitStack() as stack:
            for folder in self._checkpoint.mounts:
                stack.enter_context(mounted_by_plugin(folder, coordinator))
            yield

    def __deepcopy__(self, memo: dict[int, Any]) -> Deferral:
        """The copy of a lazy model, or of a part of it, is read from the same files."""
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UnsupportedError(
            f"This model cannot be pickled, nor saved by torch.save: its values will be read when {self._until}. "
            "Save it with save_pretrained, or load it outside of streaming()."
        )

    def _attach(self, model: nn.Module) -> None:
        """Have `model`, or the part of it that is used, read itself when it is first used without accelerate."""
        vars(model)[_ATTRIBUTE] = self
        for module in model.modules():
            if any(isinstance(param, LazyTensor) for param in module.parameters()):
                module.register_forward_pre_hook(self.fill_whole)
                module.register_state_dict_pre_hook(self.fill_whole)
                module.register_load_state_dict_pre_hook(self.fill_whole)
        installed(DEFERRED).while_alive(self)

    def detach(self, model: nn.Module) -> list[nn.Module]:
        """Undo what was done to `model` for the time until it is prepared; returns what has been loaded in it."""
        owners = [module for module in model.modules() if vars(module).get(_ATTRIBUTE) is self]
        for module in owners:
            delattr(module, _ATTRIBUTE)
        for module in model.modules():
            self._remove_hooks(module)
        return owners

    def _remove_hooks(self, module: nn.Module) -> None:
        of_loading: Any = module._load_state_dict_pre_hooks
        for hooks in (module._forward_pre_hooks, module._state_dict_pre_hooks, of_loading):
            for key, hook in list(hooks.items()):
                # Those of load_state_dict are in objects of torch's own.
                if getattr(getattr(hook, "hook", hook), "__self__", None) is self:
                    del hooks[key]

    @torch.compiler.disable
    def fill_whole(self, module: nn.Module, *_: Any) -> None:
        """Read all values of the parameters of `module` that are lazy still, on this rank alone."""
        with self._lock:
            lazy = [p for p in module.parameters() if isinstance(p, LazyTensor) and p.reader is self]
            if lazy:
                self._warn_of_early_use(module)
                alone = Coordinator.of_this_rank()
                with alone.reporting():
                    self.fill(module, alone, InPlace(self, alone, lazy[0].device))
            for part in module.modules():
                self._remove_hooks(part)

    def _warn_of_early_use(self, module: nn.Module) -> None:
        if not self._has_warned and Coordinator.of_this_rank().is_main:
            logger.warning(
                f"hf_zero_stream: {type(module).__name__} is used before {self._until}. So each rank that uses it "
                "reads all of it now, as it would without streaming()."
            )
        self._has_warned = True

    @collector_paused()
    def fill(self, model: nn.Module, coordinator: Coordinator, destination: Destination) -> LoadReport:
        """Read into `destination` what is lazy in `model` (all ranks of `coordinator`)."""
        # They decide how ranks go on.
        coordinator.require_same(f"read_from={self.config.read_from!r} {self._checkpoint.mounts}")
        with torch.inference_mode(False), torch.no_grad(), self._mounts(coordinator):
            checkpoint = self._checkpoint.reopened(coordinator, destination.device)
            load = Load(self.config, {}, coordinator, destination, checkpoint)
            with closing(load), load.memory, load.clock("total"):
                load.refuse_other_copies()
                load.fill(model, set(), set())
            return load.finish(model, logger)


def load_for_fsdp2(config: StreamingConfig, coordinator: Coordinator, stock_reader: str) -> Load:
    """A load that leaves a model's parameters lazy, until accelerate shards it; `stock_reader` as in reports."""
    fsdp.param_class()  # raises a VersionError for one that is not known
    return Deferral(config, stock_reader).load(coordinator, fsdp.no_byte_shards_reason())


def deferrals_of(model: nn.Module) -> list[Deferral]:
    """Return the deferrals of `model` and of its parts, in an order that is the same on all ranks."""
    attached = [vars(module).get(_ATTRIBUTE) for module in model.modules()]
    readers = [param.reader for param in model.parameters() if isinstance(param, LazyTensor)]
    return [each for each in dict.fromkeys([*attached, *readers]) if isinstance(each, Deferral)]


class Deferred(NewModel):
    """Fills buffers only. Parameters that the checkpoint has stay lazy; those that it lacks are whole on every rank.

    Args:
        reader: reads the values of a lazy parameter that is used before it is filled.
        complete: called with the model that the user gets.
        until: when they will be filled, for the report.
        packing_unsupported_reason: why weights may not be packed; "" if they may.
    """

    leaves_lazy = True

    def __init__(
        self,
        coordinator: Coordinator,
        reader: Deferral,
        complete: Callable[[nn.Module], None],
        until: str,
        packing_unsupported_reason: str,
    ) -> None:
        super().__init__(coordinator)
        self.into, self.until = f"lazy tensors, which are read when {until}", until
        self.packing_unsupported_reason = packing_unsupported_reason
        self.takes_packed = not packing_unsupported_reason
        self._reader = reader
        self._complete = complete

    def _parameter(self, name: str, old: torch.Tensor) -> nn.Parameter | None:
        if not isinstance(old, LazyTensor):
            return None
        view = old.view_of_node
        if view.node.joint_batches:
            lazy = LazyTensor.of(view, self._reader)
        else:
            lazy = LazyTensor.whole(WritableParameter.of(view), self._reader)
        return nn.Parameter(lazy, requires_grad=old.requires_grad)

    def initialise(self, initialise: Callable[[], None], module: nn.Module) -> None:
        run_with_touched_parameters(initialise, module, lambda value: isinstance(value, LazyTensor), _fetched)

    def complete(self, model: nn.Module) -> None:
        self._complete(model)


@contextmanager
def _fetched(params: Sequence[Any]) -> Iterator[None]:
    """Give lazy `params` values, inside; afterwards those that were changed keep them."""
    originals = [nn.Parameter(param.detach(), requires_grad=param.requires_grad) for param in params]
    values = [param.materialise() for param in params]
    for param, value, original in zip(params, values, originals, strict=True):
        copy_attributes(param, original)
        param.become(value.clone())
    changed = True
    try:
        yield
        changed = False
    finally:
        for param, value, original in zip(params, values, originals, strict=True):
            if changed or torch.equal(param, value):
                torch.utils.swap_tensors(param, original)


class InPlace(Destination):
    """The lazy parameters that `reader` reads. Each becomes a real one of all its values, on its device.

    They stay the same objects, to which optimizers may refer.

    Args:
        replicated: names of parameters that are the same on all ranks, which read them for each other.
        chunk_bytes: size of one exchange of these.
        shard_of: the local shard that a parameter which is not `replicated` is, for the digest; None: not known, or
            whole.
    """

    into = "a model that is used before it is sharded"

    exchange_settings: Sequence[str] = ("staging_bytes",)

    leaves_lazy = True  # those of other readers

    def __init__(
        self,
        reader: Deferral,
        coordinator: Coordinator,
        device: torch.device,
        replicated: Collection[str] = (),
        chunk_bytes: int = 0,
        shard_of: Callable[[str, torch.Tensor], LocalShard | None] = lambda name, param: None,
    ) -> None:
        self.device = device
        self._replicated = replicated
        self._chunk_bytes = chunk_bytes
        self._shard_of = shard_of
        self._reader = reader
        self._coordinator = coordinator
        self._values: list[tuple[LazyTensor, torch.Tensor | None]] = []
        self._memory: dict[WritableParameter, torch.Tensor] = {}

    def batches(self, model: nn.Module, missing: set[str], tied: set[str]) -> list[Batch]:
        targets = Targets(self._coordinator, Sharing(self._coordinator, room=self._chunk_bytes))
        for name, param in model.named_parameters():
            if not isinstance(param, LazyTensor) or param.reader is not self._reader:
                continue
            node, view = param.node, param.view_of_node
            if isinstance(node, WritableParameter):
                self._values.append((param, None))
                if node.memory is not None or node in self._memory:
                    continue
                view = View.whole(node.unwritten)
            with allocating(name, param.nbytes, param.device, self._coordinator.rank):
                values = torch.empty(view.sizes, dtype=param.dtype, device=param.device)
            if isinstance(node, WritableParameter):
                self._memory[node] = values.view(-1)
            else:
                self._values.append((param, values))
            flat, whole = values.view(-1), LocalShard.whole(view.sizes)
            if name in self._replicated:
                targets.add(name, flat, view, whole, values)
                continue
            held = self._shard_of(name, param)
            shard = whole if held is None or held.box.numel != flat.numel() else held
            targets.alone.append(item_in(shard, name, view, flat.dtype, partial(itself, flat)))
        return targets.batches()

    def complete(self, model: nn.Module) -> None:
        for node, memory in self._memory.items():
            node.memory = memory
        for param, values in self._values:
            param.become(param.in_memory() if values is None else values)
        self._values, self._memory = [], {}
