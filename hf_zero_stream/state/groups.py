"""Puts what a state has recorded of an optimizer's groups into the groups that are trained now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..destinations.slots import Slot
from .record import GroupRecord, StateRecord, restored


__all__ = ["drop_entries", "set_group", "set_option"]


_DECOUPLED = "decoupled_weight_decay"
"""By this torch's Adam is AdamW; which of them goes on is said by its class, as in its own ``load_state_dict``."""


def drop_entries(slots: Sequence[Slot], record: StateRecord) -> None:
    """Drop what the optimizer keeps, of steps that it has made already, and did not keep when the state was saved."""
    for slot in slots:
        recorded = {*record.keys, *record.groups[slot.group].numbers}
        for key in () if slot.is_swapped else slot.entries.keys() - recorded:
            del slot.entries[key]


def set_group(optimizer: Any, number: int, recorded: GroupRecord, slots: Sequence[Slot]) -> None:
    """Set the options of the optimizer's group of this `number`, and what it keeps of its slots that is a number."""
    group = optimizer.param_groups[number]
    for name, value in restored(recorded.options).items():
        if name not in group or (name == _DECOUPLED and isinstance(optimizer, torch.optim.AdamW)):
            continue
        set_option(group, name, value)
    positions = {name: position for position, name in enumerate(recorded.parameters)}
    for slot in slots:
        first = positions[slot.members[0].name]  # the others of a slot have the same numbers
        for key, values in recorded.numbers.items():
            value = values[first] if isinstance(values, list) else values
            if value is None:  # it had never been trained
                slot.entries.clear()
                break
            slot.entries[key] = _number_like(slot.entries.get(key), value, optimizer, group, slot)
        for key, names in recorded.lacking.items():
            if all(member.name in names for member in slot.members):
                slot.entries.pop(key, None)


def set_option(group: dict[str, Any], name: str, value: Any) -> None:
    if isinstance(group[name], torch.Tensor):
        group[name].fill_(value)
    else:
        group[name] = tuple(value) if isinstance(group[name], tuple) else value


def _number_like(old: Any, value: Any, optimizer: Any, group: Any, slot: Slot) -> Any:
    """`value` as the optimizer keeps such a number; a new tensor for each slot."""
    if isinstance(old, torch.Tensor):
        return torch.full_like(old, value)
    if old is not None or not type(optimizer).__module__.startswith("torch.optim"):
        return type(value)(value) if old is None else type(old)(value)
    on_device = group.get("capturable") or group.get("fused")
    return torch.tensor(float(value), dtype=torch.float32, device=slot.values.device if on_device else None)
