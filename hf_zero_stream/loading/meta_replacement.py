"""The values of a model while accelerate shards it on the meta device."""

from __future__ import annotations

from collections.abc import Set
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ..accelerators import collective_device
from ..checkpoint.lazy import LazyTensor
from ..checkpoint.nodes import HostTensor
from ..destinations.dtensor import DTensors
from ..ranks.coordinator import Coordinator
from ..seams.wrappers import ignored_by_fsdp2


class _ModuleKey(NamedTuple):
    """The place of a tensor: a module, and the key of its parameters or buffers."""

    module: nn.Module
    key: str


class _Source(NamedTuple):
    """The origin of one parameter's values, and all places where the parameter is."""

    values: LazyTensor
    places: list[_ModuleKey]


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
        places = _places(model)
        reader = next(param.reader for name, param in model.named_parameters() if name in lazy)
        self._sources = []
        for name, param in list(model.named_parameters()):  # a list, because places change
            values = param.detach()
            if name not in lazy:
                values = LazyTensor.whole(HostTensor.of(self._from_rank_0(values)), reader)
            source = _Source(values, places[id(param)])
            # FSDP2 has accelerate move what it ignores to the device, where a meta tensor cannot go.
            device = self._device if id(param) in ignored else torch.device("meta")
            empty = torch.empty(param.shape, dtype=param.dtype, device=device)
            _set_everywhere(nn.Parameter(empty, requires_grad=param.requires_grad), source.places)
            self._sources.append(source)
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


def _places(model: nn.Module) -> dict[int, list[_ModuleKey]]:
    """All places of each parameter, by its ``id``."""
    found: dict[int, list[_ModuleKey]] = {}
    for module in model.modules():
        for key, param in module._parameters.items():
            if param is not None:
                found.setdefault(id(param), []).append(_ModuleKey(module, key))
    return found


def _set_everywhere(param: nn.Parameter, places: list[_ModuleKey]) -> None:
    for module, key in places:
        setattr(module, key, param)
