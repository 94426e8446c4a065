"""The way back: what a rank holds of a parameter, for a save to read.

A source of holdings is a function that gives them by name, for every parameter of a model, the same names on all
ranks (``deepspeed/stored.py``). Where ranks hold different parts that are no flat ranges of a parameter, each part has
a name of its own, and the whole is put together of the parts as lazy tensors are (``deepspeed/original_experts.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch


__all__ = ["Holding"]


@dataclass(frozen=True)
class Holding:
    """A parameter that is being saved, and the flat elements of it that this rank holds and is to give.

    Attributes:
        shape: the whole parameter's.
        dtype: dtype of the values that are held.
        start: first element that this rank gives.
        stop: one past the last; equal to `start` where it gives none.
        is_whole: this rank holds all elements, also those that it is not to give.
        is_gathered: a ``GatheredParameters`` around the save holds them, and they may be new on one rank only.
        is_swapped: the values come out of a swap file each time they are opened.
        open: a context with the flat values that are held, from element :attr:`first` on.
    """

    shape: torch.Size
    dtype: torch.dtype
    start: int
    stop: int
    is_whole: bool
    is_swapped: bool
    open: Callable[[], AbstractContextManager[torch.Tensor]]
    is_gathered: bool = False

    @property
    def first(self) -> int:
        """The number of the first element that is held."""
        return 0 if self.is_whole else self.start
