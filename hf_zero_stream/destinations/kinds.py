"""The kinds of memory that the parameters of a model may lie in when it is saved. Add a kind to :data:`KINDS`."""

from __future__ import annotations

import sys

from torch import nn

from . import fsdp
from .base import Destination, Holding
from .dtensor import DTensors
from .own_names import named_parameters
from .replicated import Replicated


KINDS: list[type[Destination]] = [DTensors, Replicated]
"""In the order in which they are asked, after DeepSpeed's: the first that knows a parameter says what is held."""


def holdings(model: nn.Module, *, masters: bool, rank: int, world_size: int) -> dict[str, Holding]:
    """What this rank holds of each parameter of `model`, by the first of its own names, in their order.

    For the arguments and errors see :meth:`.base.Destination.holdings`.
    """
    fsdp.reshard(model)  # a forward pass may have left gathered parameters, perhaps in another dtype
    left = dict(model.named_parameters())
    found: dict[str, Holding] = {}
    for kind in (*_deepspeeds(), *KINDS):
        of_kind = kind.holdings(model, left, masters=masters, rank=rank, world_size=world_size)
        found.update(of_kind)
        left = {name: param for name, param in left.items() if name not in of_kind}
    own = [name for name, _ in named_parameters(model)]
    return {name: found[theirs] for name, (theirs, _) in zip(own, model.named_parameters(), strict=True)}


def _deepspeeds() -> tuple[type[Destination], ...]:
    if "deepspeed" not in sys.modules:
        return ()  # no parameter is DeepSpeed's, and its import takes seconds
    from .deepspeed.live import LiveModel
    from .deepspeed.partitioned import Partitioned

    return LiveModel, Partitioned
