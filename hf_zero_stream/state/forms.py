"""What an optimizer keeps of each of its parameters, as a *form*, and set anew in the one that goes on.

A form says which entries are elementwise: these have values in files of their own, and are cut with their parameter.
It has all entries that are small, with their exact types: numbers, None, strings, dtypes, and tuples, lists and dicts
of these. What belongs to a slot as a whole is none of a form's (:mod:`.wholes`), nor is what is small and differs
between ranks. Whatever is none of this is refused by name. Parameters of which the same is kept have one form.

The options of the optimizer's groups are recorded, and set, in the same way.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..checkpoint.format import excerpt
from ..errors import CheckpointError, ConfigError, UnsupportedError
from ..holdings.slots import (
    Forms,
    Slot,
    Training,
    elementwise_keys,
    first_of_forms,
    forms_of,
    is_number,
    storage_kind,
    zeros_of,
)
from ..ranks.coordinator import Coordinator
from ..saving.parameters import refuse_differing
from ..settings.values import dtype_name, dtype_named
from .plain import is_same, plain, restored
from .record import Form, GroupRecord, StateRecord


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


def kept_by(
    slots: Sequence[Slot], alike: Forms, keys: Collection[str], whole: Mapping[Slot, Collection[str]]
) -> list[Form]:
    """The form of each slot now, of which `keys` are the elementwise entries, and others go whole.

    Slots that are `alike` differ in values alone: all else is looked at once of many.

    Raises:
        UnsupportedError: an entry cannot be written as JSON and read again as it is.
    """
    known: dict[Any, tuple[dict[str, str], list[str]]] = {}
    found = []
    for slot in slots:
        goes_whole = whole.get(slot, ())
        place = alike[slot], *goes_whole
        if place not in known:
            rest = [key for key in slot.entries if key not in goes_whole]
            each = {key: slot.elementwise(key) for key in rest if key in keys}
            kinds = {key: _kind_of(it, slot) for key, it in each.items() if it is not None}
            known[place] = kinds, [key for key in rest if key not in kinds]
        kinds, small = known[place]
        found.append(Form(kinds, {key: _written(key, slot) for key in small}))
    return found


def _kind_of(value: torch.Tensor, slot: Slot) -> str:
    return "" if slot.is_swapped else storage_kind(value, slot.values)


def _written(key: str, slot: Slot) -> Any:
    return with_kind(slot.entries[key], f"the optimizer's {key} of {_first(slot)}", small=True)


def _first(slot: Slot) -> str:
    return slot.members[0].name if slot.members else "padding"


class Kept(NamedTuple):
    """What the optimizer of a rank keeps.

    Attributes:
        keys: the names of elementwise entries.
        whole: by the number of a group, the names of entries that belong to its slots as a whole.
        digests: of what is kept under each other name in each group: the same on ranks that keep the same.
        trained: a digest of the names, shapes and dtypes of what is trained.
    """

    keys: Sequence[str]
    whole: Mapping[int, Sequence[str]]
    digests: Mapping[tuple[int, str], bytes]
    trained: bytes


def kept_here(training: Training) -> tuple[Kept, list[Form]]:
    """What this rank keeps, and the forms of its slots.

    Raises:
        UnsupportedError: for an entry that a state has no place for.
    """
    slots = training.slots
    alike = forms_of(slots)
    whole = _together([{slot.group: slot.whole} for slot in first_of_forms(slots, alike) if slot.whole])
    return _kept(slots, alike, elementwise_keys(slots, alike), whole)


def _kept(
    slots: Sequence[Slot], alike: Forms, keys: Sequence[str], whole: Mapping[int, Sequence[str]]
) -> tuple[Kept, list[Form]]:
    forms = kept_by(slots, alike, keys, {slot: whole[slot.group] for slot in slots if slot.group in whole})
    columns: dict[tuple[int, str], dict[str, Any]] = {}  # by parameters: ranks may have them in another order
    for slot, form in zip(slots, forms, strict=True):
        for key, kept in (*form.each.items(), *form.small.items()):
            of_slot = dict.fromkeys([member.name for member in slot.members], [key in form.each, kept])
            columns.setdefault((slot.group, key), {}).update(of_slot)
    digests = {place: _digest(column) for place, column in columns.items()}
    trained = {member.name: [member.box.shape, str(slot.values.dtype)] for slot in slots for member in slot.members}
    return Kept(keys, whole, digests, _digest(trained)), forms


def _digest(value: Mapping[str, Any]) -> bytes:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest()


def agreed(
    training: Training, here: tuple[Kept, list[Form]], everyone: Sequence[Kept], coordinator: Coordinator
) -> tuple[Kept, list[Form]]:
    """What all ranks keep, by what each does: what differs between them goes whole; and the forms of these slots.

    What :func:`kept_here` gave holds unless ranks differ.

    Raises:
        SaveError: on all ranks: they train other parameters.
        UnsupportedError: on all ranks: they have not made the same number of steps.
    """
    refuse_differing([each.trained for each in everyone], "would save other tensors")
    slots, (mine, forms) = training.slots, here
    keys = [*dict.fromkeys(key for each in everyone for key in each.keys)]
    whole = _together([each.whole for each in everyone])
    if any(each.keys != keys or each.whole != whole for each in everyone):
        mine, forms = _kept(slots, forms_of(slots), keys, whole)
        everyone = coordinator.all_gather(mine)
    places = dict.fromkeys(place for each in everyone for place in each.digests)
    apart = [place for place in places if len({each.digests.get(place) for each in everyone}) > 1]
    if any(key == "step" for _, key in apart):
        raise UnsupportedError(
            "The ranks have not made the same number of steps: what the optimizer keeps as `step` differs between "
            "them. All ranks must save after the same step."
        )
    if apart:
        whole = _together([whole, *({number: [key]} for number, key in apart)])
        mine, forms = _kept(slots, forms_of(slots), keys, whole)
    groups = range(len(training.optimizer.param_groups))
    return mine._replace(keys=[key for key in keys if any(key not in whole.get(it, ()) for it in groups)]), forms


def _together(of_ranks: Sequence[Mapping[int, Sequence[str]]]) -> dict[int, list[str]]:
    found: dict[int, dict[str, None]] = {}
    for of_rank in of_ranks:
        for number, keys in of_rank.items():
            found.setdefault(number, {}).update(dict.fromkeys(keys))
    return {number: [*keys] for number, keys in sorted(found.items())}


def numbered(slots: Sequence[Slot], forms: Sequence[Form]) -> tuple[list[Form], dict[str, int]]:
    """The different forms, and by the name of each parameter the number of its own."""
    numbers: dict[str, int] = {}
    different: list[Form] = []
    of_parameters: dict[str, int] = {}
    for slot, form in zip(slots, forms, strict=True):
        number = numbers.setdefault(json.dumps([form.each, form.small]), len(numbers))
        if number == len(different):
            different.append(form)
        of_parameters |= {member.name: number for member in slot.members}
    return different, of_parameters


# --------------------------------------------------------------------------------------------------------- at a resume


def form_for(slot: Slot, forms: Mapping[str, Form]) -> Form:
    """The form of what is kept for `slot`, from those of parameters, which :func:`refuse_unlike` has compared.

    Where some of them had an elementwise entry, zeros stand for those of the others.
    """
    of_members = [forms[member.name] for member in slot.members]
    if not of_members:
        return Form()
    each = {key: kind for form in of_members for key, kind in form.each.items()}
    return Form({key: _beside(kind, slot) for key, kind in each.items()}, of_members[0].small)


def _beside(kind: str, slot: Slot) -> str:
    """The :func:`storage_kind` beside what `slot` trains now."""
    return " ".join(word for word in kind.split() if word != dtype_name(slot.values.dtype))


def refuse_unsound(forms: Sequence[Form], place: Path) -> None:
    """Raise a CheckpointError if a form, from anywhere, has what no optimizer can go on with."""
    for form in forms:
        for key, written in form.small.items():
            value = option_of(key, written, None)
            if key == "step" and not (is_number(value) or isinstance(value, torch.Tensor)):
                raise CheckpointError(
                    f"{place}: step: expected a number of steps in what the optimizer keeps; found {excerpt(value)}. "
                    "Copy the state again, or go on from an older one."
                )


def refuse_unlike(slots: Sequence[Slot], forms: Mapping[str, Form], place: Path) -> None:
    """Raise a ConfigError if parameters differ in what is kept of them, and are trained as one tensor now."""
    for slot in slots:
        seen: dict[str, str] = {}
        for number, member in enumerate(slot.members):
            form, first = forms[member.name], forms[_first(slot)]
            for key in {**first.small, **form.small} if number and form is not first else ():
                kept = [json.dumps(each.small[key]) if key in each.small else "" for each in (first, form)]
                if kept[0] != kept[1]:  # as text, by which NaN is the same as NaN
                    _refuse(place, slot, key, member.name)
            for key, kind in form.each.items():
                if seen.setdefault(key, _beside(kind, slot)) != _beside(kind, slot):
                    _refuse(place, slot, key, member.name)


def _refuse(place: Path, slot: Slot, key: str, name: str) -> None:
    raise ConfigError(
        f"{place}: group {slot.group} of the optimizer: {key} differs between {_first(slot)} and {name}, which are "
        "trained as one tensor now. Go on in the kind of training that saved the state."
    )


Wholes = Mapping[Slot, Mapping[str, Any] | None]
"""The entries that belong to slots as they are; None for one of which nothing was saved, as it is padding alone."""


def set_entries(optimizer: Any, slots: Sequence[Slot], forms: Mapping[str, Form], whole: Wholes) -> None:
    """Have the optimizer keep what the forms say, and what goes `whole`; tensors have zeros until they are read."""
    for slot in slots:
        form, of_slot = form_for(slot, forms), whole.get(slot, {})
        if slot.entries is not optimizer.state.get(slot.values):
            optimizer.state[slot.values] = slot.entries
        with slot.opened(changes=True):
            old = dict(slot.entries)
            for key in () if slot.is_swapped else old.keys() - form.each.keys():
                del slot.entries[key]
            for key, kind in form.each.items():
                mine = slot.elementwise(key)
                if mine is None or (storage_kind(mine, slot.values) != kind and not slot.is_swapped):
                    slot.entries[key] = zeros_of(kind, slot.values)
            for key, written in form.small.items():
                slot.entries[key] = _like(old.get(key), written, key, optimizer, slot)
            slot.entries.update(of_slot or {})
        if of_slot is None:
            slot.entries.clear()
        if not slot.entries:  # some optimizers look whether there is an entry at all
            optimizer.state.pop(slot.values, None)


def is_exact(optimizer: Any) -> bool:
    """Whether numbers have the types with which they were saved: torch's and DeepSpeed's go on in each other."""
    return not type(optimizer).__module__.startswith(("torch.optim", "deepspeed"))


def _like(old: Any, written: Any, key: str, optimizer: Any, slot: Slot) -> Any:
    """What was written, a number as the optimizer keeps it; a new tensor for each slot."""
    value = option_of(key, written, slot.values.device)
    if not is_number(value) or (is_exact(optimizer) and is_tensor(written)):
        return value
    number = value.item() if isinstance(value, torch.Tensor) else value
    if isinstance(old, torch.Tensor) and old.dim() == 0:
        return torch.full_like(old, number)
    if is_number(old):
        return type(old)(number)
    if type(optimizer).__module__.startswith("torch.optim"):
        group = optimizer.param_groups[slot.group]
        on_device = group.get("capturable") or group.get("fused")
        return torch.tensor(float(number), dtype=torch.float32, device=slot.values.device if on_device else None)
    return number


def refuse_lost(training: Training, record: StateRecord, whole: Wholes, place: Path) -> None:
    """Raise a CheckpointError unless the optimizer keeps what the `record` says, once all of it has been loaded.

    If the saved one was of another class, the names are compared alone. Of tensors in swap files it is compared that
    they are there: they are not read again.
    """
    slots = [slot for slot in training.slots if slot.members and whole.get(slot, {}) is not None]
    is_same, exactly = type(training.optimizer).__name__ == record.optimizer, is_exact(training.optimizer)
    whole_keys = {slot: [*(whole.get(slot) or ())] for slot in slots}
    for slot, kept in zip(slots, kept_by(slots, forms_of(slots), record.keys, whole_keys), strict=True):
        wanted, found = (dict(_described(each, slot, exactly)) for each in (form_for(slot, record.form_of), kept))
        wanted |= dict.fromkeys(whole_keys[slot], "what goes whole")
        found |= {key: "what goes whole" for key in whole_keys[slot] if key in slot.entries}
        different = sorted(wanted.keys() ^ found.keys())
        if is_same:
            different += sorted(key for key in wanted.keys() & found.keys() if wanted[key] != found[key])
        if different:
            key = different[0]
            raise CheckpointError(
                f"{place}: what the optimizer keeps of {_first(slot)} is not what the record of it says: {key}: "
                f"expected {wanted.get(key, 'nothing')}; found {found.get(key, 'nothing')}. Use the checkpoints of "
                "DeepSpeed or accelerate, and report this."
            )


def _described(form: Form, slot: Slot, exactly: bool) -> Iterator[tuple[str, str]]:
    for key, kind in form.each.items():
        yield key, "a tensor" if slot.is_swapped else f"a tensor {kind}".rstrip()
    for key, written in form.small.items():
        yield key, "a number" if is_written_number(written) and not exactly else json.dumps(written)
