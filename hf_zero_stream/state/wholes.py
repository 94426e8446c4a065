"""Saves what an optimizer keeps of a slot as a whole, as it is, for slots in which the same elements lie.

Factors of a moment, a preconditioner, codes of 8 bits in blocks (bitsandbytes), errors of a compression, or a number
that each rank computes of what it has: nobody can cut these for another part of the parameters. So they are saved with
a digest of what lies in their slot. Ranks that train the same, such as replicas, have one such *part* together. Where
each rank trains whole parameters, any number of ranks goes on; else as many as there were.
"""

from __future__ import annotations

import hashlib
import json
from collections import ChainMap
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError, ConfigError, SaveError, UnsupportedError
from ..holdings.holding import Holding, open_flat
from ..holdings.introspection import local_of
from ..holdings.slots import WHOLE, Slot, Training, entry_name, storage_kind
from ..planning.boxes import ParameterBox
from ..ranks.coordinator import Coordinator
from ..settings.values import dtype_name, dtype_named
from .forms import Kept, Wholes, option_of, with_kind
from .record import GroupRecord, SlotPart, StateRecord


def with_parts(record: StateRecord, training: Training, kept: Kept, coordinator: Coordinator) -> StateRecord:
    """This record with the parts of all ranks, and which parameters have any (all ranks).

    Raises:
        UnsupportedError: some ranks have a part together, and others another one.
    """
    if not kept.whole:
        return record
    having = [*_having(training, kept)]
    names = dict.fromkeys(member.name for slot, _ in having for member in slot.members)
    mine = [(_digest(slot, record), _described(slot, keys)) for slot, keys in having]
    parts: dict[str, list[SlotPart]] = {}
    everyone = coordinator.all_gather(([*names], mine))
    for digest, part in (each for _, of_rank in everyone for each in of_rank):
        parts.setdefault(digest, []).append(part)
    for of_part in parts.values():
        if len(of_part) not in (1, coordinator.world_size) or any(repr(each) != repr(of_part[0]) for each in of_part):
            keys = ", ".join([*of_part[0].tensors, *of_part[0].values])
            raise UnsupportedError(
                f"The optimizer keeps {keys} as a whole, and {len(of_part)} of {coordinator.world_size} ranks train "
                "the same elements: expected one rank, or all with the same numbers, and tensors of the same shapes. "
                "Use an optimizer like AdamW, or the checkpoints of DeepSpeed or accelerate."
            )
    every = dict.fromkeys(name for names, _ in everyone for name in names)
    return replace(record, whole=[*every], parts={digest: of_part[0] for digest, of_part in parts.items()})


def with_own_options(
    record: StateRecord, training: Training, of_ranks: Sequence[Sequence[Mapping[str, Any]]], coordinator: Coordinator
) -> StateRecord:
    """This record with the options of all ranks that differ between them, by what each trains (all ranks).

    Raises:
        UnsupportedError: ranks that train the same have other ones.
    """
    apart = [
        sorted(name for name in dict(ChainMap(*of_group)) if len({_text(name, each) for each in of_group}) > 1)
        for of_group in zip(*of_ranks, strict=True)
    ]
    if not any(apart):
        return record
    options = of_ranks[coordinator.rank]
    mine = [
        (
            _digest_of_group(training, number, record),
            {name: it for name, it in options[number].items() if name in names},
        )
        for number, names in enumerate(apart)
    ]
    groups = []
    for number, of_group in enumerate(zip(*coordinator.all_gather(mine), strict=True)):
        own: dict[str, Any] = {}
        if any(repr(own.setdefault(digest, values)) != repr(values) for digest, values in of_group):
            raise UnsupportedError(
                f"The optimizer's group {number} has other {', '.join(apart[number])} on some ranks, which train the "
                "same. Use the same options on all."
            )
        kept = {name: value for name, value in record.groups[number].options.items() if name not in apart[number]}
        groups.append(replace(record.groups[number], options=kept, own=own if apart[number] else {}))
    return replace(record, groups=groups)


def _text(name: str, options: Mapping[str, Any]) -> str:
    """An option as text, by which NaN is the same as NaN; "" if there is none."""
    return json.dumps(options[name]) if name in options else ""


def _having(training: Training, kept: Kept) -> Iterator[tuple[Slot, list[str]]]:
    """The slots of which anything is kept whole, and the names of that; padding is not saved."""
    for slot in training.slots:
        keys = [key for key in slot.entries if key in kept.whole.get(slot.group, ())]
        if keys and not slot.is_padding:
            yield slot, keys


