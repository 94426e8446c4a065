"""Reads elementwise states, such as moments, into the memory of the optimizer that goes on with them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

import torch

from ..checkpoint.map import CheckpointMap
from ..destinations.deepspeed.marks import has_partition
from ..destinations.slots import Slot, SlotMemory
from ..destinations.training import Training
from ..engine.load import Load
from ..ranks.coordinator import Coordinator
from ..reports.memory import collector_paused
from ..seams.ds_config import settings_in_force
from .layout import opened, opened_from_hub_layout
from .record import StateRecord, shard_of_key


@collector_paused()
def load_states(
    training: Training,
    place: Path,
    record: StateRecord,
    keys: Sequence[str],
    slots: Sequence[Slot],
    coordinator: Coordinator,
) -> None:
    """Read the states `keys` of `slots` from the folder `place`, one after the other (all ranks, in a load's meeting).

    Those that lie in their files as the first one does are read by its plan. The `record` is that in `place`.
    """
    if not keys:
        return
    first, *others = keys
    alike = _read_first(training, place, record, first, others, slots, coordinator)
    for key in others:
        if key not in alike:
            _read_first(training, place, record, key, [], slots, coordinator)


def _read_first(
    training: Training,
    place: Path,
    record: StateRecord,
    key: str,
    others: Sequence[str],
    slots: Sequence[Slot],
    coordinator: Coordinator,
) -> list[str]:
    """Read the state `key`, and those of the `others` that lie as it does; returns which they were."""
    hides_zero3 = any(map(has_partition, training.model.parameters()))
    memory = SlotMemory(slots, key, training.device, hides_zero3=hides_zero3, prepare=training.prepare_lazy)
    alike: list[str] = []

    def read_alike() -> None:
        for other, index in load.others.items():
            with closing(Load(settings_in_force(), {}, coordinator, memory)) as load_of_other:
                if load_of_other.place_like(load, memory.batches_of(other), index):
                    alike.append(other)

    with coordinator.reporting():
        load = _LoadWithOthers(coordinator, memory, key, others)
        with closing(load), torch.no_grad():
            read = opened_from_hub_layout if record.is_in_hub_layout else opened
            load.place(*read(load, training.model, place, key), then=read_alike)
    return alike


class _LoadWithOthers(Load):
    """A load of the state `key` that looks into the files of `others` too when it opens its own."""

    def __init__(
        self,
        coordinator: Coordinator,
        memory: SlotMemory,
        key: str,
        others: Sequence[str],
    ) -> None:
        super().__init__(settings_in_force(), {}, coordinator, memory)
        self._key, self._others = key, others
        self.others: Mapping[str, CheckpointMap] = {}
        """What is in the files of other states, of those that have files of the same names but for their own."""

    def maps_of(
        self, parts: Sequence[Sequence[str]], weight_map: Mapping[str, str] | None = None
    ) -> list[CheckpointMap | None]:
        (files,) = parts
        of_others = {other: [shard_of_key(path, self._key, other) for path in files] for other in self._others}
        if not all(path.count(f".{self._key}") for path in map(os.path.basename, files)):
            of_others = {}  # somebody has given the files other names
        index, *indexes = super().maps_of([files, *of_others.values()], weight_map)
        self.others = {other: found for other, found in zip(of_others, indexes, strict=True) if found is not None}
        return [index]
