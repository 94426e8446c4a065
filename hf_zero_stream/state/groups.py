"""The options of an optimizer's groups: as a state records them, and set in the groups that are trained now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..checkpoint.format import excerpt
from ..dtypes import dtype_name, dtype_named
from ..errors import CheckpointError, UnsupportedError
from ..holdings.slots import Slot, is_number
from .plain import is_same, plain, restored
from .record import GroupRecord


ADAMS = {"Adam", "AdamW", "FusedAdam", "DeepSpeedCPUAdam"}
"""They keep the same."""

OF_SOME_ADAMS = {"amsgrad": False, "maximize": False, "bias_correction": True}
"""Options that not all of :data:`ADAMS` have, and what one does that has it not."""

_DECOUPLED = "decoupled_weight_decay"
"""By this torch's Adam is AdamW; which of them goes on is said by its class, as in its own ``load_state_dict``."""

_OF_NO_OTHER_ADAM = {*OF_SOME_ADAMS, _DECOUPLED, "foreach", "fused", "capturable", "differentiable"}
"""Options of torch's that no other should get: it would not heed them. The last four say how a step is computed."""

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
        name: plain(value, what) if name in defaults else with_kind(value, f"{what}: {name}")
        for name, value in options.items()
    }


def with_kind(value: Any, what: str, *, small: bool = False) -> Any:
    """`value` as JSON has it, such that :func:`option_of` gives it as it is.

    If it is to be `small`, tensors and arrays in it have one element at most; and dtypes and paths may be in it.

    Raises:
        UnsupportedError: it would come back as something else, or not at all.
    """
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        dtype, shape = dtype_name(value.dtype), list(value.shape)
        return {
            _TENSOR: {"value": value.item(), "dtype": dtype, "shape": shape, "on_host": value.device.type == "cpu"}
        }
    if small and not _is_small(value):
        raise UnsupportedError(
            f"{what}, a {type(value).__name__}, has tensors in it. Only numbers, and state that has one number for an "
            "element, can be cut for another number of ranks. Use an optimizer like AdamW, or the checkpoints of "
            "DeepSpeed or accelerate."
        )
    written = plain(value, what, exactly=True, with_tensors=small)
    if small and not is_same(restored(written), value):
        raise UnsupportedError(
            f"{what}, a {type(value).__name__}, would not come back as it is. Use numbers, None, strings, dtypes, and "
            "tuples, lists and dicts of these, or the checkpoints of DeepSpeed or accelerate."
        )
    return written


def _is_small(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_small, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_small, value))
    return not (isinstance(value, torch.Tensor) and value.numel() > 1)


def is_tensor(written: Any) -> bool:
    """Whether :func:`with_kind` has written a tensor."""
    return isinstance(written, Mapping) and list(written) == [_TENSOR]


def is_written_number(written: Any) -> bool:
    """Whether :func:`with_kind` has written a number, or a tensor that is one (:func:`..holdings.slots.is_number`)."""
    return written[_TENSOR]["shape"] == [] if is_tensor(written) else is_number(written)


def options_of(recorded: GroupRecord, device: torch.device | None = None) -> dict[str, Any]:
    """The options that were recorded; tensors on `device`, or on the host if they were there.

    Raises:
        CheckpointError: an option is not as :func:`recorded_options` writes it.
    """
    return {name: option_of(name, value, device) for name, value in recorded.options.items()}


def option_of(name: str, value: Any, device: torch.device | None) -> Any:
    """Read what :func:`with_kind` has written, tensors on `device`, or on the host if they were there."""
    if not is_tensor(value):
        return restored(value)
    try:
        found = value[_TENSOR]
        made = torch.tensor(found["value"], dtype=dtype_named(found["dtype"]))
        return made.reshape(found["shape"]).to("cpu" if found["on_host"] else device)
    except (TypeError, KeyError, AttributeError, RuntimeError, ValueError, OverflowError) as error:
        raise CheckpointError(
            f"the option {name} of a group of the optimizer: expected a tensor of one element as save_state writes "
            f"it; found {excerpt(value[_TENSOR])}. Copy the state again, or go on from an older one."
        ) from error


def drop_options(optimizer: Any, groups: Sequence[GroupRecord]) -> None:
    """Drop what steps have put into the groups, and had not when the state was saved."""
    if any(optimizer.state.values()):
        kept = {*_NOT_RECORDED, *getattr(optimizer, "defaults", {}), "initial_lr"}  # the last is a scheduler's
        for group, recorded in zip(optimizer.param_groups, groups, strict=True):
            for name in group.keys() - kept - recorded.options.keys():
                if is_number(group[name]) and not isinstance(group[name], bool):
                    del group[name]


def set_group(optimizer: Any, number: int, recorded: GroupRecord, slots: Sequence[Slot]) -> None:
    """Set the options of the optimizer's group of this `number`, which trains some of `slots`.

    All that was recorded is set, but for what :mod:`.refusals` has found to make no difference to another Adam.
    """
    group = optimizer.param_groups[number]
    is_adam = type(optimizer).__name__ in ADAMS
    device = next((slot.values.device for slot in slots if slot.group == number), None)
    for name, value in options_of(recorded, device).items():
        if name == _DECOUPLED and isinstance(optimizer, torch.optim.AdamW):
            continue
        if name in group:
            set_option(group, name, value)
        elif not is_adam or name not in _OF_NO_OTHER_ADAM:
            group[name] = value


def set_option(group: dict[str, Any], name: str, value: Any) -> None:
    mine = group[name]
    if isinstance(mine, torch.Tensor) and value is not None:
        mine.fill_(value)
    else:
        group[name] = tuple(value) if isinstance(mine, tuple) and isinstance(value, list) else value
