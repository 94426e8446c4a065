"""How a training state lies in files: all of it under one name each, ``KEY/NAME``.

The values of all that a model has are ``values/NAME``, and a moment ``exp_avg/NAME``: under the parameters' own names,
in their own shapes. So a state is what the live model has, whatever its class is and whatever has been changed in it,
and no conversion of a checkpoint's layout stands between the two. The weights of a module that is not transformers'
lie under its own names, too, without a key.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import nn

from ..checkpoint.formats import INDEX, SINGLE, read_index_file
from ..checkpoint.safetensors import NotedShard
from ..checkpoint.state_folder import STATE, index_of
from ..checkpoint.urls import on_this_host
from ..destinations.skeleton import filled_skeleton, lazy_module, matching_tensors, skeleton_of
from ..engine.load import Load
from ..errors import UnsupportedError
from ..holdings.introspection import has_converted_experts
from ..holdings.own_names import named_buffers, named_parameters, own_names, own_or_clean
from ..holdings.slots import BUFFERS, WHOLE
from ..saving.lazy_parameters import LazyParameters
from ..saving.preparation import SaveItem
from ..seams.session import LazyModel


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


def files_of(place: Path, single: str = STATE) -> list[Path]:
    """The files of a state in the folder `place`, or of weights, if these may all be in the file `single`."""
    index = place / index_of(single)
    if index.is_file():
        weight_map = read_index_file(on_this_host(index))["weight_map"]
        return [place / shard for shard in sorted(set(weight_map.values()))]
    return [place / single]


def persistent_buffers(model: nn.Module) -> dict[str, str]:
    """The own names of the buffers that a state dict of `model` has.

    By each name the first one of the same buffer, which layers may share: in files of states it has that one alone.
    """
    first: dict[int, str] = {}
    named = named_buffers(model, remove_duplicate=False, only_persistent=True)
    return {name: first.setdefault(id(buffer), name) for name, buffer in named}


def lazy_states(load: Load, model: nn.Module, place: Path, keys: Collection[str]) -> dict[str, dict[str, Any]]:
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
