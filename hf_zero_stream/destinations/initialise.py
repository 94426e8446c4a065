"""Runs a model's own initialisation code over parameters that this rank does not have in full.

That code must meet real values. But it runs over every module and leaves loaded parameters alone, so that gathering
all of them would move the whole model over the wire for nothing. So a module is first tried with its parameters as
they are. The first touch of one that is not here in full stops the attempt; that parameter and the module's own are
made present, and the module is run again from the start, with the same random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ..ranks import accelerators


# Properties that say the same of a part of a parameter as of all of it.
_HARMLESS_NAMES = ("dtype", "device", "requires_grad", "is_meta", "is_leaf", "grad_fn")
_HARMLESS = {getattr(torch.Tensor, name).__get__ for name in _HARMLESS_NAMES}

IsAway = Callable[[Any], bool]
"""Whether a value is a parameter whose full values are not in memory now."""


def run_with_what_is_touched(
    initialise: Callable[[], None],
    module: nn.Module,
    is_away: IsAway,
    present: Callable[[Sequence[Any]], AbstractContextManager[None]],
) -> None:
    """Call `initialise` for `module` inside ``present(touched)``, of the parameters that it touches (all ranks).

    All ranks must get what is written inside; if `present` is left by an exception, nothing may have changed.
    """
    state = random_state()
    needed: list[Any] = []
    while True:
        try:
            with present(needed), _TouchGuard(is_away):
                initialise()
            return
        except _Touched as touched:
            # Its other uninitialised parameters will be touched next; fetching them now saves an attempt.
            own = [p for p in module.parameters(recurse=False) if not getattr(p, "_is_hf_initialized", False)]
            needed = [*needed, *filter(is_away, own), *touched.args]
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
    """Initialisation code used parameters that are away; a BaseException, so that no model's `except` hides it."""


class _TouchGuard(TorchFunctionMode):
    def __init__(self, is_away: IsAway) -> None:
        super().__init__()
        self._is_away = is_away

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _HARMLESS:
            touched = [value for value in tree_leaves((args, kwargs)) if self._is_away(value)]
            if touched:
                raise _Touched(*touched)
        return func(*args, **(kwargs or {}))
