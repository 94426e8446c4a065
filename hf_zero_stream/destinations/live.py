"""Chooses the destination that fills a model in use."""

from __future__ import annotations

import sys

from torch import nn

from ..errors import LoadError
from ..holdings.introspection import is_sharded
from ..ranks.coordinator import Coordinator
from ..settings.config import StreamingConfig
from .base import Destination
from .live_whole import LiveWhole


def live_destination(
    model: nn.Module, coordinator: Coordinator, config: StreamingConfig, *, with_masters: bool = True
) -> Destination:
    """The destination for the values of `model`: in shards, in ZeRO's partitions, or whole on every rank.

    Without masters, what ZeRO-3 trains in place of parameters keeps its values. Raises a LoadError if a parameter has
    no memory.
    """
    if is_sharded(model):
        from .live_shards import LiveShards  # imports torch's FSDP2

        return LiveShards(model, coordinator)
    if without_memory := [name for name, param in model.named_parameters() if param.is_meta]:
        raise LoadError(
            f"load_into: the model's {without_memory[0]} is on the meta device, without memory. Call "
            "model.to_empty(device=...) first."
        )
    if "deepspeed" not in sys.modules:
        return LiveWhole(model, coordinator, config)
    from .deepspeed.live import LiveModel  # imports deepspeed, which takes seconds

    return LiveModel(model, coordinator, config, with_masters=with_masters)
