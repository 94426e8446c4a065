"""The kinds of memory that the parameters of a model may lie in when it is saved. Add one to :data:`HOLDERS`."""

from __future__ import annotations

import sys

from torch import nn

from . import fsdp
from .dtensor import held_shards
from .holder import Holder, Holding
from .own_names import named_parameters
from .replicated import held_replicas


HOLDERS: list[Holder] = [held_shards, held_replicas]
"""In the order in which they are asked, after DeepSpeed's: the first that knows a parameter says what is held."""


def holdings(model: nn.Module, *, masters: bool, rank: int, world_size: int) -> dict[str, Holding]:
    """What this rank holds of each parameter of `model`, by the first of its own names, in their order.

    For the arguments and errors see :class:`.holder.Holder`.
    """
    fsdp.reshard(model)  # a forward pass may have left gathered parameters, perhaps in another dtype
    left = dict(model.named_parameters())
    found: dict[str, Holding] = {}
    for held in (*_deepspeeds(), *HOLDERS):
        of_kind = held(model, left, masters=masters, rank=rank, world_size=world_size)
        found.update(of_kind)
        left = {name: param for name, param in left.items() if name not in of_kind}
    own = [name for name, _ in named_parameters(model)]
    return {name: found[theirs] for name, (theirs, _) in zip(own, model.named_parameters(), strict=True)}


def _deepspeeds() -> tuple[Holder, ...]:
    if "deepspeed" not in sys.modules:
        return ()  # no parameter is DeepSpeed's, and its import takes seconds
    from .deepspeed.held import held_by_optimizers, held_partitions

    return held_by_optimizers, held_partitions