def _described(slot: Slot, keys: Sequence[str]) -> SlotPart:
    tensors: dict[str, list[Any]] = {}
    values: dict[str, Any] = {}
    for key in keys:
        value = slot.entries[key]
        if isinstance(value, torch.Tensor) and value.dim():
            is_on_host = "host" in storage_kind(value, slot.values).split()
            strides = [] if value.is_contiguous() else [*value.stride()]
            tensors[key] = [dtype_name(value.dtype), list(value.shape), is_on_host, strides]
        else:
            values[key] = with_kind(value, f"the optimizer's {key} of {slot.members[0].name}", small=True)
    return SlotPart(tensors, values)


def _digest(slot: Slot, record: StateRecord) -> str:
    """A digest of which elements of which parameters lie where in `slot`; those go by their places in the record."""
    places = record.places
    lie = [
        [places[member.name], member.box.intervals, member.first, *member.elements]
        for member in slot.members
        if member.elements[0] < member.elements[1]
    ]
    return hashlib.sha256(json.dumps([list(local_of(slot.values).shape), lie]).encode()).hexdigest()


def _digest_of_group(training: Training, number: int, record: StateRecord) -> str:
    """A digest of all that this rank trains in a group."""
    slots = [slot for slot in training.slots if slot.group == number and not slot.is_padding]
    return hashlib.sha256("".join(_digest(slot, record) for slot in slots).encode()).hexdigest()


def refuse_too_few(training: Training, record: StateRecord, names: Collection[str]) -> None:
    """Raise a SaveError if files with these `names` lack a tensor that this rank keeps, or that the record has."""
    kept, of_all = tensors_of(training, record).keys(), _named(record).keys()
    found = {name for name in names if name.startswith(entry_name(WHOLE, ""))}
    if not kept <= found or found != of_all:
        raise SaveError(
            f"{type(training.optimizer).__name__}: expected {len(kept)} tensors that this rank keeps whole in the "
            f"files, and {len(of_all)} of all; found {len(found)} in all. Nothing was written. Use the checkpoints of "
            "DeepSpeed or accelerate, and report this."
        )


def _named(record: StateRecord) -> dict[str, torch.Tensor]:
    """By the name of each tensor in the files, one of its dtype and shape without memory."""
    return {
        _name(number, key): torch.empty(shape, dtype=dtype_named(dtype), device="meta")
        for number, part in enumerate(record.parts.values())
        for key, (dtype, shape, _, _) in part.tensors.items()
    }


def _name(number: int, key: str) -> str:
    return entry_name(WHOLE, f"{number}-{key}")


def held_of_parts(training: Training, record: StateRecord) -> dict[str, Holding]:
    """What this rank holds of the tensors of all parts, by their names in the files."""
    mine = tensors_of(training, record)
    found = {}
    for name, empty in _named(record).items():
        box, value = ParameterBox.whole(empty.shape), mine.get(name)
        is_here = value is not None
        opened = partial(open_flat, value if value is not None else torch.empty(0, dtype=empty.dtype))
        # Where all ranks have it, their values are compared.
        found[name] = Holding(box, empty.dtype, 0, box.numel if is_here else 0, opened, is_whole=is_here)
    return found


def tensors_of(training: Training, record: StateRecord) -> dict[str, torch.Tensor]:
    """The tensors that this rank keeps whole, by the names that they have in the files."""
    parts = _own_parts(training, record)
    return {_name(number, key): slot.entries[key] for slot, number, part in parts for key in part.tensors}


def _own_parts(training: Training, record: StateRecord) -> Iterator[tuple[Slot, int, SlotPart]]:
    """The slots of this rank of which anything was kept whole, with the number of their part, and that."""
    parts = {digest: (number, part) for number, (digest, part) in enumerate(record.parts.items())}
    for slot in training.slots if parts else ():
        if not slot.is_padding and (found := parts.get(_digest(slot, record))) is not None:
            yield slot, *found


# --------------------------------------------------------------------------------------------------------- at a resume


