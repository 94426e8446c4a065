"""What is called where others take hold of lazy models: accelerate shards them by FSDP2, or wants all of their values.

``accelerator.prepare()`` shards such a model on the meta device, with all of accelerate's own options, and then each
rank reads its own shards only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Set
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ..accelerators import collective_device
from ..checkpoint.lazy import LazyTensor, materialise_written
from ..checkpoint.nodes import HostTensor
from ..destinations.base import fill_whole
from ..destinations.parallel import DTensors
from ..ranks.coordinator import Coordinator, expected_at, meeting
from ..ranks.rendezvous import LOAD
from ..seams.wrappers import ignored_by_fsdp2
from ..settings.scope import set_in_context
from .deferral import deferrals_of


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


def fill_first(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """The way of all models that nobody shards, or cuts, while they are lazy: what takes hold of one wants all of it.

    By accelerate, if not by FSDP2; by DDP and FSDP 1 by hand; by an engine of DeepSpeed.
    """
    for model in (*args, *kwargs.values()):
        if isinstance(model, nn.Module):
            fill_whole(model)
    return original(self, *args, **kwargs)


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


class _ModuleKey(NamedTuple):
    """The place of a tensor: a module, and the key of its parameters or buffers."""

    module: nn.Module
    key: str


class MetaReplacement:
    """Replaces the parameters of `model` by meta tensors, and remembers their values and its buffers (all ranks).

    What is not `lazy` on all ranks gets rank 0's values, as in accelerate's own loading: adapters, and parameters that
    the checkpoint lacks, whose random values may differ between ranks.

    Args:
        lazy: names of parameters.
    """

    def __init__(self, model: nn.Module, lazy: Set[str], accelerator: Any, coordinator: Coordinator) -> None:
        self._device: torch.device = accelerator.device
        self._coordinator = coordinator
        ignored = {id(param) for param in ignored_by_fsdp2(accelerator, model)}
        places: dict[int, list[_ModuleKey]] = defaultdict(list)
        for module in model.modules():
            for key, param in module._parameters.items():
                if param is not None:
                    places[id(param)].append(_ModuleKey(module, key))
        reader = next(param.reader for name, param in model.named_parameters() if name in lazy)
        self._sources: list[tuple[LazyTensor, list[_ModuleKey]]] = []
        """The origin of each parameter's values, and all places where the parameter is."""
        for name, param in list(model.named_parameters()):  # a list, because places change
            values = param.detach()
            if name not in lazy:
                values = LazyTensor.whole(HostTensor.of(self._from_rank_0(values)), reader)
            self._sources.append((values, places[id(param)]))
            # FSDP2 has accelerate move what it ignores to the device, where a meta tensor cannot go.
            device = self._device if id(param) in ignored else torch.device("meta")
            empty = torch.empty(param.shape, dtype=param.dtype, device=device)
            _set_everywhere(nn.Parameter(empty, requires_grad=param.requires_grad), places[id(param)])
        self._buffers = [
            (_ModuleKey(module, key), buffer)
            for module in model.modules()
            for key, buffer in module._buffers.items()
            if buffer is not None
        ]

    def _from_rank_0(self, values: torch.Tensor) -> torch.Tensor:
        if self._coordinator.is_alone:
            return values
        if isinstance(values, LazyTensor):
            values = (
                values.materialise() if self._coordinator.is_main else torch.empty(values.shape, dtype=values.dtype)
            )
        everyones = values.to(collective_device(), memory_format=torch.contiguous_format)
        self._coordinator.run(dist.broadcast, everyones, 0)
        return everyones.cpu()

    def put_back(self, model: nn.Module, *, shares_reads: bool) -> DTensors:
        """Put lazy values and buffers into the sharded `model`; returns its destination (see that for the rest)."""
        for (module, key), buffer in self._buffers:
            module._buffers[key] = buffer.to(self._device)
        destination = DTensors(self._coordinator, self._device, shares_reads=shares_reads)
        destination.observe(model)
        for values, places in self._sources:
            module, key = places[0]
            sharded = module._parameters[key]
            assert sharded is not None
            # accelerate trains in fp32 what mixed precision computes in another dtype.
            lazy = nn.Parameter(values.to(sharded.dtype), requires_grad=sharded.requires_grad)
            _set_everywhere(lazy, places)
        return destination


def _set_everywhere(param: nn.Parameter, places: list[_ModuleKey]) -> None:
    for module, key in places:
        setattr(module, key, param)
