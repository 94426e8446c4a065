"""Reads the tensors of a state into a training that goes on: what is trained into slots, all else into the model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

from ..destinations.live import LiveModel, SlotMemory
from ..engine.load import Load
from ..errors import LoadError
from ..holdings.skeleton import LazyTraining, convert_lazy
from ..holdings.slots import BUFFERS, VALUES, WHOLE, Slot, Training, entry_name
from ..loading.into import make_ready
from ..ranks.coordinator import Coordinator
from ..saving.beside import Beside, buffers_key
from ..seams.ds_config import settings_in_force
from .forms import form_for
from .record import Form, StateRecord
from .tensors import lazy_model, lazy_states, memory_of_buffers, names_in
from .wholes import refuse_absent, tensors_of


logger = logging.get_logger(__name__)


_NOTHING = Beside()

States = Callable[[Load, Collection[str]], Mapping[str, Mapping[str, Any]]]
"""Gives lazy tensors of the states of these keys, by the names that the model has for them now."""


def load_values(
    training: Training,
    place: Path,
    record: StateRecord,
    foreign: States | None,
    coordinator: Coordinator,
    *,
    beside: Beside,
    rank: int,
    strict: bool,
) -> None:
    """Read all values and elementwise states from the state in `place` (all ranks, in a load's meeting).

    What is kept `beside` the model is read too. A `foreign` state is given; what it lacks stays as it is. For `rank`
    and `strict` see :func:`load_model_values`.
    """
    # Where new masters cannot be brought into the model, it reads its values itself.
    copies = training.copy_masters is not None
    apart = {member.name for slot in training.slots if not slot.is_in_one_piece for member in slot.members}
    without = record.trained - apart if copies else frozenset[str]()
    how: Any = {"rank": rank, "strict": strict, "without": without, "beside": beside}
    _load(training.model, training, place, record, foreign, coordinator, **how)
    if training.copy_masters is not None:
        training.copy_masters()


def load_model_values(
    model: nn.Module, place: Path, record: StateRecord, coordinator: Coordinator, *, rank: int, strict: bool
) -> None:
    """Read what `model` has into its own memory (all ranks, in a load's meeting).

    Of buffers that differed between ranks, it gets those of `rank`. If it is not `strict`, what the state lacks stays
    as it is.
    """
    _load(model, None, place, record, None, coordinator, rank=rank, strict=strict, without=frozenset())


def _load(
    model: nn.Module,
    training: Training | None,
    place: Path,
    record: StateRecord,
    foreign: States | None,
    coordinator: Coordinator,
    *,
    rank: int,
    strict: bool,
    without: AbstractSet[str],
    beside: Beside = _NOTHING,
) -> None:
    """Read what `model` has but for parameters `without`, and what its `training` keeps, in one load (all ranks).

    And what is kept `beside` it.
    """
    is_complete, of_keys = strict and foreign is None, foreign or partial(lazy_states, model, place)
    needed = (names_in(model) if record.base is None else {*record.untrained} | record.trained) - without
    keys, more = [VALUES], [BUFFERS] if record.buffers else []
    whole: dict[str, torch.Tensor] = {}
    config = replace(settings_in_force(), strict=is_complete)
    with coordinator.reporting():
        if needed:
            make_ready(model)
        memory = LiveModel(model, coordinator, config, with_masters=training is None)
        wanted: Wanted = []
        if training is not None:
            keys += [*record.keys, *beside.slots]
            more += [WHOLE] if record.has_tensors_of_parts else []
            more += [buffers_key(key) for key in beside.slots]
            wanted, whole = wanted_of(training, record.keys, record.form_of), tensors_of(training, record)
            wanted = [*wanted, *((slot, [key]) for key, slots in beside.slots.items() for slot in slots)]
            whole |= beside.buffers
            if not needed:  # ranks exchange nothing that settings decide on
                memory.device, memory.exchange_settings = training.device, ()
        memory.slots = SlotMemory(wanted, whole)
        load = Load(config, {}, coordinator, memory)
        with closing(load), load.memory, load.clock("total"), torch.no_grad():
            states = of_keys(load, [*keys, *more])
            lazy, missing = None, set[str]()
            if needed:
                lazy, missing, _ = lazy_model(model, states[VALUES], strict=strict)
                _refuse_lacking(place, lazy, missing, needed if is_complete else set())
            found = _converted(model, {key: states[key] for key in keys}) if training is not None else {}
            found |= {entry_name(key, name): it for key in more for name, it in states[key].items()}
            refuse_absent(whole, found, place)
            buffers = memory_of_buffers(model, place, record, rank, found, strict=strict)
            whole |= {key: values for key, (_, values) in buffers.items()}
            load.fill(LazyTraining(lazy, found), missing | without, set())
            for buffer, values in buffers.values():
                buffer.copy_(values)
        if needed:
            load.finish(model, logger)


def _converted(model: nn.Module, states: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Lazy tensors of `states`, by key and name, as the parameters of `model` lie now; by their names in files."""
    found: dict[str, Any] = {}
    for key, of_key in states.items():
        lazy, missing, _ = lazy_model(model, of_key)
        convert_lazy(model, lazy, missing)
        found |= {entry_name(key, name): it for name, it in lazy.named_parameters() if name not in missing}
    return found


def _refuse_lacking(place: Path, lazy: nn.Module, missing: AbstractSet[str], needed: AbstractSet[str]) -> None:
    there = {name for name, _ in [*lazy.named_parameters(), *lazy.named_buffers()]} - missing
    if lacking := sorted(needed - there):
        raise LoadError(
            f"{place}: expected values for {len(needed)} parameters and buffers; {len(lacking)} are not there: "
            f"{', '.join(lacking[:8])}. Copy the state again, or go on with the model that was saved."
        )


Wanted = Sequence[tuple[Slot, Sequence[str]]]
"""Slots, and the names of those of their states that are read."""


def wanted_of(training: Training, keys: Sequence[str], forms: Mapping[str, Form]) -> Wanted:
    """The slots of a training with what they have of the states `keys`, and their values."""
    kept = {slot: form_for(slot, forms).each for slot in training.slots}
    return [
        (slot, [*([VALUES] if slot.is_in_one_piece else []), *(key for key in keys if key in each)])
        for slot, each in kept.items()
    ]
