"""The kinds of memory that the parameters of a model may lie in when it is saved. Add a kind to :data:`KINDS`."""

from __future__ import annotations

from torch import nn

from .base import Destination, Holding
from .deepspeed.live import LiveModel
from .deepspeed.partitioned import Partitioned
from .replicated import Replicated


__all__ = ["KINDS", "holdings"]

KINDS: list[type[Destination]] = [LiveModel, Partitioned, Replicated]
"""In the order in which they are asked: the first that knows a parameter says what is held of it."""


def holdings(model: nn.Module, *, masters: bool, rank: int, world_size: int) -> dict[str, Holding]:
    """What this rank holds of each parameter of `model`; names of one tied parameter have one and the same holding.

    For the arguments and errors see :meth:`.base.Destination.holdings`.
    """
    left = dict(model.named_parameters())
    found: dict[int, Holding] = {}
    for kind in KINDS:
        for name, holding in kind.holdings(left, masters=masters, rank=rank, world_size=world_size).items():
            found[id(left.pop(name))] = holding
    return {name: found[id(param)] for name, param in model.named_parameters(remove_duplicate=False)}
