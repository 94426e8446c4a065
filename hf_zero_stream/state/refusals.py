"""What a state is compared with before anything of it is read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..destinations.training import Training
from ..errors import CheckpointError, ConfigError, UnsupportedError
from ..seams.saving import index_name
from . import schedules
from .record import StateRecord


__all__ = ["refuse_missing_files", "refuse_optimizer", "refuse_other_training"]

_ADAMS = {"Adam", "AdamW", "FusedAdam", "DeepSpeedCPUAdam"}
"""They keep the same."""


_NOT_ELEMENTWISE = {
    "MuonWithAuxAdam": "momentum that is orthogonalised a matrix at a time, in buffers of its own",
    "OnebitAdam": "errors of compression, which belong to the ranks and not to parameters",
    "OnebitLamb": "errors of compression, which belong to the ranks and not to parameters",
    "ZeroOneAdam": "errors of compression, which belong to the ranks and not to parameters",
}
"""DeepSpeed's optimizers whose state cannot be cut for other ranks, and what they keep."""


def refuse_optimizer(optimizer: Any) -> None:
    """Raise an UnsupportedError for an optimizer whose state is known not to be elementwise."""
    kind = type(optimizer).__name__
    if kept := _NOT_ELEMENTWISE.get(kind):
        raise UnsupportedError(
            f"{kind} keeps {kept}: its state cannot be cut for another number of ranks. Use an optimizer like AdamW, "
            "or DeepSpeed's checkpoints."
        )


def refuse_other_training(training: Training, record: StateRecord, place: Path) -> None:
    """Raise before anything is read if a state cannot go on in `training`.

    Raises:
        ConfigError: the optimizer keeps something else, or trains other parameters in its groups.
        CheckpointError: parameters had other shapes.
        UnsupportedError: see :func:`.schedules.refuse_other`.
    """
    kind = type(training.optimizer).__name__
    if kind != record.optimizer and not {kind, record.optimizer} <= _ADAMS:
        raise ConfigError(f"{place}: the state of {record.optimizer} cannot go on in {kind}. Use the same optimizer.")
    if training.scheduler is not None and record.scheduler is not None:
        schedules.refuse_other(
            training.scheduler, record.scheduler, record.batch_size, training.batch_size, str(place)
        )
    groups = training.optimizer.param_groups
    if len(groups) != len(record.groups):
        raise ConfigError(
            f"{place}: the optimizer had {len(record.groups)} groups, and has {len(groups)} now. Make the same groups."
        )
    for number, recorded in enumerate(record.groups):
        mine = {member.name for slot in training.slots if slot.group == number for member in slot.members}
        different = sorted(mine ^ set(recorded.parameters))
        if different:
            raise ConfigError(
                f"{place}: group {number} of the optimizer trained {len(recorded.parameters)} parameters, and trains "
                f"{len(mine)} now. Only one of the two has {', '.join(different[:8])}. Make the same groups."
            )
        shapes = {member.name: list(member.box.shape) for slot in training.slots for member in slot.members}
        for name, shape in zip(recorded.parameters, recorded.shapes, strict=False):  # they may not be known
            if list(shape) != shapes[name]:
                raise CheckpointError(
                    f"{place}: {name} had shape {list(shape)} when the state was saved, and has {shapes[name]} now. "
                    "Go on with the model that was trained."
                )


def refuse_missing_files(place: Path, keys: Sequence[str]) -> None:
    """Raise a CheckpointError if a file of one of the states `keys` is not in `place`."""
    missing = [path for key in keys for path in _files(place, key) if not path.is_file()]
    if missing:
        raise CheckpointError(
            f"{missing[0]}: this file of the training state is gone ({len(missing)} in all). Copy the whole folder "
            "again, or go on from an older state."
        )


def _files(place: Path, key: str) -> list[Path]:
    index = place / index_name(key)
    if not index.is_file():
        return [place / f"model.{key}.safetensors"]
    try:
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return sorted(place / shard for shard in shards)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index}: expected the index of a state's shards: {error!r}") from error
