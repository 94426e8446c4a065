"""The kinds of memory that the parameters of a model may lie in when it is saved. Add a kind to :data:`KINDS`."""

from __future__ import annotations

import sys

from torch import nn

from . import fsdp
from .base import Destination, Holding
from .dtensor import DTensors
from .replicated import Replicated


__all__ = ["KINDS", "holdings"]

KINDS: list[type[Destination]] = [DTensors, Replicated]
"""In the order in which they are asked, after DeepSpeed's: the first that knows a parameter says what is held."""


def holdings(model: nn.Module, *, masters: bool, rank: int, world_size: int) -> dict[str, Holding]:
    """What this rank holds of each parameter of `model`, by the first of its names, in their order.

    For the arguments and errors see :meth:`.base.Destination.holdings`.
    """
    fsdp.reshard(model)  # a forward pass may have left gathered parameters, perhaps in another dtype
    left = dict(model.named_parameters())
    found: dict[str, Holding] = {}
    for kind in (*_deepspeeds(), *KINDS):
        of_kind = kind.holdings(model, left, masters=masters, rank=rank, world_size=world_size)
        found.update(of_kind)
        left = {name: param for name, param in left.items() if name not in of_kind}
    return {name: found[name] for name, _ in model.named_parameters()}


def _deepspeeds() -> tuple[type[Destination], ...]:
    if "deepspeed" not in sys.modules:
        return ()  # no parameter is DeepSpeed's, and its import takes seconds
    from .deepspeed.live import LiveModel
    from .deepspeed.partitioned import Partitioned

    return LiveModel, Partitioned
