"""Models that ``from_pretrained`` leaves lazy: accelerate will shard them by FSDP2, or a plug-in says what comes.

``accelerator.prepare()`` shards such a model on the meta device, with all of accelerate's own options, and then each
rank reads its own shards only. A model that is used before, or never prepared, reads all of itself.

In ``from_pretrained`` a rank reads headers and buffers, alone: ranks may come to it minutes apart. They meet in
``prepare()``, as in stock, and compare there what each of them has opened.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from contextvars import ContextVar
from typing import Any, NoReturn

import torch
from torch import nn
from transformers.utils import logging

from ..bindings.table import DEFERRED, installed
from ..checkpoint.lazy import LazyTensor, materialise_written
from ..checkpoint.nodes import View
from ..destinations.base import Destination, fill_whole
from ..destinations.deferred import Deferred, InPlace
from ..engine.load import Load
from ..engine.opened import OpenCheckpoint
from ..errors import UnsupportedError
from ..holdings import fsdp
from ..ranks.coordinator import Coordinator, expected_at, meeting
from ..ranks.rendezvous import LOAD
from ..reports.load import LoadReport
from ..reports.measures import collector_paused
from ..settings.config import StreamingConfig
from ..settings.scope import set_in_context
from ..sources.by_path import mounted_by_plugin
from .meta_replacement import MetaReplacement


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
        load = Load(
            self.config, {}, coordinator, Deferred(self, self._attach, self._until, packing_unsupported_reason)
        )
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
                load.place(model, set(), set())
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


def prepare_fsdp2(original: Callable[..., Any], accelerator: Any, model: nn.Module) -> Any:
    """Have accelerate shard a lazy model on the meta device, and read this rank's shards."""
    deferrals = deferrals_of(model)
    if not deferrals:
        return original(accelerator, model)
    with expected_at(LOAD):
        with meeting(LOAD) as coordinator:
            first, *others = deferrals
            for other in others:  # their files have numbers of their own
                other.fill_whole(model)
            materialise_written(model.parameters())
            lazy = {name for name, param in model.named_parameters() if isinstance(param, LazyTensor)}
            # A rank may have used the model before.
            lazy.intersection_update(*coordinator.all_gather(lazy))
            if not lazy:
                fill_whole(model)
            owners = first.detach(model)
            for deferral in others:
                deferral.detach(model)
            if not lazy:
                return original(accelerator, model)
            replacement = MetaReplacement(model, lazy, accelerator, coordinator)
            with set_in_context(_is_sharding, True):
                model = original(accelerator, model)
            destination = replacement.put_back(model, shares_reads=not first.config.compares_values)
            destination.stock_reader = first.stock_reader
            report: Any = first.fill(model, coordinator, destination)
            for owner in owners:
                owner.streaming_report = report
            return model


_is_sharding: ContextVar[bool] = ContextVar("hf_zero_stream_is_sharding", default=False)


def load_full_state_dict(
    original: Callable[..., Any], accelerator: Any, model: nn.Module, *args: Any, **kwargs: Any
) -> Any:
    """Leave a model that is sharded for us on the meta device; rank 0 has no values either."""
    return model if _is_sharding.get() else original(accelerator, model, *args, **kwargs)


def prepare_model(original: Callable[..., Any], self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """The way of all models that FSDP2 does not shard."""
    if isinstance(model, nn.Module):
        fill_whole(model)
    return original(self, model, *args, **kwargs)


def wrap(original: Callable[..., Any], self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
    """The way of DDP and FSDP 1 by hand: they take hold of all parameters, which must be real by then."""
    fill_whole(module)
    original(self, module, *args, **kwargs)


def make_record(original: Callable[..., Any], self: Any, param: Any, *args: Any, **kwargs: Any) -> None:
    """Read a lazy parameter that somebody else's ``fully_shard`` cuts, for instance TRL's of a reference model."""
    if isinstance(param, LazyTensor):
        param.become(param.in_memory())
    original(self, param, *args, **kwargs)


def set_attribute(original: Callable[..., Any], self: nn.Parameter, name: str, value: Any) -> None:
    """Give a parameter that is not lazy, for instance of an adapter, values in memory and not a lazy tensor.

    torch would take the memory of the lazy tensor, which is none, and the process would crash at the next use.
    """
    if name == "data" and isinstance(value, LazyTensor):
        value = value.in_memory()
    original(self, name, value)


def resize_token_embeddings(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """The new rows depend on the old ones, and are written into them."""
    for embeddings in (self.get_input_embeddings(), self.get_output_embeddings()):
        if isinstance(embeddings, nn.Module):
            fill_whole(embeddings)
    return original(self, *args, **kwargs)


def configure_model(original: Callable[..., Any], self: Any, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The way of all engines of DeepSpeed: one that nobody has cut a lazy model for wants all of it."""
    fill_whole(model)
    return original(self, model, *args, **kwargs)
