"""A destination in full: each rank holds some columns of every tensor, in plain CPU tensors; and what saves them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from hf_zero_stream.plugin_api import (
    Batch,
    Coordinator,
    Destination,
    Holding,
    LocalShard,
    ParameterBox,
    Targets,
    allocate,
    open_flat,
)


class Columns(Destination):
    """The columns ``[width * rank / world_size, width * (rank + 1) / world_size)`` of every parameter."""

    into = "columns"

    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator

    def batches(self, model: nn.Module, missing: set[str], tied: set[str]) -> list[Batch]:
        def columns(name: str, param: torch.Tensor) -> nn.Parameter:
            box = self.box(tuple(param.shape))
            mine = nn.Parameter(torch.empty(box.sizes, dtype=param.dtype))
            mine.box = box  # type: ignore[attr-defined]
            return mine

        targets = Targets(self.coordinator)
        parameters, _, _ = allocate(model, missing, tied, parameter=columns, buffer=lambda buffer: None)
        for name, (mine, view) in parameters.items():
            targets.add(name, mine.detach().view(-1), view, LocalShard(mine.box))
        return targets.batches()

    def box(self, shape: tuple[int, ...]) -> ParameterBox:
        rank, world_size = self.coordinator.rank, self.coordinator.world_size
        first, end = (shape[-1] * number // world_size for number in (rank, rank + 1))
        return ParameterBox(shape, (*ParameterBox.whole(shape[:-1]).intervals, ((first, end),)))


def make(coordinator: Coordinator, config: Any, ds_config: Mapping[str, Any]) -> Columns:
    return Columns(coordinator)


def held(model: Any, params: Mapping[str, Any], **ranks: Any) -> dict[str, Holding]:
    def holding(mine: Any) -> Holding:
        return Holding(mine.box, mine.dtype, 0, mine.numel(), partial(open_flat, mine))

    return {name: holding(param) for name, param in params.items() if hasattr(param, "box")}
