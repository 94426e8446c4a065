"""Reads the values of a model that goes on: those that the state has, and the others from the weights beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..checkpoint.formats import KnownHeaders
from ..destinations.skeleton import LazyTensorModule, convert_lazy
from ..destinations.slot_memory import SlotMemory
from ..engine.load import Load
from ..errors import LoadError
from ..holdings.introspection import has_partition, is_adapted
from ..holdings.own_names import named_parameters
from ..holdings.slots import BLOCKS, EXACT, MASTER
from ..holdings.training import Training
from ..loading.into import load_some_into, place_into
from ..ranks.coordinator import Coordinator
from ..reports.measures import collector_paused
from ..seams.ds_config import settings_in_force
from ..seams.session import LazyModel
from .blocks import refuse_lacking, tensors_of
from .buffers import load_buffers
from .layout import files_of, lazy_state, persistent_buffers
from .record import StateRecord


def has_base(model: nn.Module, record: StateRecord) -> bool:
    """Whether the state of `record` has no weights beside it, but adapters at most: its base is what it was."""
    return record.base is not None or is_adapted(model)


def has_more(model: nn.Module, record: StateRecord, names: AbstractSet[str]) -> bool:
    """Whether anything of `model` but parameters of these `names` comes from the weights beside the state."""
    if has_base(model, record):
        return False
    return any(name not in names for name, _ in named_parameters(model)) or bool(persistent_buffers(model))


def load_values(
    training: Training,
    folder: Path,
    place: Path,
    record: StateRecord,
    coordinator: Coordinator,
    known: KnownHeaders,
    *,
    rank: int,
    strict: bool,
) -> None:
    """Weights in `folder`, elementwise states in `place`; from the weights' files what has no master in memory."""
    model, swapped = training.model, training.swapped_masters
    in_memory = record.with_masters - swapped
    # One plan for masters and moments; where there are no masters, a state with a base has what is trained itself.
    together = bool(in_memory) and (training.copies_masters or has_base(model, record))
    load_model_values(
        model,
        folder,
        place,
        record,
        in_memory,
        coordinator,
        known,
        rank=rank,
        strict=strict,
        with_masters=not swapped,
        later=together,
    )
    blocks = tensors_of(training, record) if record.has_parts else None
    states = partial(_states_in, training, place, record, blocks)
    load_states(training, record.keys, states, coordinator, with_masters=together, blocks=blocks)
    if together:
        training.copy_masters()


def load_model_values(
    model: nn.Module,
    folder: Path,
    place: Path,
    record: StateRecord,
    values: set[str],
    coordinator: Coordinator,
    known: KnownHeaders,
    *,
    rank: int,
    strict: bool,
    with_masters: bool = True,
    later: bool = False,
) -> None:
    """All that `model` has: `values` from the state in `place`, or by the caller `later`; the rest from weights.

    Of buffers that differed between ranks, it gets those of `rank`.
    """
    if has_more(model, record, values):
        how = {"strict": strict, "with_masters": with_masters, "coordinator": coordinator, "known": known}
        _load_weights(model, folder, values, **how)
    for key, names in ((EXACT, {*record.exact}), (MASTER, set() if later else values)):
        if names:
            _load_state(model, place, record, key, names, coordinator, strict=strict)
    load_buffers(model, place, record, rank, coordinator, strict=strict)


def _load_weights(model: Any, folder: Path, without: set[str], **how: Any) -> None:
    if isinstance(model, PreTrainedModel):
        load_some_into(model, str(folder), without, needs_adapters=True, **how)
        return
    needed = {name for name, _ in named_parameters(model)} | {*persistent_buffers(model).values()}
    _load_laid_out(model, folder, None, needed - without, without, **how)


def _load_state(
    model: Any, place: Path, record: StateRecord, key: str, needed: set[str], coordinator: Coordinator, *, strict: bool
) -> None:
    """Values from the state itself: those that were trained, or what no weights have as it is."""
    without = record.with_masters - needed
    _load_laid_out(model, place, key, needed, without, strict=strict, coordinator=coordinator)


def _load_laid_out(
    model: Any, place: Path, key: str | None, needed: set[str], without: set[str], *, strict: bool, **how: Any
) -> None:
    """Values of the state `key` in the folder `place`, or of weights; `needed` must be there, if it is `strict`."""

    def lazy_model(load: Load) -> LazyModel:
        found = lazy_state(load, model, place, key, strict=strict)
        _refuse_lacking(place, found, needed if strict else set())
        return found

    place_into(model, str(place), lazy_model, without, takes_packed=True, **how)


def _refuse_lacking(place: Path, found: LazyModel, needed: set[str]) -> None:
    lazy, missing, _ = found
    there = {name for name, _ in [*lazy.named_parameters(), *lazy.named_buffers()]} - missing
    if lacking := sorted(needed - there):
        raise LoadError(
            f"{place}: expected values for {len(needed)} parameters and buffers; {len(lacking)} are not there: "
            f"{', '.join(lacking[:8])}. Copy the state again, or go on with the model that was saved."
        )


States = Callable[[Load, Sequence[str]], dict[str, Any]]
"""Gives lazy tensors of the states of these names, by names of parameters with that of the state before each."""


@collector_paused()
def load_states(
    training: Training,
    keys: Sequence[str],
    states: States,
    coordinator: Coordinator,
    *,
    with_masters: bool,
    blocks: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Read the states `keys` of all slots by one plan (all ranks, in a load's meeting).

    Masters are read `with_masters`, and else where they are in swap files. `blocks` are tensors that are read whole;
    None if no rank has any.
    """
    wanted = [
        (slot, [key for key in keys if key != MASTER or slot.is_swapped or with_masters]) for slot in training.slots
    ]
    used = [key for key in keys if any(key in of_slot for _, of_slot in wanted)]
    if not used and blocks is None:
        return
    wanted = [(slot, [key for key in of_slot if key == MASTER or not slot.is_in_blocks]) for slot, of_slot in wanted]
    hides_zero3 = any(map(has_partition, training.model.parameters()))
    memory = SlotMemory(wanted, training.device, whole=blocks or {}, hides_zero3=hides_zero3)
    with coordinator.reporting():
        load = Load(settings_in_force(), {}, coordinator, memory)
        with closing(load), torch.no_grad():
            load.place(LazyTensorModule(states(load, used), {}), set(), set())


def _states_in(
    training: Training,
    place: Path,
    record: StateRecord,
    blocks: Mapping[str, torch.Tensor] | None,
    load: Load,
    keys: Sequence[str],
) -> dict[str, Any]:
    """:data:`States` in the folder `place`, of which this is the `record`; and what is kept in `blocks`."""
    found: dict[str, Any] = {}
    for key in keys:
        lazy, missing, _ = lazy_state(load, training.model, place, key)
        convert_lazy(training.model, lazy, missing)
        found |= {f"{key}.{name}": tensor for name, tensor in lazy.named_parameters() if name not in missing}
    if blocks is not None:
        pieces = load.open([*map(str, files_of(place, BLOCKS))], None)
        of_parts = {name: it if isinstance(it, torch.Tensor) else it[...] for name, it in pieces.items()}
        refuse_lacking(blocks, of_parts, place)
        found |= of_parts
    return found
