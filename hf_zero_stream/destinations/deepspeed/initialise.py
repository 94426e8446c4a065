"""Running a model's own initialisation code over partitioned parameters, one module at a time.

Initialisation code looks at values: it must meet real tensors. But it runs over every module, and gathering each of
them would move the whole model over the wire for nothing, since code that finds a parameter loaded leaves it alone. So
a module is first tried with its parameters as they are. The first touch of one that is partitioned stops the attempt;
that parameter and the module's own are gathered and the module is run again from the start, with the same random
numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from .zero3 import gathered, is_partitioned


__all__ = ["run_gathering_what_is_touched"]

# Properties that say the same of a partitioned parameter as of a full one.
_HARMLESS_NAMES = ("dtype", "device", "requires_grad", "is_meta", "is_leaf", "grad_fn")
_HARMLESS = {getattr(torch.Tensor, name).__get__ for name in _HARMLESS_NAMES}


class _Touched(BaseException):
    """Initialisation code used a partitioned parameter; a BaseException, so that no model's `except` hides it."""

    def __init__(self, params: list[Any]) -> None:
        self.params = params


class _TouchGuard(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _HARMLESS:
            touched = [value for value in _flat((args, kwargs or {})) if is_partitioned(value)]
            if touched:
                raise _Touched(touched)
        return func(*args, **(kwargs or {}))


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _flat(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _flat(item)
    else:
        yield value


def run_gathering_what_is_touched(initialise: Callable[[], None], module: nn.Module) -> None:
    """Call `initialise` for `module` with what it touches gathered; what it writes ends up on every rank.

    All ranks must call it for the same modules in the same order: gathering is a collective.
    """
    states = _random_states()
    needed: list[Any] = []
    while True:
        try:
            if not needed:
                with _TouchGuard():
                    initialise()
            else:
                with gathered(needed), _TouchGuard():
                    initialise()
            return
        except _Touched as touched:
            # Its other uninitialised parameters will be touched next; fetching them now saves an attempt.
            own = [p for p in module.parameters(recurse=False) if not getattr(p, "_is_hf_initialized", False)]
            needed = [*needed, *filter(is_partitioned, own), *touched.params]
            _restore(states)


def _random_states() -> tuple[torch.Tensor, torch.Tensor | None]:
    return torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_available() else None


def _restore(states: tuple[torch.Tensor, torch.Tensor | None]) -> None:
    cpu, cuda = states
    torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state(cuda)
