"""Sees, before anything is written, that a training can go on from what is going to be saved.

A save takes names from the live model, and a load pairs what it finds with the live model. Between the two stand
transformers' conversions, and whatever the user's own classes do in ``save_pretrained``. So the headers of the weights
are loaded once, without values, as a resume would load them.

Where a conversion computes, values that went into a file and came back would be rounded, or worse. Those are named.

The weights beside a state can be replaced without it. So a state has a fingerprint of the weights saved with it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel

from ..checkpoint.format import NotAMap
from ..checkpoint.formats import INDEX, KnownHeaders, read_index_file, read_map
from ..checkpoint.lazy import LazyTensor
from ..checkpoint.map import CheckpointMap
from ..checkpoint.nodes import Stored, View, is_computed, sources_of
from ..checkpoint.urls import UrlPath, checkpoints_at
from ..destinations.base import source_of
from ..destinations.skeleton import convert_lazy
from ..engine.places import read_checkpoint_map
from ..errors import CheckpointError, HfZeroStreamError, ReadError, UnsupportedError
from ..holdings.introspection import whole_shape
from ..holdings.own_names import named_buffers, named_parameters
from ..loading.dry_load import lazily_loaded_like, load_of_layouts
from ..ranks.coordinator import Coordinator
from ..saving.lazy_parameters import LazyParameters
from ..saving.preparation import quiet
from ..seams.saving import as_stored
from ..settings.config import StreamingConfig
from ..sources.base import RETRIES, Retries, SourceFile
from .layout import persistent_buffers


_seen: WeakKeyDictionary[nn.Module, frozenset[str]] = WeakKeyDictionary()
"""The names of models that have been seen to be loadable: each training is looked at once."""

_changed: WeakKeyDictionary[nn.Module, tuple[frozenset[str], frozenset[str]]] = WeakKeyDictionary()
"""The names of models, and what :func:`changed_in_weights` has found."""


def changed_in_weights(model: nn.Module, coordinator: Coordinator) -> frozenset[str]:
    """Own names of the parameters and buffers whose values files of weights have only through a function or a cast."""
    if not isinstance(model, PreTrainedModel):
        return frozenset()
    names = frozenset(_wanted(model))
    if (found := _changed.get(model)) is None or found[0] != names:
        _changed[model] = found = names, names & _sources_changed(model, coordinator)
    return found[1]


def _sources_changed(model: PreTrainedModel, coordinator: Coordinator) -> set[str]:
    read: list[View] = []

    def zeros(view: View) -> torch.Tensor:
        read.append(view)  # by a conversion that depends on values
        return torch.zeros(view.sizes, dtype=view.node.dtype)

    state_dict = LazyParameters(model, coordinator, None, zeros).state_dict()
    lazy = {name: tensor for name, tensor in state_dict.items() if isinstance(tensor, LazyTensor)}
    with quiet(is_main=False):
        stored = as_stored(model, state_dict)
    views = [tensor.view_of_node for tensor in stored.values() if isinstance(tensor, LazyTensor)]
    changed = [node for node, is_changed in sources_of(views) if is_changed] + [node for node, _ in sources_of(read)]
    nodes = {id(node) for node in changed}
    of_buffers = {name for name, tensor in lazy.items() if id(tensor.view_of_node.node) in nodes}
    return of_buffers | {node.name for node in changed if isinstance(node, Stored)}


def refuse_unloadable(model: nn.Module, in_state: Collection[str], known: KnownHeaders, folder: Path) -> None:
    """Raise an UnsupportedError if a load of `model` could not read all of it from the weights in `folder`.

    Of these files only the headers are read, which are `known` then. A load may compute only what is `in_state` too
    (own names): where saving computes, :func:`changed_in_weights` has named it; where only loading does, values would
    come back as others.
    """
    if not isinstance(model, PreTrainedModel):
        return
    wanted = _wanted(model)
    names = frozenset(wanted)
    if _seen.get(model) == names:
        return
    load = load_of_layouts(StreamingConfig(strict=True), known)
    try:
        with quiet(is_main=False):  # what is wrong is in the error
            lazy, missing, _ = lazily_loaded_like(model, str(folder), load, dtype=torch.float32, needs_adapters=True)
        convert_lazy(model, lazy, missing)
    except (HfZeroStreamError, OSError, ValueError, RuntimeError, AttributeError) as error:
        raise UnsupportedError(f"{_what(model)}: {error}") from error
    finally:
        load.close()
    found = {
        name: view
        for name, tensor in [*lazy.named_parameters(remove_duplicate=False), *lazy.named_buffers()]
        if name not in missing and (view := source_of(tensor)) is not None
    }
    lacking, computed = [], []
    for name, (shape, aliases) in wanted.items():
        loaded = next(
            (found[each] for each in aliases if each in found and torch.Size(found[each].sizes) == shape), None
        )
        if loaded is None:
            lacking.append(name)
        elif name not in in_state and is_computed(loaded):
            computed.append(name)
    if lacking:
        raise UnsupportedError(
            f"{_what(model)}: {len(lacking)} parameters or buffers are not there again: "
            f"{', '.join(sorted(lacking)[:8])}."
        )
    if computed:
        raise UnsupportedError(
            f"{_what(model)}: its conversions compute {', '.join(sorted(computed)[:8])} when it is loaded, and do not "
            "undo that when it is saved. Give the operation in its WeightConverter a reverse_op that does."
        )
    _seen[model] = names


def _wanted(model: nn.Module) -> dict[str, tuple[torch.Size, list[str]]]:
    """All tensors that a training of `model` has: by the first name of each its shape, and all its names."""
    persistent = persistent_buffers(model)
    names: dict[int, list[str]] = {}
    tensors: dict[str, torch.Tensor] = {}
    named = [*named_parameters(model, remove_duplicate=False), *named_buffers(model, remove_duplicate=False)]
    for name, tensor in named:
        if isinstance(tensor, nn.Parameter) or name in persistent:
            of_tensor = names.setdefault(id(tensor), [])
            of_tensor.append(name)
            tensors[of_tensor[0]] = tensor
    return {aliases[0]: (whole_shape(tensors[aliases[0]]), aliases) for aliases in names.values()}


def _what(model: nn.Module) -> str:
    return (
        f"the weights of this {type(model).__name__}, as save_pretrained writes them, are not what a load of it asks "
        "for, and a training could not go on from them"
    )


_MOST_TENSORS = 1024
_SAMPLE_BYTES = 64
_READS_AT_ONCE = 32


ReadBytes = Callable[[str, int, int], bytes]
"""``read(path, start, nbytes)``: some bytes of a file of weights."""


def fingerprint(folder: Path | UrlPath, known: KnownHeaders | None = None) -> str | None:
    """Give that of the weights in `folder`, whatever their shards; None if there are none that can be read.

    Headers that are `known` are not read again, and those that are read become known.

    It is made of the names, dtypes, shapes and some bytes of all tensors, or of every n-th of very many: a step of an
    optimizer changes nearly all of them, and reading all bytes would take as long as a load.
    """
    try:
        return _fingerprint_at(folder) if isinstance(folder, UrlPath) else fingerprint_of_new(folder, known)
    except (OSError, CheckpointError, ReadError, NotAMap):
        return None


def _read_file(path: str, start: int, nbytes: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(start)
        return file.read(nbytes)


def fingerprint_of_new(folder: Path, known: KnownHeaders | None = None, read: ReadBytes | None = None) -> str | None:
    """Give the :func:`fingerprint` of weights that were written just now: an OSError or a ReadError if need be.

    Their headers are in the `folder`, and so are their bytes, unless `read` gives these from a server.
    """
    return _fingerprint_of(read_map(_files(folder), known=known), read)


def _fingerprint_at(folder: UrlPath) -> str | None:
    found = read_checkpoint_map(folder.url)
    source = checkpoints_at(folder.url).source(Retries(RETRIES))
    source.add([SourceFile(shard.path, shard.size_bytes, tag=shard.tag) for shard in found.shards])
    numbers = {shard.path: number for number, shard in enumerate(found.shards)}

    def read(path: str, start: int, nbytes: int) -> bytes:
        data = bytearray(nbytes)
        source.read_into(numbers[path], start, [memoryview(data)])
        return bytes(data)

    with closing(source):
        return _fingerprint_of(found, read)


def _fingerprint_of(found: CheckpointMap, read: ReadBytes | None) -> str | None:
    entries = found.entries
    names = sorted(entries)
    names = names[:: -(-len(names) // _MOST_TENSORS) or 1]

    def sample(name: str) -> bytes:
        entry = entries[name]
        start = max(entry.start, (entry.start + entry.stop - _SAMPLE_BYTES) // 2)
        return (read or _read_file)(
            found.shards[entry.shard].path, start, min(_SAMPLE_BYTES, entry.stop - entry.start)
        )

    digest = hashlib.sha256()
    with ExitStack() as stack:
        # Servers are asked side by side. A save in the background may end when the interpreter has no pools any more.
        side_by_side = None if read is None else stack.enter_context(ThreadPoolExecutor(_READS_AT_ONCE)).map
        for name, data in zip(names, (side_by_side or map)(sample, names), strict=True):
            digest.update(f"{name} {entries[name].dtype} {list(entries[name].shape)} ".encode())
            digest.update(data)
    return digest.hexdigest() if names else None


def _files(folder: Path) -> list[Path]:
    """The shards that ``from_pretrained`` reads."""
    index = folder / INDEX
    if not index.exists():
        return [folder / "model.safetensors"]
    return [folder / name for name in sorted(set(read_index_file(index)["weight_map"].values()))]
