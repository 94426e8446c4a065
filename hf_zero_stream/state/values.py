"""Reads the tensors of a state into a training that goes on: what is trained into slots, all else into the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..destinations.skeleton import LazyTensorModule, convert_lazy
from ..destinations.slot_memory import SlotMemory
from ..engine.load import Load
from ..errors import LoadError
from ..holdings.introspection import has_partition
from ..holdings.slots import VALUES, WHOLE, entry_name
from ..holdings.training import Training
from ..loading.into import place_into
from ..ranks.coordinator import Coordinator
from ..reports.measures import collector_paused
from ..seams.ds_config import settings_in_force
from ..seams.session import LazyModel
from .buffers import load_buffers
from .forms import form_for
from .layout import lazy_model, lazy_states, names_in
from .record import Form, StateRecord
from .wholes import refuse_lacking, tensors_of


def load_values(
    training: Training, place: Path, record: StateRecord, coordinator: Coordinator, *, rank: int, strict: bool
) -> None:
    """Read all values and elementwise states from the state in `place` (all ranks, in a load's meeting).

    For `rank` and `strict` see :func:`load_model_values`.
    """
    # Where new masters cannot be brought into the model, it reads its values itself.
    copies = training.copies_masters
    apart = {member.name for slot in training.slots if not slot.is_in_one_piece for member in slot.members}
    trained = record.trained - apart if copies else frozenset[str]()
    load_model_values(
        training.model, place, record, coordinator, rank=rank, strict=strict, without=trained, with_masters=False
    )
    whole = tensors_of(training, record) if record.has_tensors_of_parts else None
    states = partial(_states_in, training, place, record, whole)
    load_states(training, record.keys, record.form_of, states, coordinator, whole=whole)
    if copies:
        training.copy_masters()


def load_model_values(
    model: nn.Module,
    place: Path,
    record: StateRecord,
    coordinator: Coordinator,
    *,
    rank: int,
    strict: bool,
    without: AbstractSet[str] = frozenset(),
    with_masters: bool = True,
) -> None:
    """Read what `model` has into its own memory, but for parameters `without` (all ranks, in a load's meeting).

    Of buffers that differed between ranks, it gets those of `rank`. If it is not `strict`, what the state lacks stays
    as it is.
    """
    saved = names_in(model) if record.base is None else {*record.untrained} | record.trained
    needed = saved - without

    def lazy_values(load: Load) -> LazyModel:
        found = lazy_model(model, lazy_states(load, model, place, [VALUES])[VALUES], strict=strict)
        _refuse_lacking(place, found, needed if strict else set())
        return found

    if needed:
        how: dict[str, Any] = {"strict": strict, "with_masters": with_masters, "coordinator": coordinator}
        place_into(model, str(place), lazy_values, {*without}, takes_packed=True, **how)
    load_buffers(model, place, record, rank, coordinator, strict=strict)


def _refuse_lacking(place: Path, found: LazyModel, needed: set[str]) -> None:
    lazy, missing, _ = found
    there = {name for name, _ in [*lazy.named_parameters(), *lazy.named_buffers()]} - missing
    if lacking := sorted(needed - there):
        raise LoadError(
            f"{place}: expected values for {len(needed)} parameters and buffers; {len(lacking)} are not there: "
            f"{', '.join(lacking[:8])}. Copy the state again, or go on with the model that was saved."
        )


States = Callable[[Load, Sequence[str]], dict[str, Any]]
"""Gives lazy tensors of the states of these names, by their names in files of states."""


@collector_paused()
def load_states(
    training: Training,
    keys: Sequence[str],
    forms: Mapping[str, Form],
    states: States,
    coordinator: Coordinator,
    *,
    whole: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Read the values of all slots, and the states `keys` that they have, by one plan (all ranks, in a meeting).

    `whole` are tensors that are read as they are; None if no rank has any.
    """
    kept = {slot: form_for(slot, forms).each for slot in training.slots}
    wanted = [
        (slot, [*([VALUES] if slot.is_in_one_piece else []), *(key for key in keys if key in each)])
        for slot, each in kept.items()
    ]
    hides_zero3 = any(map(has_partition, training.model.parameters()))
    memory = SlotMemory(wanted, training.device, whole=whole or {}, hides_zero3=hides_zero3)
    with coordinator.reporting():
        load = Load(settings_in_force(), {}, coordinator, memory)
        with closing(load), torch.no_grad():
            load.place(LazyTensorModule(states(load, [VALUES, *keys]), {}), set(), set())


def _states_in(
    training: Training,
    place: Path,
    record: StateRecord,
    whole: Mapping[str, torch.Tensor] | None,
    load: Load,
    keys: Sequence[str],
) -> dict[str, Any]:
    """:data:`States` in the folder `place`, of which this is the `record`; and what goes `whole`."""
    found: dict[str, Any] = {}
    states = lazy_states(load, training.model, place, [*keys, *([] if whole is None else [WHOLE])])
    for key in keys:
        lazy, missing, _ = lazy_model(training.model, states[key])
        convert_lazy(training.model, lazy, missing)
        found |= {entry_name(key, name): tensor for name, tensor in lazy.named_parameters() if name not in missing}
    if whole is not None:
        of_parts = {entry_name(WHOLE, name): tensor for name, tensor in states[WHOLE].items()}
        refuse_lacking(whole, of_parts, place)
        found |= of_parts
    return found