def groups_for(training: Training, record: StateRecord, place: Path) -> list[GroupRecord]:
    """What was recorded of the groups that the parameters of each present group were in; one without any has nothing.

    Raises:
        ConfigError: parameters with different options are in one group now; or each rank had options of its own.
    """
    group_of = {name: number for number, group in enumerate(record.groups) for name in group.parameters}
    count = len(training.optimizer.param_groups)
    # A group in which nothing is trained yet goes on with its rate, which a scheduler may compute the next one of.
    untrained = [_NOTHING if group.parameters or group.own else group for group in record.groups]
    untrained = untrained if len(untrained) == count else [_NOTHING] * count
    found = []
    for number in range(count):
        names = (member.name for slot in training.slots if slot.group == number for member in slot.members)
        of_names = [record.groups[each] for each in dict.fromkeys(map(group_of.__getitem__, names))]
        first, *others = of_names or [untrained[number]]
        for other in others:
            options = {**first.options, **other.options}
            if different := sorted(name for name in options if _differ(name, first, other)):
                raise ConfigError(
                    f"{place}: group {number} of the optimizer has parameters of several groups that were saved, with "
                    f"other {', '.join(different[:8])}. Make groups of parameters that have the same options."
                )
        if first.own:
            own = first.own.get(_digest_of_group(training, number, record))
            if own is None or others:
                kept = ", ".join(next(iter(first.own.values())))
                raise _cut_anew(place, number, kept, "it", record.world_size)
            first = replace(first, options={**first.options, **own})
        found.append(first)
    return found


_NOTHING = GroupRecord({}, [], [], [])


def _differ(name: str, one: GroupRecord, other: GroupRecord) -> bool:
    return one.options.get(name, GroupRecord) != other.options.get(name, GroupRecord) or one.own != other.own


def _cut_anew(place: Path, group: int, kept: str, whose: str, world_size: int) -> ConfigError:
    return ConfigError(
        f"{place}: group {group} of the optimizer: {kept} of {whose} and what is trained with it belong to all that a "
        f"rank trains as one, and cannot be cut anew. {world_size} ranks saved them, and no part of theirs begins and "
        "ends where this rank's does now. Go on with as many ranks, at the same stage, with the same groups and "
        "sub-groups; or load the weights alone, and begin with a new optimizer. DeepSpeed's own checkpoints would not "
        "go on here either."
    )


def refuse_other_parts(training: Training, record: StateRecord, place: Path) -> None:
    """Raise a ConfigError unless what was kept whole was that of slots as they are cut now."""
    names, found = {*record.whole}, {slot for slot, _, _ in _own_parts(training, record)}
    for slot in training.slots if names else ():
        first = next((it.name for it in slot.members if it.name in names and it.elements[0] < it.elements[1]), None)
        if first is not None and slot not in found:
            kept = {key: None for part in record.parts.values() for key in (*part.tensors, *part.values)}
            raise _cut_anew(place, slot.group, ", ".join(kept), first, record.world_size)


def wholes_for(training: Training, record: StateRecord) -> Wholes:
    """The entries that belong to slots as they are: small ones as they were, zeros for tensors that will be read."""
    names = {*record.whole}
    padding = [slot for slot in training.slots if slot.is_padding and any(it.name in names for it in slot.members)]
    found: dict[Slot, dict[str, Any] | None] = dict.fromkeys(padding)
    for slot, _, part in _own_parts(training, record):
        kept = {key: option_of(key, written, slot.values.device) for key, written in part.values.items()}
        for key, (dtype, shape, is_on_host, _) in part.tensors.items():
            device = torch.device("cpu") if is_on_host else slot.values.device
            kept[key] = torch.zeros(shape, dtype=dtype_named(dtype), device=device)
        found[slot] = kept
    return found


def restore_strides(training: Training, record: StateRecord) -> None:
    """Give tensors that have been read the order of elements in memory that they had: results depend on it."""
    for slot, _, part in _own_parts(training, record):
        for key, (_, _, _, strides) in part.tensors.items():
            if strides:
                value = slot.entries[key]
                as_before = torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)
                slot.entries[key] = as_before.copy_(value)


def refuse_absent(wanted: Mapping[str, torch.Tensor], found: Mapping[str, Any], place: Path) -> None:
    """Raise a CheckpointError unless the `wanted` tensors are what was `found` in the files."""
    for name, value in wanted.items():
        there = found.get(name)
        if there is None or there.shape != value.shape or there.dtype != value.dtype:
            what = "nothing" if there is None else f"{there.dtype} of shape {tuple(there.shape)}"
            raise CheckpointError(
                f"{place}: {name}: expected {value.dtype} of shape "
                f"{tuple(value.shape)}; found {what}. Copy the state again, or go on from an older one."
            )
