"""How the elementwise states of a training lie in files: under the parameters' own names, in their own shapes.

So a state is what the live model has, whatever its class is and whatever has been changed in it, and no conversion of
a checkpoint's layout stands between the two. The weights of a module that is not transformers' lie in this way too.

``names.json`` beside them has what a conversion of a training state must know of all that is not trained.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import nn

from ..checkpoint.formats import INDEX, read_index_file
from ..checkpoint.safetensors import NotedShard
from ..checkpoint.state_folder import NAMES
from ..checkpoint.urls import on_this_host
from ..destinations.skeleton import filled_skeleton, lazy_module, matching_tensors, skeleton_of
from ..engine.load import Load
from ..errors import UnsupportedError
from ..holdings.holding import Holding
from ..holdings.introspection import has_converted_experts, whole_shape
from ..holdings.own_names import named_buffers, named_parameters, own_names, own_or_clean
from ..holdings.slots import MASTER
from ..holdings.training import Training
from ..saving.parameters import NewParameters
from ..saving.preparation import SaveItem
from ..seams.saving import stored_names
from ..seams.session import LazyModel


def index_name(key: str | None) -> str:
    """The file name of the index of the state `key`, or of weights, if they are in several shards."""
    return INDEX if key is None else INDEX.replace(".json", f".{key}.json")


def lay_out(
    key: str | None,
    max_shard_size: int | str,
    folder: Path,
    parameters: NewParameters,
    *,
    others: Sequence[str] = (),
    buffers: Collection[str] = (),
) -> list[NotedShard]:
    """Shards with the state `key`, or with weights; and those of the model's `buffers`, of which rank 0's are written.

    Their index, if there are several, is written into `folder`, and for `others`, states that are laid out alike, too.
    """
    entries = parameters.own_entries(buffers=buffers)
    entries = {name: it for name, it in entries.items() if isinstance(it, torch.Tensor)}
    if lost := sorted({*buffers} - entries.keys()):
        raise UnsupportedError(
            f"{', '.join(lost[:8])}: expected {len(lost)} tensor(s) that the weights do not have in the state dict of "
            "the model; it does not give them. Let it return them under their own names."
        )
    stem = "model" if key is None else f"model.{key}"
    split = split_torch_state_dict_into_shards(
        entries, filename_pattern=f"{stem}{{suffix}}.safetensors", max_shard_size=max_shard_size
    )
    for each in (key, *others) if split.is_sharded else ():
        weight_map = {name: shard_of(each, key, shard) for name, shard in split.tensor_to_filename.items()}
        text = json.dumps({"metadata": split.metadata, "weight_map": weight_map}, indent=2, sort_keys=True) + "\n"
        (folder / index_name(each)).write_text(text, encoding="utf-8")
    return [
        NotedShard(file, {name: entries[name] for name in names}, {"format": "pt"})
        for file, names in split.filename_to_tensors.items()
    ]


def shard_of(key: str | None, first: str | None, shard: str) -> str:
    """The name of the shard that has of the state `key` what the one named `shard` has of the state `first`."""
    return shard.replace(f".{first}", f".{key}", 1)


HeldStates = Mapping[str, Mapping[str, Holding]]
"""By the name of a state, what this rank holds of it."""


def of_same_dtypes(held: HeldStates) -> list[list[str]]:
    """The names of states, together those that one plan can save. All lie as their slots do, but for their dtypes."""
    found: dict[tuple[torch.dtype, ...], list[str]] = {}
    for key, holdings in held.items():
        found.setdefault(tuple(holding.dtype for holding in holdings.values()), []).append(key)
    return list(found.values())


def state_item(held: HeldStates, folder: str, keys: Sequence[str], max_shard_size: int | str) -> SaveItem:
    """The states `keys`, which have the same dtypes, in a `folder` of their own."""
    first, *others = keys
    return SaveItem(
        lay_out=partial(lay_out, first, max_shard_size, others=others),
        index_name=index_name(first),
        folder=folder,
        held=partial(held.__getitem__, first),
        siblings=[(partial(held.__getitem__, key), partial(shard_of, key, first)) for key in others],
    )


def files_of(place: Path, key: str | None) -> list[Path]:
    """The files of the state `key`, or of weights, in the folder `place`."""
    index = place / index_name(key)
    if index.is_file():
        weight_map = read_index_file(on_this_host(index))["weight_map"]
        return [place / shard for shard in sorted(set(weight_map.values()))]
    return [place / ("model.safetensors" if key is None else f"model.{key}.safetensors")]


def persistent_buffers(model: nn.Module) -> dict[str, str]:
    """The own names of the buffers that a state dict of `model` has.

    By each name the first one of the same buffer, which layers may share: in files of states it has that one alone.
    """
    first: dict[int, str] = {}
    named = named_buffers(model, remove_duplicate=False, only_persistent=True)
    return {name: first.setdefault(id(buffer), name) for name, buffer in named}


def lazy_state(load: Load, model: nn.Module, place: Path, key: str | None, *, strict: bool = True) -> LazyModel:
    """A lazy model of the state `key` of `model`, or of weights, that :func:`lay_out` laid out in `place`.

    If not `strict`, it has only what `model` has, in the same shape.
    """
    names = own_names(model)
    pieces = load.open([*map(str, files_of(place, key))], None)
    lazy = {own_or_clean(names, name): it if isinstance(it, torch.Tensor) else it[...] for name, it in pieces.items()}
    if has_converted_experts(model):  # transformers' own layers are what is in the files
        return filled_skeleton(skeleton_of(model), lazy)
    return lazy_module(model, lazy if strict else matching_tensors(model, lazy))


def names_of(
    training: Training, keys: Sequence[str], exact: Collection[str] = (), *, has_base: bool = False
) -> Mapping[str, Any]:
    """Give what a conversion must know to give all tensors of the model, by DeepSpeed's names.

    That is, by the model's name for it, the name in the files of weights and the shape: of buffers, of what is frozen,
    and of what is trained, if it has no masters. And other names of tied parameters and of buffers that layers
    share (`shared`), and the names that torch has for tensors in wrappers (`live`), by which DeepSpeed goes.
    """
    model, own = training.model, own_names(training.model)
    trained = {member.name: list(member.box.shape) for slot in training.slots for member in slot.members}
    first: dict[int, str] = {}
    shared: dict[str, str] = {}
    live: dict[str, str] = {}
    for name, param in named_parameters(model, remove_duplicate=False, by_own_names=False):
        if first.setdefault(id(param), name) != name:
            shared[name] = first[id(param)]
    persistent = persistent_buffers(model)
    for name, buffer in named_buffers(model, remove_duplicate=False, by_own_names=False):
        if own.get(name, name) in persistent and first.setdefault(id(buffer), name) != name:
            shared[name] = first[id(buffer)]
    params = named_parameters(model, by_own_names=False)
    for name, _ in (*params, *named_buffers(model, remove_duplicate=False, by_own_names=False)):
        if own[name] != name:
            live.setdefault(own[name], name)
    frozen = {
        name: list(whole_shape(param))
        for name, param in named_parameters(model)
        if name not in trained and not param.requires_grad
    }
    named = named_buffers(model, remove_duplicate=False)
    buffers = {name: list(buffer.shape) for name, buffer in named if persistent.get(name) == name}
    if has_base:  # of it, only what is `exact`ly in the state is saved
        in_state = {name: [None, shape] for name, shape in frozen.items() if name in exact}
        return {"shared": shared, "live": live, "frozen": in_state, "left_out": len(frozen) - len(in_state)}
    noted = {"buffers": buffers, "frozen": frozen, "trained": {} if MASTER in keys else trained}
    stored = stored_names(model, {name: shape for shapes in noted.values() for name, shape in shapes.items()})
    found: dict[str, Any] = {
        kind: {name: [stored.get(name), shape] for name, shape in shapes.items()} for kind, shapes in noted.items()
    }
    return found | {"shared": shared, "live": live}


def write_names(place: Path, names: Mapping[str, Any]) -> None:
    """Write :func:`names_of` into the folder `place` of a state."""
    (place / NAMES).write_text(json.dumps(names, indent=1) + "\n", encoding="utf-8")
