"""How the elementwise states of a training lie in files: under the parameters' own names, in their own shapes.

So a state is what the live model has, whatever its class is and whatever has been changed in it, and no conversion of
a checkpoint's layout stands between the two. The weights of a module that is not transformers' lie in this way too.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import nn

from ..checkpoint.formats import INDEX, read_index_file
from ..checkpoint.safetensors import NotedShard
from ..checkpoint.urls import on_this_host
from ..destinations.skeleton import filled_skeleton, lazy_module, matching_tensors, skeleton_of
from ..engine.load import Load
from ..errors import UnsupportedError
from ..holdings.holding import Holding
from ..holdings.introspection import has_converted_experts
from ..holdings.own_names import named_buffers, named_parameters, own_names, own_or_clean
from ..saving.parameters import NewParameters
from ..saving.preparation import SaveItem
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
    if lost := sorted((parameters.own_names | {*buffers}) - entries.keys()):
        raise UnsupportedError(
            f"{', '.join(lost[:8])}: expected {len(lost)} tensor(s) of the model in its state dict; it does not give "
            "them. Let it return them under their own names."
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


class Placeholders(nn.Module):
    """Has parameters without memory, by whose names something is saved that is no part of a model."""

    def __init__(self, named: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in named.items():
            empty = torch.empty_like(tensor, device="meta")
            self.register_parameter(name, nn.Parameter(empty, requires_grad=False))


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


def names_in(model: nn.Module) -> set[str]:
    """Own names of all that a state has of `model`: each parameter, and each buffer of a state dict, once."""
    return {name for name, _ in named_parameters(model)} | {*persistent_buffers(model).values()}


def other_names(model: nn.Module) -> tuple[dict[str, str], dict[str, str]]:
    """By other names of tied parameters, and of buffers that layers share, the first of each; and torch's own names.

    These are what torch calls tensors in wrappers, by their own names; DeepSpeed goes by them.
    """
    own, first = own_names(model), dict[int, str]()
    shared: dict[str, str] = {}
    live: dict[str, str] = {}
    params = named_parameters(model, remove_duplicate=False, by_own_names=False)
    persistent = persistent_buffers(model)
    buffers = [*named_buffers(model, remove_duplicate=False, by_own_names=False)]
    saved = [(name, buffer) for name, buffer in buffers if own.get(name, name) in persistent]
    for name, tensor in (*params, *saved):
        if first.setdefault(id(tensor), name) != name:
            shared[name] = first[id(tensor)]
    for name, _ in (*named_parameters(model, by_own_names=False), *buffers):
        if own[name] != name:
            live.setdefault(own[name], name)
    return shared, live
