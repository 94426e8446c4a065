"""Shards made whole for a while, for a model's own initialisation code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ..accelerators import collective_device
from ..holdings.holding import LocalShard
from ..holdings.introspection import local_of
from ..planning.boxes import ParameterBox
from ..ranks.coordinator import Coordinator
from .base import random_state, run_with_touched_parameters, set_random_state


class WholeParameters:
    """Makes parameters whole for a model's own initialisation code, with rank 0's random numbers on all ranks.

    So shards never repeat rows, and replicas never differ: all is as if rank 0 had initialised the whole model.

    Args:
        missing: names of the parameters that have no values yet.
    """

    def __init__(
        self, model: nn.Module, shards: Mapping[str, LocalShard], missing: Iterable[str], coordinator: Coordinator
    ) -> None:
        self._model, self._shards, self._missing = model, shards, set(missing)
        self._coordinator = coordinator
        self._names: dict[int, list[str]] = {}
        for name, param in model.named_parameters(remove_duplicate=False):
            if isinstance(param, DTensor):
                self._names.setdefault(id(param), []).append(name)
        for names in self._names.values():
            names.sort(key=lambda name: name not in shards)
        self._rank_0_state: Any = None

    def initialise(self, initialise: Callable[[], None], module: nn.Module) -> None:
        own_state = random_state()
        if self._rank_0_state is None:
            self._rank_0_state = self._coordinator.broadcast(random_state)
            self._has_rank_0_state = _equal(own_state, self._rank_0_state)
        if not self._has_rank_0_state:
            set_random_state(self._rank_0_state)
        try:
            run_with_touched_parameters(initialise, module, lambda value: id(value) in self._names, self._fetched)
        finally:
            if not self._has_rank_0_state:
                self._rank_0_state = random_state()
                set_random_state(own_state)

    @contextmanager
    def _fetched(self, params: Sequence[Any]) -> Iterator[None]:
        """Replace `params` by whole parameters, inside; what is written to those is kept."""
        whole = {names[0]: self._gathered(names[0], param) for param in params if (names := self._names[id(param)])}
        originals = {name: self._model.get_parameter(name) for name in whole}
        for name, values in whole.items():
            self._replace(self._names[id(originals[name])], values)
        try:
            yield
        finally:
            for name, original in originals.items():
                self._replace(self._names[id(original)], original)
        for name, original in originals.items():
            values = whole[name].detach()
            for block, within in self._shards[name].box.blocks() if name in self._shards else ():
                local_of(original)[_slices(within)].copy_(values[_slices(block)])
            original.requires_grad_(whole[name].requires_grad)  # some models freeze where they initialise
            self._missing.difference_update(self._names[id(original)])

    def _replace(self, names: Iterable[str], param: nn.Parameter) -> None:
        for name in names:
            path, _, key = name.rpartition(".")
            self._model.get_submodule(path)._parameters[key] = param

    def _gathered(self, name: str, param: Any) -> nn.Parameter:
        local, shard = local_of(param), self._shards.get(name)
        is_new = shard is None or name in self._missing
        # What has no shard is going to be tied to another parameter: it stays on the meta device.
        values = torch.zeros(param.shape, dtype=param.dtype, device=local.device if is_new else collective_device())
        if shard is not None and not is_new:
            boxes = self._coordinator.all_gather(shard.box.intervals)
            if boxes.index(shard.box.intervals) == self._coordinator.rank:  # the first that holds it
                for block, within in shard.box.blocks():
                    values[_slices(block)].copy_(local[_slices(within)])
            # Each byte comes from one rank, so that sums of bytes lose nothing.
            self._coordinator.run(dist.all_reduce, values.view(-1).view(torch.uint8))
            values = values.to(local.device)
        whole = nn.Parameter(values, requires_grad=param.requires_grad)
        whole._is_hf_initialized = getattr(param, "_is_hf_initialized", False)
        return whole


def _slices(block: ParameterBox) -> tuple[slice, ...]:
    """The indices of a box of one interval along each dimension."""
    return tuple(slice(*intervals[0]) for intervals in block.intervals)


def _equal(first: Any, second: Any) -> bool:
    return all(one is other is None or torch.equal(one, other) for one, other in zip(first, second, strict=True))
