"""What a save finds in memory. The model may have been loaded in another way, so no destination is asked."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from ..checkpoint.lazy import LazyTensor
from ..errors import UnsupportedError
from ..planning.boxes import ParameterBox
from ..planning.plan import partition_range
from ..registry.plugins import plugins, resolved
from .kinds import BUFFERS, PARAMETERS, kind_of, persistent_buffers, refuse_shared_memory, refuse_unknown
from .marks import is_inside_fsdp2, local_of, shards_modules
from .own_names import named_parameters


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
    """One kind of memory that parameters may lie in. A plug-in names it, or it is added to :data:`HOLDERS`."""

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


HOLDERS: list[Holder] = []
"""Holders of other kinds of memory, which are asked first: the first that knows a parameter says what is held."""


def _added() -> list[Holder]:
    return [*HOLDERS, *(resolved(place) for plugin in plugins() for place in plugin.holders)]


def holdings(model: nn.Module, *, masters: bool, rank: int, world_size: int) -> dict[str, Holding]:
    """What this rank holds of each parameter of `model`, by the first of its own names, in their order.

    For the arguments and errors see :class:`Holder`.
    """
    if shards_modules(model) or is_inside_fsdp2(model):
        from .fsdp import reshard

        reshard(model)  # a forward pass may have left gathered parameters, perhaps in another dtype
    left: dict[str, nn.Parameter] = dict(model.named_parameters())
    found: dict[str, Holding] = {}

    def hold(held: Holder, params: Mapping[str, nn.Parameter]) -> None:
        found.update(held(model, params, masters=masters, rank=rank, world_size=world_size))
        for name in [name for name in left if name in found]:
            del left[name]

    for holder in _added():
        hold(holder, left)
    refuse_unknown(left, PARAMETERS)
    if masters and "deepspeed" in sys.modules:  # its import takes seconds
        from .deepspeed.held import held_by_optimizers

        hold(held_by_optimizers, left)
    for kind in PARAMETERS:
        of_kind = {name: param for name, param in left.items() if kind_of(param, PARAMETERS) is kind}
        if of_kind:
            hold(kind.held_by(), of_kind)
    if left:
        raise UnsupportedError(f"what ranks hold: no holder says what this rank holds of {', '.join([*left][:8])}.")
    own = [name for name, _ in named_parameters(model)]
    return {name: found[theirs] for name, (theirs, _) in zip(own, model.named_parameters(), strict=True)}


def refuse_unreadable(model: nn.Module, doing: str, instead: str) -> None:
    """Raise an UnsupportedError (``{doing}: ... {instead}``) if `model` has tensors that nobody knows how to read.

    Of parameters that may be for a holder that somebody has added, :func:`holdings` finds that out.
    """
    if not _added():
        refuse_unknown(dict(model.named_parameters()), PARAMETERS, doing, instead)
    refuse_unknown(dict(persistent_buffers(model)), BUFFERS, doing, instead)
    refuse_shared_memory(model, doing, instead)


def refuse_meta(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise an UnsupportedError if any of these has no values, in this process at least."""
    if meta := [name for name, tensor in tensors.items() if tensor.is_meta and not isinstance(tensor, LazyTensor)]:
        raise UnsupportedError(
            f"{', '.join(meta[:8])}: expected values; found {len(meta)} tensor(s) on the meta device, which has none. "
            "Give them values first: load the model without offload to the CPU or to disk by a device_map, or call "
            "to_empty() and fill them."
        )


def held_replicas(
    model: nn.Module, params: Mapping[str, nn.Parameter], *, masters: bool, rank: int, world_size: int
) -> dict[str, Holding]:
    """A :class:`Holder`: all of each parameter, of which each rank gives 1/N."""

    def holding(param: nn.Parameter) -> Holding:
        _, start, stop = partition_range(param.numel(), rank, world_size)
        box = ParameterBox.whole(param.shape)
        return Holding(box, param.dtype, start, stop, partial(open_flat, param), is_whole=True)

    return {name: holding(param) for name, param in params.items()}


def held_shards(
    model: nn.Module, params: Mapping[str, nn.Parameter], *, masters: bool, rank: int, world_size: int
) -> dict[str, Holding]:
    """A :class:`Holder`: the shards of DTensors."""
    from . import fsdp
    from .shards import shard_of

    managed = fsdp.managed_params(model)

    def holding(name: str, param: Any) -> Holding:
        record = managed.get(name)
        # FSDP2 may have put gathered parameters in place of its own.
        mine = record if record is not None and record.sharded_param is param else None
        shard, values = shard_of(name, param, mine), partial(open_flat, local_of(param))
        return Holding(shard.box, param.dtype, *shard.share, values, is_whole=shard.copies > 1)

    return {name: holding(name, param) for name, param in params.items()}
