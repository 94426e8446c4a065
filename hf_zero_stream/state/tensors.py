"""All tensors of a training state: what this rank holds of each, and the shards in which they lie (see layout.py)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..checkpoint.safetensors import NotedShard
from ..checkpoint.state_folder import STATE, index_of
from ..holdings.holding import Holding
from ..holdings.introspection import has_converted_experts
from ..holdings.own_names import named_parameters
from ..holdings.slots import VALUES, entry_name, holdings_of
from ..holdings.steps import Steps
from ..holdings.training import Training
from ..ranks.coordinator import Coordinator
from ..saving.lazy_parameters import LazyParameters, held_values
from ..saving.preparation import SaveItem
from .buffers import held_of_buffers
from .forms import Kept
from .layout import lay_out, own_entries
from .record import StateRecord
from .wholes import held_of_parts, refuse_too_few


def state_item(
    training: Training,
    record: StateRecord,
    kept: Kept,
    folder: str,
    *,
    steps: Steps,
    max_shard_size: int | str,
    coordinator: Coordinator,
) -> SaveItem:
    """Give the item of all tensors of a state, in a `folder` of its own."""
    model, untrained = training.model, frozenset(record.untrained)
    order = [name for name, _ in named_parameters(model)]  # the same on all ranks
    states: dict[str, dict[str, Holding]] = {}
    for key in kept.keys:
        # Those of groups in which it does not go whole.
        held = holdings_of([slot for slot in training.slots if key not in kept.whole.get(slot.group, ())], key)
        states[key] = {name: held[name] for name in order if name in held}

    def values() -> dict[str, Holding]:
        return {**held_values(model, untrained, coordinator), **holdings_of(training.slots, VALUES)}

    def also() -> dict[str, Holding]:
        found = {entry_name(key, name): held for key in states for name, held in states[key].items()}
        return {**found, **held_of_parts(training, record), **held_of_buffers(model, record.buffers, coordinator)}

    def lay_out_state(where: Path, parameters: LazyParameters) -> list[NotedShard]:
        entries = _named(VALUES, own_entries(parameters, untrained))
        rest = parameters.other_entries()
        for key in states:
            of_key = {name: rest.pop(entry_name(key, name)) for name in states[key]}
            if has_converted_experts(model):
                from ..holdings.deepspeed.original_experts import with_original_experts

                of_key = with_original_experts(model, of_key)
            entries |= _named(key, of_key)
        refuse_too_few(training, record, rest)
        return lay_out(STATE, max_shard_size, where, {**entries, **rest})

    return SaveItem(
        lay_out=lay_out_state,
        index_name=index_of(STATE),
        folder=folder,
        held=values,
        prefix=entry_name(VALUES, ""),
        also=also,
        buffers=untrained,
        changes_with={
            **_named(VALUES, {**steps.of_values, **steps.of_states}),
            **{name: step for key in states for name, step in _named(key, steps.of_states).items()},
        },
    )


def _named(key: str, of_names: Mapping[str, Any]) -> dict[str, Any]:
    return {entry_name(key, name): value for name, value in of_names.items()}
