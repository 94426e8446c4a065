"""Buffers of which ranks have values of their own: statistics of BatchNorm, a running scale of a loss, a codebook.

Nothing keeps buffers equal, and DeepSpeed at stage 3 saves those of each rank. Weights have rank 0's. So those that
differ are in the state too, for each rank; who was not there goes on with rank 0's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import LoadError
from ..holdings.holder import refuse_meta
from ..holdings.holding import Holding, open_flat
from ..holdings.introspection import whole_of
from ..holdings.own_names import named_buffers
from ..holdings.slots import BUFFERS, entry_name
from ..planning.boxes import ParameterBox
from ..ranks.coordinator import Coordinator
from ..saving.lazy_parameters import digest
from .layout import persistent_buffers
from .record import StateRecord


def _persistent(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers of a state dict of `model` on this rank, each once, by own names."""
    saved = {*persistent_buffers(model).values()}
    return {name: whole_of(name, buffer) for name, buffer in named_buffers(model) if name in saved}


def digests_of_buffers(model: nn.Module) -> dict[str, bytes]:
    """A digest of each buffer that a state dict of `model` has."""
    buffers = _persistent(model)
    refuse_meta(buffers)
    return {name: digest(buffer) for name, buffer in buffers.items()}


def differing(of_ranks: Sequence[Mapping[str, bytes]]) -> list[str]:
    """The names of buffers of which ranks have other values, by their digests; a save refuses other names."""
    first, *others = of_ranks
    return sorted(name for name, mine in first.items() if any(each.get(name, mine) != mine for each in others))


def _name(rank: int, number: int) -> str:
    return f"{rank}-{number}"


def held_of_buffers(model: nn.Module, names: Sequence[str], coordinator: Coordinator) -> dict[str, Holding]:
    """Each rank's values of the buffers `names`, by their names in the files."""
    found = _persistent(model)
    return {
        entry_name(BUFFERS, _name(rank, number)): Holding(
            ParameterBox.whole(found[name].shape),
            found[name].dtype,
            0,
            found[name].numel() if rank == coordinator.rank else 0,
            partial(open_flat, found[name]),
        )
        for rank in range(coordinator.world_size)
        for number, name in enumerate(names)
    }


def memory_of_buffers(
    model: nn.Module, place: Path, record: StateRecord, rank: int, found: Mapping[str, Any], *, strict: bool
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """By their names in the files, buffers of `model` that get what `rank` had, and memory to read that into.

    Raises:
        LoadError: the model has no such buffers, or they have other shapes than was `found` in the files of the state
            in `place`; if not `strict`, they stay as they are.
    """
    rank, mine = rank if rank < record.world_size else 0, _persistent(model) if record.buffers else {}
    memory: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    lacking = []
    for number, name in enumerate(record.buffers):
        key = entry_name(BUFFERS, _name(rank, number))
        if key in found and name in mine and found[key].shape == mine[name].shape:
            memory[key] = mine[name], torch.empty_like(mine[name], memory_format=torch.contiguous_format)
        else:
            lacking.append(name)
    if strict and lacking:
        raise LoadError(
            f"{place}: expected buffers of the model for the values that rank {rank} had; {len(lacking)} are not "
            f"there, or have other shapes: {', '.join(sorted(lacking)[:8])}. Go on with the model that was saved."
        )
    return memory
