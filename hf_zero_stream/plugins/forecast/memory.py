"""The memory of one rank while loading and training, from the model itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ...plugin_api import StreamingConfig
from .footprint import AdamW, MemoryFootprint


def model_memory(
    model: nn.Module,
    *,
    tied: set[str],
    engine: str,
    ds_config: Mapping[str, Any],
    world_size: int,
    config: StreamingConfig,
    device: str,
    adamw: AdamW | None = None,
) -> MemoryFootprint:
    """The memory that this rank of `world_size` needs for `model`, as a load has left it or as it trains.

    Args:
        tied: names of parameters that are the other end of a tie.
        engine: as :attr:`...destinations.base.Destination.trained_by`.
        ds_config: under ZeRO-3; empty for DeepSpeed's defaults.
        device: the type of the device that trains.
        adamw: how torch's AdamW steps, where `ds_config` leaves that open.
    """
    if engine == "deepspeed":
        from .engine_memory import model_footprint  # imports deepspeed

        return model_footprint(model, ds_config, tied, world_size, config, device, adamw)
    from .sharded import footprint_of_shards  # imports torch's FSDP2

    return footprint_of_shards(model, tied, config, device, adamw)
