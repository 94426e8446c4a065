"""Saves what an optimizer keeps in blocks of 8 bits (bitsandbytes) as it is, for parts that are cut as they were.

A block has one scale, and blocks are counted from the first element that a rank trains, padding too. So the tensors
of a slot are saved whole, by its number among those of all ranks, and the record says what lies in each: they are for
a slot in which the same elements lie. Ranks that train the same, such as replicas, have one such slot together.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..checkpoint.safetensors import NotedShard
from ..errors import CheckpointError, ConfigError, SaveError, UnsupportedError
from ..holdings.holding import Holding, open_flat
from ..holdings.introspection import local_of
from ..holdings.slots import BLOCKS, Slot, storage_kind
from ..holdings.training import Training
from ..planning.boxes import ParameterBox
from ..ranks.coordinator import Coordinator
from ..saving.parameters import NewParameters
from ..saving.preparation import SaveItem
from .layout import index_name, lay_out
from .record import GroupRecord, StateRecord


def with_parts(record: StateRecord, training: Training, coordinator: Coordinator) -> StateRecord:
    """This record with the parts of all ranks (all ranks).

    Raises:
        UnsupportedError: some ranks have a part together, and others another one.
    """
    mine = [[*_parts(training.slots, number, group)] for number, group in enumerate(record.groups)]
    groups = []
    of_groups = zip(*coordinator.all_gather(mine), strict=True)
    for number, (group, of_ranks) in enumerate(zip(record.groups, of_groups, strict=True)):
        parts: dict[str, list[Any]] = {}
        for digest, entries in (part for of_rank in of_ranks for part in of_rank):
            parts.setdefault(digest, []).append(entries)
        for of_part in parts.values():
            if len(of_part) not in (1, coordinator.world_size) or any(each != of_part[0] for each in of_part):
                raise UnsupportedError(
                    f"The optimizer keeps {', '.join(of_part[0])} in blocks in group {number}, and {len(of_part)} of "
                    f"{coordinator.world_size} ranks train the same elements: expected one rank, or all with tensors "
                    "of the same shapes. Use an optimizer like AdamW, or the checkpoints of DeepSpeed or accelerate."
                )
        groups.append(replace(group, parts=[[digest, of_part[0]] for digest, of_part in parts.items()]))
    return replace(record, groups=groups)


def _parts(slots: Sequence[Slot], number: int, group: GroupRecord) -> Iterator[tuple[str, dict[str, Any]]]:
    """The digest of each slot of the group of this `number` that is kept in blocks, and how its tensors are."""
    for slot in slots:
        if slot.group == number and slot.is_in_blocks and not slot.is_padding:
            entries = {key: _described(value, slot) for key, value in slot.blocks.items()}
            yield _digest(slot, group), entries


def _described(value: torch.Tensor, slot: Slot) -> list[Any]:
    is_on_host = "host" in storage_kind(value, slot.values).split()
    return [str(value.dtype).removeprefix("torch."), list(value.shape), is_on_host]


def _digest(slot: Slot, group: GroupRecord) -> str:
    """A digest of which elements of which parameters lie where in `slot`; those go by their places in the record."""
    places = {name: place for place, name in enumerate(group.parameters)}
    lie = [
        [places[member.name], member.box.intervals, member.first, *member.held]
        for member in slot.members
        if member.held[0] < member.held[1]
    ]
    return hashlib.sha256(json.dumps([list(local_of(slot.values).shape), lie]).encode()).hexdigest()


def item_of(training: Training, record: StateRecord, folder: str, max_shard_size: int | str) -> SaveItem | None:
    """Give the item of all that is kept in blocks, in files in the `folder` of the state; None if that is nothing."""
    model = _Parts()
    for name, empty in _named(record).items():
        model.register_parameter(name, nn.Parameter(empty, requires_grad=False))
    if not model._parameters:
        return None
    return SaveItem(
        lay_out=partial(_laid_out, training, record, max_shard_size),
        index_name=index_name(BLOCKS),
        folder=folder,
        held=partial(_held, training, record),
        model=model,
    )


def _laid_out(
    training: Training, record: StateRecord, max_shard_size: int | str, folder: Path, parameters: NewParameters
) -> list[NotedShard]:
    """The shards with all of it; a SaveError if these lack an element that this rank keeps, or that the record has."""
    shards = lay_out(BLOCKS, max_shard_size, folder, parameters)
    found = {name: entry.numel() for shard in shards for name, entry in shard.tensors.items()}
    mine = sum(found.get(name, 0) for name in tensors_of(training, record))
    kept = sum(value.numel() for slot in training.slots if not slot.is_padding for value in slot.blocks.values())
    of_all = sum(empty.numel() for empty in _named(record).values())
    if mine != kept or sum(found.values()) != of_all:
        raise SaveError(
            f"{type(training.optimizer).__name__}: expected {kept} elements in blocks of this rank in the files, "
            f"and {of_all} of all; found {mine} and {sum(found.values())}. Nothing was written. Use the checkpoints "
            "of DeepSpeed or accelerate, and report this."
        )
    return shards


class _Parts(nn.Module):
    """Has a parameter without memory for each tensor of each part."""


def _named(record: StateRecord) -> dict[str, torch.Tensor]:
    """By the name of each tensor in the files, one of its dtype and shape without memory."""
    return {
        _name(number, place, key): torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        for number, group in enumerate(record.groups)
        for place, (_, entries) in enumerate(group.parts)
        for key, (dtype, shape, _) in entries.items()
    }


def _name(group: int, place: int, key: str) -> str:
    return f"{group}-{place}-{key}"


def _held(training: Training, record: StateRecord) -> dict[str, Holding]:
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
    """The tensors that this rank keeps in blocks, by the names that they have in the files."""
    found: dict[str, torch.Tensor] = {}
    for slot in training.slots:
        if (part := part_for(slot, record.groups[slot.group])) is not None:
            place, _ = part
            found |= {_name(slot.group, place, key): value for key, value in slot.blocks.items()}
    return found


def part_for(slot: Slot, group: GroupRecord) -> tuple[int, Mapping[str, Any]] | None:
    """The number and the entries of the part in which the elements lie as they do in `slot`; None if there is none."""
    if slot.is_padding or not group.parts:
        return None
    digest = _digest(slot, group)
    return next(((place, entries) for place, (each, entries) in enumerate(group.parts) if each == digest), None)


# --------------------------------------------------------------------------------------------------------- at a resume


def refuse_other_parts(slots: Sequence[Slot], record: StateRecord, number: int, place: Path) -> None:
    """Raise a ConfigError unless what was kept in blocks was that of the `slots` of a group, as they are cut now."""
    group = record.groups[number]
    names = {name for of_key in group.in_blocks.values() for name in of_key}
    for slot in slots:
        first = next((it.name for it in slot.members if it.name in names and it.held[0] < it.held[1]), None)
        if first is not None and part_for(slot, group) is None:
            raise ConfigError(
                f"{place}: group {number} of the optimizer: {', '.join(group.in_blocks)} of {first} and what is "
                f"trained with it are kept in blocks of 8 bits, which cannot be cut anew. {record.world_size} ranks "
                "saved them, and no part of theirs begins and ends where this rank's does now. Go on with as many "
                "ranks, at the same stage, with the same groups and sub-groups; or load the weights alone, and begin "
                "with a new optimizer. DeepSpeed's own checkpoints would not go on here either."
            )


def make_blocks(slot: Slot, group: GroupRecord) -> None:
    """Have `slot` keep the tensors, of which the values will be read, that its part kept in blocks, if it has one."""
    if (part := part_for(slot, group)) is None:
        return
    for key, (dtype, shape, is_on_host) in part[1].items():
        device = torch.device("cpu") if is_on_host else slot.values.device
        slot.entries[key] = torch.zeros(shape, dtype=getattr(torch, dtype), device=device)


def refuse_lacking(wanted: Mapping[str, torch.Tensor], found: Mapping[str, Any], place: Path) -> None:
    """Raise a CheckpointError unless the `wanted` tensors are what was `found` in the files."""
    for name, value in wanted.items():
        there = found.get(name)
        if there is None or there.shape != value.shape or there.dtype != value.dtype:
            what = "nothing" if there is None else f"{there.dtype} of shape {tuple(there.shape)}"
            raise CheckpointError(
                f"{place}: {name} in the files of what is kept in {BLOCKS}: expected {value.dtype} of shape "
                f"{tuple(value.shape)}; found {what}. Copy the state again, or go on from an older one."
            )
