"""All tensors of a training state: what this rank holds of each, and how they lie in files: as ``KEY/NAME``.

The values of all that a model has are ``values/NAME``, and a moment ``exp_avg/NAME``: under the parameters' own names,
in their own shapes. So a state is what the live model has, whatever its class is and whatever has been changed in it,
and no conversion of a checkpoint's layout stands between the two. The weights of a module that is not transformers'
lie under its own names, too, without a key.

Buffers have one value in weights, rank 0's. Those of which ranks have values of their own (statistics of BatchNorm, a
running scale of a loss, a codebook) are in the state for each rank, as nothing keeps them equal. Who was not there
goes on with rank 0's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import nn

from ..checkpoint.index import INDEX, SINGLE
from ..checkpoint.safetensors import NotedShard
from ..checkpoint.state_folder import STATE, files_of, index_of
from ..engine.load import Load
from ..errors import LoadError, UnsupportedError
from ..holdings.holder import refuse_meta
from ..holdings.holding import Holding, open_flat
from ..holdings.introspection import has_converted_experts, whole_of, with_original_experts
from ..holdings.own_names import named_buffers, named_parameters, own_names, own_or_clean
from ..holdings.skeleton import filled_skeleton, lazy_module, matching_tensors, skeleton_of
from ..holdings.slots import BUFFERS, VALUES, WHOLE, Training, entry_name, holdings_of
from ..holdings.steps import Steps
from ..loading.arguments import MODEL_FILES
from ..planning.boxes import ParameterBox
from ..ranks.coordinator import Coordinator
from ..saving.beside import Beside
from ..saving.lazy_parameters import LazyParameters, digest, held_values
from ..saving.preparation import SaveItem
from ..seams.session import LazyModel
from .forms import Kept
from .record import FILE, StateRecord
from .wholes import held_of_parts, refuse_too_few


def lay_out(
    single: str, max_shard_size: int | str, folder: Path, entries: Mapping[str, torch.Tensor]
) -> list[NotedShard]:
    """Shards of `entries`: the file of the name `single` or, if they are too large for it, several with an index."""
    stem = single.removesuffix(".safetensors")
    split = split_torch_state_dict_into_shards(
        dict(entries), filename_pattern=f"{stem}{{suffix}}.safetensors", max_shard_size=max_shard_size
    )
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / index_of(single)).write_text(text, encoding="utf-8")
    return [
        NotedShard(file, {name: entries[name] for name in names}, {"format": "pt"})
        for file, names in split.filename_to_tensors.items()
    ]


def own_entries(parameters: LazyParameters, buffers: Collection[str] = ()) -> dict[str, torch.Tensor]:
    """What is held in place of parameters, and `buffers`, of which rank 0's values are written, by own names."""
    entries = parameters.own_entries(buffers=buffers)
    entries = {name: it for name, it in entries.items() if isinstance(it, torch.Tensor)}
    if lost := sorted((parameters.own_names | {*buffers}) - entries.keys()):
        raise UnsupportedError(
            f"{', '.join(lost[:8])}: expected {len(lost)} tensor(s) of the model in its state dict; it does not give "
            "them. Let it return them under their own names."
        )
    return entries


def weights_item(max_shard_size: int | str, dtype: torch.dtype | None = None) -> SaveItem:
    """The weights of a module that is not transformers'."""

    def lay_out_weights(folder: Path, parameters: LazyParameters) -> list[NotedShard]:
        return lay_out(SINGLE, max_shard_size, folder, own_entries(parameters))

    return SaveItem(lay_out=lay_out_weights, index_name=INDEX, dtype=dtype)


def names_of_buffers(model: nn.Module) -> dict[str, str]:
    """The own names of the buffers that a state dict of `model` has.

    By each name the first one of the same buffer, which layers may share: in files of states it has that one alone.
    """
    first: dict[int, str] = {}
    named = named_buffers(model, remove_duplicate=False, only_persistent=True)
    return {name: first.setdefault(id(buffer), name) for name, buffer in named}


def lazy_states(model: nn.Module, place: Path, load: Load, keys: Collection[str]) -> dict[str, dict[str, Any]]:
    """Lazy tensors of what the state in `place` has for each of `keys`, by names that `model` has for them now."""
    names = own_names(model)
    found: dict[str, dict[str, Any]] = {key: {} for key in keys}
    for full, it in load.open([*map(str, files_of(place))], None).items():
        key, _, name = full.partition("/")
        if key in found:
            lazy = it if isinstance(it, torch.Tensor) else it[...]
            found[key][name if key in (WHOLE, BUFFERS) else own_or_clean(names, name)] = lazy
    return found


def lazy_model(model: nn.Module, lazy: Mapping[str, Any], *, strict: bool = True) -> LazyModel:
    """A lazy model of these tensors, by names of `model`; if not `strict`, of those alone whose shapes it has."""
    if has_converted_experts(model):  # transformers' own layers are what is in the files
        return filled_skeleton(skeleton_of(model), lazy)
    return lazy_module(model, lazy if strict else matching_tensors(model, lazy))


def names_in(model: nn.Module) -> set[str]:
    """Own names of all that a state has of `model`: each parameter, and each buffer of a state dict, once."""
    return {name for name, _ in named_parameters(model)} | {*names_of_buffers(model).values()}


