"""Models that ``from_pretrained`` leaves lazy, because DeepSpeed's AutoTP will cut them.

``deepspeed.initialize`` cuts such a model with its own code, which meets lazy tensors: what it keeps of a parameter is
a view of the checkpoint's tensors, whatever it has done to get there, and has no memory. Then each rank reads what is
kept of each, and ranks read for each other what DeepSpeed has left whole.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from ..accelerators import collective_device
from ..checkpoint.lazy import LazyTensor, materialise_written
from ..destinations.base import fill_whole
from ..destinations.deferred import InPlace
from ..destinations.replicated import chunk_bytes
from ..errors import UnsupportedError
from ..holdings.holding import LocalShard
from ..holdings.shards import local_shard_of
from ..ranks.coordinator import Coordinator, expected_at, meeting
from ..ranks.rendezvous import LOAD
from .deferral import deferrals_of


def apply_partitioning(original: Callable[..., Any], self: Any, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Have DeepSpeed cut a lazy model, and read this rank's parts (all ranks)."""
    deferrals = deferrals_of(model)
    if not deferrals:
        return original(self, model, *args, **kwargs)
    with expected_at(LOAD), meeting(LOAD) as coordinator:
        materialise_written(model.parameters())
        lazy = _lazy(model)
        if any(others != lazy.keys() for others in coordinator.all_gather(set(lazy))):  # some ranks have used it
            fill_whole(model)
        nodes = {id(param): param.node for param in lazy.values()}
        result = original(self, model, *args, **kwargs)
        # What DeepSpeed has touched on any rank may be a part.
        whole = {name for name, param in _lazy(model).items() if nodes.get(id(param)) is param.node}
        whole.intersection_update(*coordinator.all_gather(whole))
        owners = {deferral: deferral.detach(model) for deferral in deferrals}
        if self.zero_optimization_stage() in (1, 2):
            from ..destinations.deepspeed.flat import flatten_sharded

            flatten_sharded(model)
        device, held = collective_device(), partial(_held, coordinator)
        for deferral in deferrals:
            chunk = chunk_bytes(deferral.config, device)
            destination = InPlace(deferral, coordinator, device, whole, chunk, held)
            destination.into = "the parts that AutoTP has cut"
            report: Any = deferral.fill(model, coordinator, destination)
            for owner in owners[deferral]:
                owner.streaming_report = report
        return result


def configure_model(original: Callable[..., Any], self: Any, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The way of all engines: one that has not cut a lazy model wants all of it."""
    fill_whole(model)
    return original(self, model, *args, **kwargs)


def _held(coordinator: Coordinator, name: str, param: torch.Tensor) -> LocalShard | None:
    """Return the local shard of parameter `name` that the lazy `param` is; None if DeepSpeed's map does not say."""
    try:
        return local_shard_of(name, param, None, coordinator)
    except UnsupportedError:
        return None


def _lazy(model: nn.Module) -> dict[str, LazyTensor]:
    return {name: param for name, param in model.named_parameters() if isinstance(param, LazyTensor)}
