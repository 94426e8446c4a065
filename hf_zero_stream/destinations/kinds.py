"""The kinds of memory that the parameters of a model may lie in when it is saved. Add a kind to :data:`KINDS`."""

from __future__ import annotations

from torch import nn

from . import fsdp
from .base import Destination, Holding
from .deepspeed.live import LiveModel
from .deepspeed.partitioned import Partitioned
from .dtensor import DTensors
from .replicated import Replicated


__all__ = ["KINDS", "holdings"]

KINDS: list[type[Destination]] = [LiveModel, Partitioned, DTensors, Replicated]
"""In the order in which they are asked: the first that knows a parameter says what is held of it."""


def holdings(model: nn.Module, *, masters: bool, rank: int, world_size: int) -> dict[str, Holding]:
    """What this rank holds of each parameter of `model`, by the first of its names, in their order.

    For the arguments and errors see :meth:`.base.Destination.holdings`.
    """
    fsdp.reshard(model)  # a forward pass may have left gathered parameters, perhaps in another dtype
    left = dict(model.named_parameters())
    found: dict[str, Holding] = {}
    for kind in KINDS:
        of_kind = kind.holdings(model, left, masters=masters, rank=rank, world_size=world_size)
        found.update(of_kind)
        left = {name: param for name, param in left.items() if name not in of_kind}
    return {name: found[name] for name, _ in model.named_parameters()}