def other_names(model: nn.Module) -> tuple[dict[str, str], dict[str, str]]:
    """By other names of tied parameters, and of buffers that layers share, the first of each; and torch's own names.

    These are what torch calls tensors in wrappers, by their own names; DeepSpeed goes by them.
    """
    own, first = own_names(model), dict[int, str]()
    shared: dict[str, str] = {}
    live: dict[str, str] = {}
    params = named_parameters(model, remove_duplicate=False, by_own_names=False)
    persistent = names_of_buffers(model)
    buffers = [*named_buffers(model, remove_duplicate=False, by_own_names=False)]
    saved = [(name, buffer) for name, buffer in buffers if own.get(name, name) in persistent]
    for name, tensor in (*params, *saved):
        if first.setdefault(id(tensor), name) != name:
            shared[name] = first[id(tensor)]
    for name, _ in (*named_parameters(model, by_own_names=False), *buffers):
        if own[name] != name:
            live.setdefault(own[name], name)
    return shared, live


def mark_as_older(folder: Path, names: Sequence[str]) -> None:
    """Have these files of weights be no newer than the record of the state, which is written next.

    Ranks have written them, whose clocks may differ. A file keeps its time when it is renamed.
    """
    for name in names:
        os.utime(folder / name)


def has_other_weights(folder: Path, name: str) -> bool:
    """Whether a model's files are in `folder` that were not saved with its newest state, which has this `name`.

    So it is for files that somebody has written since then, or has copied.
    """
    if not any((folder / each).exists() for each in MODEL_FILES):
        return False
    record = folder / name / FILE
    if not record.is_file():
        return True
    saved, written = StateRecord.read(record).weights, record.stat().st_mtime_ns
    try:
        return not saved or any((folder / each).stat().st_mtime_ns > written for each in saved)
    except FileNotFoundError:
        return True


def state_item(
    training: Training,
    record: StateRecord,
    kept: Kept,
    folder: str,
    beside: Beside,
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
    states |= {key: holdings_of(slots, key) for key, slots in beside.slots.items()}

    def values() -> dict[str, Holding]:
        return {**held_values(model, untrained, coordinator), **holdings_of(training.slots, VALUES)}

    def also() -> dict[str, Holding]:
        found = {entry_name(key, name): held for key in states for name, held in states[key].items()}
        found |= {**held_of_parts(training, record), **held_of_buffers(model, record.buffers, coordinator)}
        return found | beside.held_buffers(coordinator)

    def lay_out_state(where: Path, parameters: LazyParameters) -> list[NotedShard]:
        entries = _named(VALUES, own_entries(parameters, untrained))
        rest = parameters.other_entries()
        for key in states:
            of_key = {name: rest.pop(entry_name(key, name)) for name in states[key]}
            entries |= _named(key, with_original_experts(model, of_key))
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
            **{name: step for key in kept.keys for name, step in _named(key, steps.of_states).items()},
        },
    )


def _named(key: str, of_names: Mapping[str, Any]) -> dict[str, Any]:
    return {entry_name(key, name): value for name, value in of_names.items()}


def _persistent(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers of a state dict of `model` on this rank, each once, by own names."""
    saved = {*names_of_buffers(model).values()}
    return {name: whole_of(name, buffer) for name, buffer in named_buffers(model) if name in saved}


def digests_of_buffers(model: nn.Module) -> dict[str, bytes]:
    """A digest of each buffer that a state dict of `model` has."""
    buffers = _persistent(model)
    refuse_meta(buffers)
    return {name: digest(buffer) for name, buffer in buffers.items()}


def differing(of_ranks: Sequence[Mapping[str, bytes]]) -> list[str]:
    """The names of buffers of which ranks have other values, by their digests; a save refuses other names."""
    first, *others = of_ranks
    return sorted(name for name, mine in first.items() if any(each.get(name, mine) != mine for each in others))


def _name(rank: int, number: int) -> str:
    return f"{rank}-{number}"


def held_of_buffers(model: nn.Module, names: Sequence[str], coordinator: Coordinator) -> dict[str, Holding]:
    """Each rank's values of the buffers `names`, by their names in the files."""
    found = _persistent(model)
    return {
        entry_name(BUFFERS, _name(rank, number)): Holding(
            ParameterBox.whole(found[name].shape),
            found[name].dtype,
            0,
            found[name].numel() if rank == coordinator.rank else 0,
            partial(open_flat, found[name]),
        )
        for rank in range(coordinator.world_size)
        for number, name in enumerate(names)
    }


def memory_of_buffers(
    model: nn.Module, place: Path, record: StateRecord, rank: int, found: Mapping[str, Any], *, strict: bool
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """By their names in the files, buffers of `model` that get what `rank` had, and memory to read that into.

    Raises:
        LoadError: the model has no such buffers, or they have other shapes than was `found` in the files of the state
            in `place`; if not `strict`, they stay as they are.
    """
    rank, mine = rank if rank < record.world_size else 0, _persistent(model) if record.buffers else {}
    memory: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    lacking = []
    for number, name in enumerate(record.buffers):
        key = entry_name(BUFFERS, _name(rank, number))
        if key in found and name in mine and found[key].shape == mine[name].shape:
            memory[key] = mine[name], torch.empty_like(mine[name], memory_format=torch.contiguous_format)
        else:
            lacking.append(name)
    if strict and lacking:
        raise LoadError(
            f"{place}: expected buffers of the model for the values that rank {rank} had; {len(lacking)} are not "
            f"there, or have other shapes: {', '.join(sorted(lacking)[:8])}. Go on with the model that was saved."
        )
    return memory
