"""Reads the values of a model that goes on: those that the state has, and the others from the weights beside it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..checkpoint.map import CheckpointMap
from ..destinations.marks import has_partition, is_adapted
from ..destinations.own_names import named_parameters
from ..destinations.slots import MASTER, Slot, SlotMemory
from ..destinations.training import Training
from ..engine.load import Load
from ..errors import LoadError
from ..loading.into import load_some_into, place_into
from ..ranks.coordinator import Coordinator
from ..reports.measures import collector_paused
from ..seams.ds_config import settings_in_force
from ..seams.session import LazyModel
from .layout import EXACT, opened, opened_from_hub_layout, persistent_buffers
from .record import StateRecord, shard_of_key


def has_more(model: nn.Module, names: AbstractSet[str]) -> bool:
    """Whether anything of `model` but parameters of these `names` comes from the weights."""
    if is_adapted(model):  # its base is what it was
        return False
    return any(name not in names for name, _ in named_parameters(model)) or bool(persistent_buffers(model))


def load_values(
    training: Training,
    folder: Path,
    place: Path,
    record: StateRecord,
    coordinator: Coordinator,
    *,
    strict: bool,
) -> None:
    """Weights in `folder`, elementwise states in `place`; from the weights' files what has no master in memory."""
    model, swapped = training.model, training.swapped_masters
    in_memory = record.with_masters - swapped
    moments = [key for key in record.keys if key != MASTER]
    if has_more(model, in_memory):
        _load_weights(model, folder, in_memory, coordinator, strict=strict, with_masters=not swapped)
    if record.exact:
        _load_state(model, place, record, EXACT, {*record.exact}, coordinator, strict=strict)
    if in_memory and (training.copies_masters or is_adapted(model)):
        # One plan for all of them; adapters' own values are trained where there are no masters.
        load_states(training, place, record, [MASTER, *moments], training.slots, coordinator)
        training.copy_masters()
        return
    if in_memory:
        _load_state(model, place, record, MASTER, in_memory, coordinator, strict=strict)
    load_states(training, place, record, moments, training.slots, coordinator)
    if swapped and MASTER in record.keys:
        slots = [slot for slot in training.slots if slot.is_swapped]
        load_states(training, place, record, [MASTER], slots, coordinator)


def load_values_alone(
    model: nn.Module,
    folder: Path,
    place: Path,
    record: StateRecord,
    coordinator: Coordinator,
    *,
    has_its_own: bool,
    strict: bool,
) -> None:
    """As :func:`load_values`, of values alone; `has_its_own`: the weights in `folder` were saved with this state."""
    values = set() if has_its_own and not is_adapted(model) else record.with_masters
    if has_more(model, values):
        _load_weights(model, folder, values, coordinator, strict=strict, with_masters=True)
    for key, names in ((EXACT, {*record.exact}), (MASTER, values)):
        if names:
            _load_state(model, place, record, key, names, coordinator, strict=strict)


def _load_weights(
    model: Any,
    folder: Path,
    without: set[str],
    coordinator: Coordinator,
    *,
    strict: bool,
    with_masters: bool,
) -> None:
    if isinstance(model, PreTrainedModel):
        load_some_into(
            model,
            str(folder),
            without,
            strict=strict,
            needs_adapters=True,
            with_masters=with_masters,
            coordinator=coordinator,
        )
        return

    def lazy_model(load: Load) -> LazyModel:
        found = opened(load, model, folder, None, strict=strict)
        params = {name for name, _ in named_parameters(model)}
        _refuse_lacking(folder, found, (params | persistent_buffers(model)) - without if strict else set())
        return found

    place_into(
        model,
        str(folder),
        lazy_model,
        without,
        with_masters=with_masters,
        coordinator=coordinator,
    )


def _load_state(
    model: Any,
    place: Path,
    record: StateRecord,
    key: str,
    needed: set[str],
    coordinator: Coordinator,
    *,
    strict: bool,
) -> None:
    """Values from the state itself: those that were trained, or what no weights have as it is."""

    def lazy_model(load: Load) -> LazyModel:
        if record.is_in_hub_layout:
            return opened_from_hub_layout(load, model, place, key)
        found = opened(load, model, place, key, strict=strict)
        _refuse_lacking(place, found, needed if strict else set())
        return found

    without = record.with_masters - needed
    place_into(model, str(place), lazy_model, without, coordinator=coordinator)


def _refuse_lacking(place: Path, found: LazyModel, needed: set[str]) -> None:
    lazy, missing, _ = found
    there = {name for name, _ in [*lazy.named_parameters(), *lazy.named_buffers()]} - missing
    if lacking := sorted(needed - there):
        raise LoadError(
            f"{place}: expected values for {len(needed)} parameters and buffers; {len(lacking)} are not there: "
            f"{', '.join(lacking[:8])}. Copy the state again, or go on with the model that was saved."
        )


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
