"""The options of an optimizer's groups: as a state records them, and set in the groups that are trained now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..checkpoint.format import excerpt
from ..errors import CheckpointError
from ..holdings.slots import Slot, is_number
from .plain import plain, restored
from .record import GroupRecord, StateRecord


ADAMS = {"Adam", "AdamW", "FusedAdam", "DeepSpeedCPUAdam"}
"""They keep the same."""

OF_SOME_ADAMS = {"amsgrad": False, "maximize": False, "bias_correction": True}
"""Options that not all of :data:`ADAMS` have, and what one does that has it not."""

_DECOUPLED = "decoupled_weight_decay"
"""By this torch's Adam is AdamW; which of them goes on is said by its class, as in its own ``load_state_dict``."""

_OF_NO_OTHER_ADAM = {*OF_SOME_ADAMS, _DECOUPLED, "foreach", "fused", "capturable", "differentiable"}
"""What torch's have, and no other should get: it would not heed them. The last four say how a step is computed."""

_TENSOR = "(tensor)"

_NOT_RECORDED = ("params", "param_names")


def recorded_options(optimizer: Any, number: int) -> dict[str, Any]:
    """The options of the optimizer's group of this `number`, as JSON has them.

    Those that a new optimizer does not have, such as a ``step`` that the first step makes, are recorded with their
    kind: there will be nothing in the group to tell it by.

    Raises:
        UnsupportedError: an option cannot be written as JSON.
    """
    what, defaults = f"group {number} of the optimizer", getattr(optimizer, "defaults", {})
    options = {name: value for name, value in optimizer.param_groups[number].items() if name not in _NOT_RECORDED}
    return {
        name: plain(value, what) if name in defaults else _with_kind(value, f"{what}: {name}")
        for name, value in options.items()
    }


def _with_kind(value: Any, what: str) -> Any:
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        return plain(value, what, exactly=True)
    dtype, shape = str(value.dtype).removeprefix("torch."), list(value.shape)
    return {_TENSOR: {"value": value.item(), "dtype": dtype, "shape": shape, "on_host": value.device.type == "cpu"}}


def options_of(recorded: GroupRecord, device: torch.device | None = None) -> dict[str, Any]:
    """The options that were recorded; tensors on `device`, or on the host if they were there.

    Raises:
        CheckpointError: an option is not as :func:`recorded_options` writes it.
    """
    return {name: _option(name, value, device) for name, value in recorded.options.items()}


def _option(name: str, value: Any, device: torch.device | None) -> Any:
    if not isinstance(value, Mapping) or list(value) != [_TENSOR]:
        return restored(value)
    try:
        found = value[_TENSOR]
        made = torch.tensor(found["value"], dtype=getattr(torch, found["dtype"]))
        return made.reshape(found["shape"]).to("cpu" if found["on_host"] else device)
    except (TypeError, KeyError, AttributeError, RuntimeError, ValueError, OverflowError) as error:
        raise CheckpointError(
            f"the option {name} of a group of the optimizer: expected a tensor of one element as save_state writes "
            f"it; found {excerpt(value[_TENSOR])}. Copy the state again, or go on from an older one."
        ) from error


def drop_entries(optimizer: Any, slots: Sequence[Slot], record: StateRecord) -> None:
    """Drop what the optimizer keeps, of steps that it has made already, and did not keep when the state was saved."""
    if any(optimizer.state.values()):
        kept = {*_NOT_RECORDED, *getattr(optimizer, "defaults", {}), "initial_lr"}  # the last is a scheduler's
        for group, recorded in zip(optimizer.param_groups, record.groups, strict=True):
            for name in group.keys() - kept - recorded.options.keys():
                if is_number(group[name]) and not isinstance(group[name], bool):
                    del group[name]
    for slot in slots:
        known = {*record.keys, *record.groups[slot.group].numbers}
        for key in () if slot.is_swapped else slot.entries.keys() - known:
            del slot.entries[key]


def set_group(optimizer: Any, number: int, recorded: GroupRecord, slots: Sequence[Slot]) -> None:
    """Set the options of the optimizer's group of this `number`, and what it keeps of its slots that is a number.

    All that was recorded is set, but for what :mod:`.refusals` has found to make no difference to another Adam.
    """
    group = optimizer.param_groups[number]
    is_adam = type(optimizer).__name__ in ADAMS
    for name, value in options_of(recorded, next((slot.values.device for slot in slots), None)).items():
        if name == _DECOUPLED and isinstance(optimizer, torch.optim.AdamW):
            continue
        if name in group:
            set_option(group, name, value)
        elif not is_adam or name not in _OF_NO_OTHER_ADAM:
            group[name] = value
    positions = {name: position for position, name in enumerate(recorded.parameters)}
    for slot in slots:
        first = positions[slot.members[0].name]  # the others of a slot have the same numbers
        for key, values in recorded.numbers.items():
            value = values[first] if isinstance(values, list) else values
            if value is None:  # it had never been trained
                slot.entries.clear()
                break
            slot.entries[key] = _number_like(
                slot.entries.get(key), value, optimizer, group, slot, recorded.kinds.get(key)
            )
        for key, names in recorded.lacking.items():
            if all(member.name in names for member in slot.members):
                slot.entries.pop(key, None)


def set_option(group: dict[str, Any], name: str, value: Any) -> None:
    mine = group[name]
    if isinstance(mine, torch.Tensor) and value is not None:
        mine.fill_(value)
    else:
        group[name] = tuple(value) if isinstance(mine, tuple) and isinstance(value, list) else value


def kinds_of(slots: Sequence[Slot]) -> dict[str, str]:
    """Of the numbers that the optimizer keeps of the slots, those that are tensors: their dtypes, by name."""
    numbers = {key: value for slot in slots for key, value in slot.entries.items() if is_number(value)}
    tensors = {key: value for key, value in numbers.items() if isinstance(value, torch.Tensor)}
    return {key: str(value.dtype).removeprefix("torch.") for key, value in tensors.items()}


def _number_like(old: Any, value: Any, optimizer: Any, group: Any, slot: Slot, kind: str | None) -> Any:
    """`value` as the optimizer keeps such a number; a new tensor for each slot."""
    if isinstance(old, torch.Tensor):
        return torch.full_like(old, value)
    if old is not None:
        return type(old)(value)
    module = type(optimizer).__module__
    if module.startswith("torch.optim"):
        on_device = group.get("capturable") or group.get("fused")
        return torch.tensor(float(value), dtype=torch.float32, device=slot.values.device if on_device else None)
    if kind is None or module.startswith("deepspeed"):  # whose Adams go on from torch's, and count in whole numbers
        return type(value)(value)
    return torch.tensor(value, dtype=getattr(torch, kind))
