"""Records what an optimizer keeps of each of its parameters, and sets it anew in the one that goes on.

Elementwise states have files of their own. The rest is small and goes into the record, with its exact types: numbers,
None, strings, dtypes, and tuples, lists and dicts of these. Whatever is none of this is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError, ConfigError, UnsupportedError
from ..holdings.slots import Forms, Slot, first_of_forms, forms_of, is_number, make_entries, storage_kind
from ..holdings.training import Training
from .blocks import make_blocks
from .groups import option_of, with_kind
from .record import GroupRecord, StateRecord, is_plain_number


def recorded_entries(slots: Sequence[Slot], keys: Collection[str], forms: Forms | None = None) -> dict[str, Any]:
    """The fields of :class:`.record.GroupRecord` with what the slots of one group keep beside the states `keys`.

    Raises:
        UnsupportedError: an entry cannot be written as JSON and read again as it is.
    """
    slots = [slot for slot in slots if slot.members]
    forms = forms_of(slots) if forms is None else forms
    alike = first_of_forms(slots, forms)
    of_form = {forms[slot]: _small(slot, keys) for slot in alike}
    small = [{key: slot.entries[key] for key in of_form[forms[slot]]} for slot in slots]
    numbers: dict[str, Any] = {}
    kinds: dict[str, str] = {}
    others: dict[str, list[list[Any]]] = {}
    for key in dict.fromkeys(key for entries in small for key in entries):
        having = [(slot, entries[key]) for slot, entries in zip(slots, small, strict=True) if key in entries]
        types = {_type_of(value, slot) for slot, value in having}
        if len(types) == 1 and all(_is_recorded_number(value) for _, value in having):
            every = [
                _plain(entries.get(key)) for slot, entries in zip(slots, small, strict=True) for _ in slot.members
            ]
            numbers[key] = every[0] if all(it == every[0] for it in every) else every
            if isinstance(having[0][1], torch.Tensor):
                kinds[key] = types.pop()
        else:
            others[key] = _others(key, having, all_of=len(having) == len(slots))
    every_key = dict.fromkeys([*(key for slot in slots for key in slot.entries), *keys])
    lacking = {key: _names(slot for slot in slots if key not in slot.entries) for key in every_key}
    return {
        "numbers": numbers,
        "kinds": kinds,
        "others": others,
        "lacking": {key: names for key, names in lacking.items() if names},
        "tensors": _tensors(slots, alike, forms, keys),
        "in_blocks": {
            key: _names(slot for slot in slots if key in slot.blocks)
            for key in dict.fromkeys(key for slot in alike for key in slot.blocks)
        },
    }


def _small(slot: Slot, keys: Collection[str]) -> list[str]:
    """The names of the entries of `slot` that are neither elementwise nor in blocks."""
    large = {key for key in keys if slot.elementwise(key) is not None} | slot.blocks.keys()
    return [key for key in slot.entries if key not in large]


def _names(slots: Iterator[Slot]) -> list[str]:
    return [member.name for slot in slots for member in slot.members]


def _type_of(value: Any, slot: Slot) -> str:
    if isinstance(value, torch.Tensor):
        is_apart = value.device.type == "cpu" and slot.values.device.type != "cpu"
        return str(value.dtype).removeprefix("torch.") + (" host" if is_apart else "")
    return type(value).__name__


def _numbers_in(slot: Slot) -> str | None:
    """All numbers among the entries of `slot`; None if it has anything else that is no tensor of several elements."""
    small = [it for it in slot.entries.values() if not (isinstance(it, torch.Tensor) and it.dim() and it.numel() != 1)]
    return repr([*map(_plain, small)]) if all(map(is_number, small)) else None


def _is_recorded_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dim() == 0 and is_plain_number(value.item())
    return type(value) in (bool, int, float) and is_plain_number(value)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


def _others(key: str, having: Sequence[tuple[Slot, Any]], *, all_of: bool) -> list[list[Any]]:
    """Each different value of `key`, with the names of the parameters that have it; None if all of the group do."""
    found: dict[str, tuple[Any, list[str]]] = {}
    for slot, value in having:
        written = with_kind(value, f"the optimizer's {key} of {slot.members[0].name}", small=True)
        found.setdefault(json.dumps(written), (written, []))[1].extend(member.name for member in slot.members)
    if all_of and len(found) == 1:
        return [[written, None] for written, _ in found.values()]
    return [[written, names] for written, names in found.values()]


def _tensors(
    slots: Sequence[Slot], alike: Sequence[Slot], forms: Forms, keys: Collection[str]
) -> dict[str, dict[str, list[str]]]:
    kinds: dict[int, dict[str, str]] = {}
    for slot in alike:
        kept = {} if slot.is_swapped else {key: slot.elementwise(key) for key in keys}
        kinds[forms[slot]] = {key: storage_kind(it, slot.values) for key, it in kept.items() if it is not None}
    found: dict[str, dict[str, list[str]]] = {}
    for slot in slots:
        for key, kind in kinds[forms[slot]].items():
            if kind:
                of_kind = found.setdefault(key, {}).setdefault(kind, [])
                of_kind.extend(member.name for member in slot.members)
    return found


# --------------------------------------------------------------------------------------------------------- at a resume


def prepare_entries(optimizer: Any, slots: Sequence[Slot], record: StateRecord) -> None:
    """Drop what the optimizer keeps and did not keep when the state was saved, and make what it kept elementwise."""
    found = [Recorded(group, record.keys) for group in record.groups]
    for slot in slots:
        for key in () if slot.is_swapped else slot.entries.keys() - found[slot.group].every_key:
            del slot.entries[key]
        for key in slot.blocks:
            del slot.entries[key]
        make_blocks(slot, record.groups[slot.group])
    make_entries(optimizer, slots, record.keys, lambda slot, key: found[slot.group].kind(key, slot, _first(slot)))


def set_entries(optimizer: Any, number: int, recorded: Recorded, slots: Sequence[Slot]) -> None:
    """Set what the optimizer keeps of its `slots`, which are those of the group of this `number`, and is small."""
    group = optimizer.param_groups[number]
    for slot in slots:
        if recorded.is_untrained(_first(slot)):
            slot.entries.clear()
        for key in [key for key in slot.entries if recorded.is_lacking(key, slot)]:
            del slot.entries[key]
        for key, value in recorded.numbers_of(_first(slot)).items():
            kind = recorded.group.kinds.get(key)
            slot.entries[key] = _number_like(slot.entries.get(key), value, optimizer, group, slot, kind)
        for key, written in recorded.others_of(_first(slot)).items():
            slot.entries[key] = option_of(key, written, slot.values.device)
        if recorded.is_dropped(slot):
            slot.entries.clear()
        if not slot.entries:  # some optimizers look whether there is an entry at all
            optimizer.state.pop(slot.values, None)


def _first(slot: Slot) -> str:
    """The name by which a slot finds what was recorded: :func:`refuse_unlike` sees that its others have the same."""
    return slot.members[0].name


def _number_like(old: Any, value: Any, optimizer: Any, group: Any, slot: Slot, kind: str | None) -> Any:
    """`value` as the optimizer keeps such a number; a new tensor for each slot."""
    module = type(optimizer).__module__
    if is_exact(optimizer) and kind is not None:
        dtype, *on_host = kind.split(" ")
        return torch.tensor(value, dtype=getattr(torch, dtype), device=None if on_host else slot.values.device)
    if isinstance(old, torch.Tensor) and old.dim() == 0:
        return torch.full_like(old, value)
    if is_number(old):
        return type(old)(value)
    if module.startswith("torch.optim"):
        on_device = group.get("capturable") or group.get("fused")
        return torch.tensor(float(value), dtype=torch.float32, device=slot.values.device if on_device else None)
    return value


def is_exact(optimizer: Any) -> bool:
    """Whether numbers have the types with which they were saved: torch's and DeepSpeed's go on in each other."""
    return not type(optimizer).__module__.startswith(("torch.optim", "deepspeed"))


class Recorded:
    """Finds what was recorded of the parameters of a group.

    Args:
        keys: the elementwise states.
    """

    def __init__(self, group: GroupRecord, keys: Collection[str]) -> None:
        self.group, self._keys = group, frozenset(keys)
        self._positions = {name: position for position, name in enumerate(group.parameters)}
        self._lacking = {key: frozenset(names) for key, names in group.lacking.items()}
        self._others = {
            key: [(written, None if names is None else frozenset(names)) for written, names in values]
            for key, values in group.others.items()
        }
        self._kinds = {
            (key, name): kind
            for key, of_key in group.tensors.items()
            for kind, names in of_key.items()
            for name in names
        }

    @property
    def is_uniform(self) -> bool:
        """Whether the same was recorded of all parameters."""
        group = self.group
        has_names = any(names is not None for values in self._others.values() for _, names in values)
        numbers = any(isinstance(values, list) for values in group.numbers.values())
        return not (has_names or numbers or group.lacking or group.in_blocks or self._kinds)

    @property
    def every_key(self) -> set[str]:
        return {*self._keys, *self.group.numbers, *self._others, *self.group.in_blocks}

    def is_dropped(self, slot: Slot) -> bool:
        """Whether what is kept in blocks of this rank's padding begins anew: it is not saved."""
        return slot.is_padding and any(_first(slot) in names for names in self.group.in_blocks.values())

    def is_lacking(self, key: str, slot: Slot) -> bool:
        """Whether no parameter of `slot` had this entry; where some had, zeros stand for those of the others."""
        lacking = self._lacking.get(key, frozenset())
        return bool(lacking) and all(member.name in lacking for member in slot.members)

    def is_untrained(self, name: str) -> bool:
        """Whether there was no entry: DeepSpeed's folders have no number then."""
        return any(
            value is None and key not in self._keys and name not in self._lacking.get(key, ())
            for key, value in self._numbers(name).items()
        )

    def numbers_of(self, name: str) -> dict[str, Any]:
        return {key: value for key, value in self._numbers(name).items() if value is not None}

    def _numbers(self, name: str) -> dict[str, Any]:
        place = self._positions[name]
        return {
            key: values[place] if isinstance(values, list) else values
            for key, values in self.group.numbers.items()
            if name not in self._lacking.get(key, ())
        }

    def others_of(self, name: str) -> dict[str, Any]:
        return {
            key: written
            for key, values in self._others.items()
            for written, names in values
            if (name in names if names is not None else name not in self._lacking.get(key, ()))
        }

    def kind(self, key: str, slot: Slot, name: str) -> str:
        """The :func:`storage_kind` of the elementwise state `key`, beside what `slot` trains now."""
        if not (text := self._kinds.get((key, name), "")):
            return ""
        return " ".join(word for word in text.split() if word != str(slot.values.dtype).removeprefix("torch."))

    def of_parameter(self, name: str, slot: Slot) -> dict[str, str]:
        """All that must be the same for all parameters of `slot`."""
        found = {key: json.dumps(value) for key, value in self._numbers(name).items()}
        found |= {key: json.dumps(written) for key, written in self.others_of(name).items()}
        return found | {key: f"{found.get(key, '')} {self.kind(key, slot, name)}" for key in self.group.tensors}

    def of_slot(self, slot: Slot, with_numbers: bool) -> dict[str, str]:
        """All that `slot` keeps when this is loaded, as :func:`_described` says it."""
        if self.is_untrained(_first(slot)):
            return {}
        blocks = {key for key, names in self.group.in_blocks.items() if _first(slot) in names}
        others = self.others_of(_first(slot))
        numbers = self.numbers_of(_first(slot))
        found = {key: f"a tensor {self.kind(key, slot, _first(slot))}" for key in self._keys}
        found |= dict.fromkeys(blocks, "a tensor in blocks")
        found |= {
            key: _number_text(self.group.kinds.get(key, ""), value, with_numbers) for key, value in numbers.items()
        }
        found |= {key: json.dumps(written) for key, written in others.items()}
        return {key: text for key, text in found.items() if not self.is_lacking(key, slot)}


