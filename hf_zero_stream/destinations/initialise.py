"""The initialisation of models of which no rank has all values.

A model's own initialisation code must meet real values, and a rank may not have a parameter in full. But that code
runs over every module and leaves loaded parameters alone, so that gathering all of them would move the whole model
over the wire for nothing. So a module is first tried with its parameters as they are. The first touch of one that is
not here in full stops the attempt; that parameter and the module's own are made present, and the module is run again
from the start, with the same random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from .. import accelerators
from ..accelerators import collective_device
from ..holdings.holding import LocalShard
from ..holdings.introspection import local_of
from ..planning.boxes import ParameterBox
from ..ranks.coordinator import Coordinator


# Properties that say the same of a part of a parameter as of all of it.
_HARMLESS_NAMES = ("dtype", "device", "requires_grad", "is_meta", "is_leaf", "grad_fn")
_HARMLESS = {getattr(torch.Tensor, name).__get__ for name in _HARMLESS_NAMES}

NeedsFetch = Callable[[Any], bool]
"""Whether a value is a parameter whose full values are not in memory now."""


def run_with_touched_parameters(
    initialise: Callable[[], None],
    module: nn.Module,
    needs_fetch: NeedsFetch,
    fetched: Callable[[Sequence[Any]], AbstractContextManager[None]],
) -> None:
    """Call `initialise` for `module` inside ``fetched(touched)``, of the parameters that it touches (all ranks).

    All ranks must get what is written inside; if `fetched` is left by an exception, nothing may have changed.
    """
    state = random_state()
    needed: list[Any] = []
    while True:
        try:
            with fetched(needed), _TouchGuard(needs_fetch):
                initialise()
            return
        except _Touched as touched:
            # Its other uninitialised parameters will be touched next; fetching them now saves an attempt.
            own = [p for p in module.parameters(recurse=False) if not getattr(p, "_is_hf_initialized", False)]
            needed = [*needed, *filter(needs_fetch, own), *touched.args]
            set_random_state(state)


RandomState = tuple[torch.Tensor, torch.Tensor | None]


def random_state() -> RandomState:
    """The state of torch's random numbers, on the CPU and on the accelerator's current device."""
    kind = accelerators.kind()
    return torch.get_rng_state(), None if kind is None else accelerators.random_state(kind)


def set_random_state(state: RandomState) -> None:
    of_cpu, of_device = state
    torch.set_rng_state(of_cpu)
    kind = accelerators.kind()
    if of_device is not None and kind is not None:
        accelerators.set_random_state(kind, of_device)


class _Touched(BaseException):
    """Initialisation code used parameters that must be fetched; no model's `except` hides a BaseException."""


class _TouchGuard(TorchFunctionMode):
    def __init__(self, needs_fetch: NeedsFetch) -> None:
        super().__init__()
        self._needs_fetch = needs_fetch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _HARMLESS:
            touched = [value for value in tree_leaves((args, kwargs)) if self._needs_fetch(value)]
            if touched:
                raise _Touched(*touched)
        return func(*args, **(kwargs or {}))


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
