"""What a save finds in memory. The model may have been loaded in another way, so no destination is asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from ..planning.parameter_box import ParameterBox


@dataclass(frozen=True)
class Holding:
    """What this rank holds of a parameter that is being saved: elements of one box of it, counted in row-major order.

    The boxes that ranks hold of one parameter are equal or disjoint, and together they are all of it.

    Attributes:
        box: may be empty. That of a ZeRO partition is the whole parameter.
        start: first element of the box that this rank gives.
        stop: one past the last; equal to `start` where it gives none.
        open: a context with the flat values that are held, from element :attr:`first` on.
        is_whole: this rank holds all elements of the box, as other ranks do; their values are compared.
        is_swapped: the values come out of a swap file each time they are opened.
        is_gathered: a ``GatheredParameters`` around the save holds them, and they may be new on one rank only.
    """

    box: ParameterBox
    dtype: torch.dtype
    start: int
    stop: int
    open: Callable[[], AbstractContextManager[torch.Tensor]]
    is_whole: bool = False
    is_swapped: bool = False
    is_gathered: bool = False

    @property
    def first(self) -> int:
        """The number of the first element that is held."""
        return 0 if self.is_whole else self.start


class Holder(Protocol):
    """One kind of memory that parameters may lie in. Add it to ``destinations/kinds.py``."""

    def __call__(
        self, model: nn.Module, params: Mapping[str, nn.Parameter], *, masters: bool, rank: int, world_size: int
    ) -> Mapping[str, Holding]:
        """What this rank holds of those of `params` that lie in memory of this kind, by name.

        The same names on all ranks, also where a rank holds no element. Parameters of other kinds are left out.

        Args:
            params: parameters of `model`, each once.
            masters: the fp32 values that an optimizer trains, where there are any, in place of the model's own.

        Raises:
            UnsupportedError: the values cannot be reached; the message says what to do.
        """
        ...


def open_flat(param: torch.Tensor) -> AbstractContextManager[torch.Tensor]:
    """A context with the flat values that a parameter has by then."""
    return nullcontext(param.detach().contiguous().view(-1))