def _number_text(kind: str, value: Any, with_numbers: bool) -> str:
    return f"{kind} {json.dumps(value)}" if with_numbers else "a number"


def _without_kinds(described: dict[str, str]) -> dict[str, str]:
    return {key: "a tensor" if text.startswith("a tensor") else text for key, text in described.items()}


def _described(slot: Slot, keys: Collection[str], with_numbers: bool) -> dict[str, str]:
    """Describe what is kept, by name: how tensors are, and small values, numbers only if they are asked for."""
    found = {}
    small, blocks = _small(slot, keys), slot.blocks
    for key, value in slot.entries.items():
        if key in blocks:
            found[key] = "a tensor in blocks"
        elif key not in small:
            found[key] = f"a tensor {storage_kind(value, slot.values)}"
        elif _is_recorded_number(value):
            kind = _type_of(value, slot) if isinstance(value, torch.Tensor) else ""
            found[key] = _number_text(kind, _plain(value), with_numbers)
        else:
            found[key] = json.dumps(with_kind(value, key, small=True))
    return found


def refuse_lost(
    training: Training, record: StateRecord, place: Path, *, is_new: bool = False, forms: Forms | None = None
) -> None:
    """Compare what the optimizer keeps with the `record` of it, when that is made and when it has been loaded.

    Of another maker's optimizer, which goes on, the names are compared alone. Of tensors in swap files it is compared
    that they are there: they are not read again.

    Raises:
        CheckpointError: anything is missing, is there in addition, or is something else. When it `is_new`, an
            UnsupportedError.
    """
    is_same = type(training.optimizer).__name__ == record.optimizer
    with_numbers = is_new or is_exact(training.optimizer)
    found = [Recorded(group, record.keys) for group in record.groups]
    forms = forms_of(training.slots) if forms is None else forms
    are_uniform = [each.is_uniform for each in found]
    seen: set[tuple[int, int, str]] = set()
    for slot in training.slots:
        if not slot.members:  # this rank has padding alone there, which no name in the record is of
            continue
        if are_uniform[slot.group] and (numbers := _numbers_in(slot)) is not None:
            if (kind := (slot.group, forms[slot], numbers)) in seen:
                continue
            seen.add(kind)
        if not is_new and found[slot.group].is_dropped(slot):
            continue
        wanted = found[slot.group].of_slot(slot, with_numbers)
        kept = _described(slot, record.keys, with_numbers)
        if wanted == kept:
            continue
        if slot.is_swapped:
            wanted, kept = (_without_kinds(each) for each in (wanted, kept))
        different = sorted(wanted.keys() ^ kept.keys())
        if is_same:
            different += sorted(key for key in wanted.keys() & kept.keys() if wanted[key] != kept[key])
        if different:
            key = different[0]
            raise (UnsupportedError if is_new else CheckpointError)(
                f"{place}: what the optimizer keeps of {_first(slot)} is not what the record of it says: {key}: "
                f"expected {wanted.get(key, 'nothing')}; found {kept.get(key, 'nothing')}. Use the checkpoints of "
                "DeepSpeed or accelerate, and report this."
            )


def refuse_unlike(slots: Sequence[Slot], recorded: Recorded, number: int, place: Path) -> None:
    """Raise a ConfigError if parameters differ in what is kept of them, and are trained as one tensor now."""
    for slot in slots:
        seen = {member.name: recorded.of_parameter(member.name, slot) for member in slot.members}
        for name, kept in seen.items():
            first = seen[_first(slot)]
            if different := [key for key in {**first, **kept} if first.get(key) != kept.get(key)]:
                raise ConfigError(
                    f"{place}: group {number} of the optimizer: {different[0]} differs between {_first(slot)} and "
                    f"{name}, which are trained as one tensor now. Go on in the kind of training that saved the state."
                )
