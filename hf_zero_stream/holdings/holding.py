"""Holdings and holders: the classes that all modules of this room share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import nn

from ..planning.boxes import ParameterBox
from ..planning.plan import Target, partition_range


class Holding(NamedTuple):
    """The elements of a parameter that this rank holds: some of one box of it, counted in row-major order.

    The boxes that ranks hold of one parameter are equal or disjoint, and together they are all of it.

    Attributes:
        box: may be empty. That of a ZeRO partition is the whole parameter.
        start: first element of the box that this rank gives.
        stop: one past the last; equal to `start` where it gives none.
        open: a context with the flat values that are held, from element :attr:`first` on.
        is_whole: this rank holds all elements of the box, as other ranks do; their values are compared.
        is_swapped: the values come out of a swap file each time they are opened.
        is_gathered: a ``GatheredParameters`` around the save holds them, and they may be new on one rank only.
        is_zero: all values are zero, and nothing has memory for them yet.
    """

    box: ParameterBox
    dtype: torch.dtype
    start: int
    stop: int
    open: Callable[[], AbstractContextManager[torch.Tensor]]
    is_whole: bool = False
    is_swapped: bool = False
    is_gathered: bool = False
    is_zero: bool = False

    @property
    def first(self) -> int:
        """The number of the first element that is held."""
        return 0 if self.is_whole else self.start


class LocalShard(NamedTuple):
    """The box of a parameter that this rank holds, as number `copy` of the `copies` ranks of its mesh that hold it.

    `is_on_other_meshes`: another mesh of ranks may hold the same data; one of these meshes has rank 0. Of tensor
    parallelism under FSDP2, what only FSDP2 shards is on a mesh of its own for each rank of tensor parallelism.
    """

    box: ParameterBox
    copy: int
    copies: int
    is_on_other_meshes: bool = False

    @property
    def share(self) -> tuple[int, int]:
        """The first element of the box that this rank gives when it is saved, and one past the last."""
        _, start, stop = partition_range(self.box.numel, self.copy, self.copies)
        return start, stop

    def target(self, name: str, dtype: torch.dtype, elements: tuple[int, int] | None = None) -> Target:
        """The target of all of the box of parameter `name`, or of these elements of it."""
        start, stop = elements or (0, self.box.numel)
        box = None if self.box.is_whole else self.box
        return Target(name, dtype, stop - start, start, stop, box, is_copy=self.copy > 0 or self.is_on_other_meshes)


class Holder(Protocol):
    """One kind of memory that parameters may lie in. A plug-in names it, or it is added to :data:`.holder.HOLDERS`."""

    def __call__(
        self, model: nn.Module, params: Mapping[str, nn.Parameter], *, masters: bool, rank: int, world_size: int
    ) -> Mapping[str, Holding]:
        """Return this rank's holdings of the `params` that lie in memory of this kind, by name.

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


def held_replicas(
    model: nn.Module, params: Mapping[str, nn.Parameter], *, masters: bool, rank: int, world_size: int
) -> dict[str, Holding]:
    """A :class:`Holder`: all of each parameter, of which each rank gives 1/N."""

    def holding(param: nn.Parameter) -> Holding:
        _, start, stop = partition_range(param.numel(), rank, world_size)
        box = ParameterBox.whole(param.shape)
        return Holding(box, param.dtype, start, stop, partial(open_flat, param), is_whole=True)

    return {name: holding(param) for name, param in params.items()}
