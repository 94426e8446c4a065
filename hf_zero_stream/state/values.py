"""Reads the values of a model that goes on: those that the state has, and the others from the weights beside it."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..destinations.own_names import named_parameters
from ..destinations.slots import MASTER
from ..destinations.training import Training
from ..engine.load import Load
from ..errors import LoadError
from ..loading.into import load_some_into, place_into
from ..ranks.coordinator import Coordinator
from ..seams.adapted import is_adapted
from ..seams.session import LazyModel
from .elementwise import load_states
from .layout import EXACT, opened, opened_from_hub_layout, persistent_buffers
from .record import StateRecord
from .zero_source import swapped_masters


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
    model, swapped = training.model, swapped_masters(training)
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
