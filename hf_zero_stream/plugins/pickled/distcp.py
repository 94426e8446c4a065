"""Folders of torch.distributed.checkpoint, as maps of bytes; no pickle in them is run.

``.metadata`` is a pickle of ``torch.distributed.checkpoint.metadata.Metadata``: of each tensor its shape, its dtype
and its chunks (boxes of it), and of each chunk the file, offset and length of a whole archive of ``torch.save`` with
that box alone (``filesystem.py``: ``_StorageInfo``). Rank 0 looks into the archives and writes down where the elements
are: a map as JSON text, of which every rank makes views.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from ...errors import CheckpointError, UnsupportedError
from ...plugin_api import (
    ByteSource,
    CheckpointMap,
    HostTensor,
    NotAMap,
    ReadableFile,
    Shard,
    ShardHeader,
    View,
    as_read_error,
    dtypes,
    excerpt,
    fault_of_name,
    file_dtype_name,
    parse_object,
    read_map,
)
from .pickles import MOST_BYTES, read_pickle
from .torch_files import read_single, view_of_field
from .torch_metadata import OPCODES, CheckpointBox, Metadata, MetadataItem, StoredBytes, metadata_of


_WHAT = "the distributed checkpoint"
_EDGE_BYTES = 4096
"""Bytes at the beginning and at the end of an archive, each read at once: all of it but the elements, mostly."""
_THREADS = 16
"""Threads that look into one file each, and wait for a file system more than they compute."""
_MOST_CUTS = 64
"""Levels of boxes in boxes; a mesh has as many as it has dimensions."""


def read_header(source: ByteSource, path: str) -> ShardHeader:
    """Read the ``.metadata`` at `path`, and locate the elements; see :class:`...checkpoint.formats.Format`.

    Raises:
        ReadError: a file is missing or cannot be read.
        CheckpointError: the folder is not sound; or it holds no model.
        UnsupportedError: a tensor is compressed, or no plain tensor.
    """
    folder = os.path.dirname(path)
    with as_read_error(path, _WHAT), source.open_file(path) as file:
        if file.size_bytes > MOST_BYTES:
            raise CheckpointError(f"{path}: expected at most {MOST_BYTES} bytes; found {file.size_bytes}.")
        data = file.read(0, file.size_bytes)
    metadata = metadata_of(path, read_pickle(data, path, OPCODES, objects_as_keys=True))
    names, skipped = _names(path, metadata)
    wanted = list(_items(path, metadata, names))
    fields, files = _fields(source, folder, [item for _, _, item in wanted])
    tensors: dict[str, Any] = {
        names[key]: [file_dtype_name(stored.dtype), list(stored.shape), []]
        for key, stored in metadata.tensors.items()
        if key in names
    }
    numbers = {file: number for number, file in enumerate(files)}
    for key, box, item in wanted:
        field = fields[item]
        found, expected = (
            (field["dtype"], field["shape"]),
            (file_dtype_name(metadata.tensors[key].dtype), list(box.sizes)),
        )
        if found != expected:
            raise CheckpointError(
                f"{_where(folder, item)}: expected {expected[0]} of shape {expected[1]} for tensor {excerpt(key)}; "
                f"found {found[0]} of shape {found[1]}."
            )
        tensors[names[key]][2].append([numbers[item.file], box.offsets, field])
    text = json.dumps({"files": files, "tensors": tensors, "skipped": skipped}).encode()
    return ShardHeader(0, text)  # ranks compare what it says, and not how long the pickle is


def map_of_file(path: Path) -> CheckpointMap:
    """Map what the ``.metadata`` at `path` of this host describes; raises as :func:`read_header`."""
    return read_map([path])


def parse_header(path: str, number: int, header: ShardHeader) -> CheckpointMap:
    """See :meth:`...checkpoint.formats.Format.parse_header`.

    Raises:
        CheckpointError: the chunks of a tensor overlap, or leave holes.
    """
    folder, found = os.path.dirname(path), parse_object(header.text, f"{path}: map")
    shards = tuple(
        Shard(os.path.join(folder, file), size, {}, tag=tag, described_in=path)
        for file, (size, tag) in found["files"].items()
    )
    views: dict[str, View] = {}
    for name, (dtype, shape, pieces) in found["tensors"].items():
        boxes = []
        for position, offsets, field in pieces:
            shard, box = shards[position], CheckpointBox(tuple(offsets), tuple(field["shape"]))
            boxes.append((box, view_of_field(shard.path, number + position, name, field, shard.size_bytes)))
        if 0 in shape:
            views[name] = View.whole(HostTensor.of(torch.empty(shape, dtype=dtypes()[dtype])))
            continue
        view = _assembled(CheckpointBox((0,) * len(shape), tuple(shape)), boxes, 0)
        if view is None:
            raise CheckpointError(
                f"{folder}: the chunks of tensor {excerpt(name)} overlap, or leave holes in its shape {shape}. Save "
                "the checkpoint again."
            )
        views[name] = view
    notes: tuple[str, ...] = ()
    if skipped := found["skipped"]:
        some = ", ".join(map(excerpt, skipped[:8]))
        notes = (f"Left out, since they are no tensors of the model: {some} ({len(skipped)} in all).",)
    return CheckpointMap(shards, views, notes, format="torch.distributed.checkpoint", has_names_of_model=True)


def _names(path: str, metadata: Metadata) -> tuple[dict[str, str], list[str]]:
    """(tensor -> its name in the model, all else).

    Whoever saves nested dicts gets flat keys, with the path of keys to each beside them. The model's tensors are those
    below a key "model", as accelerate and most training loops save them: ("model", "lm_head.weight"). If there is no
    such key, they are those that are not nested, as torchtitan and ``dcp.save(model.state_dict())`` save them.
    """
    key_paths = {key: metadata.key_paths.get(key, (key,)) for key in metadata.tensors}
    below = {key: keys[keys.index("model", 0, -1) + 1 :] for key, keys in key_paths.items() if "model" in keys[:-1]}
    chosen = below or {key: keys for key, keys in key_paths.items() if len(keys) == 1}
    names = {key: ".".join(map(str, keys)) for key, keys in chosen.items()}
    skipped = sorted([*(metadata.tensors.keys() - names.keys()), *metadata.others])
    if not names:
        some = ", ".join(map(excerpt, skipped[:8]))
        raise CheckpointError(f"{path}: expected tensors of a model, under a key 'model' or not nested; found {some}.")
    if len(set(names.values())) != len(names):
        raise CheckpointError(f"{path}: two tensors have the same name in the model.")
    return names, skipped


def _items(
    path: str, metadata: Metadata, names: Mapping[str, str]
) -> Iterator[tuple[str, CheckpointBox, MetadataItem]]:
    """(tensor, chunk, where it lies) of all chunks with elements."""
    for key in names:
        stored: StoredBytes = metadata.tensors[key]
        for box in dict.fromkeys(stored.chunks):
            if 0 in box.sizes:
                continue  # of ranks that have nothing
            item = metadata.items.get((key, box.offsets))
            if item is None:
                raise CheckpointError(
                    f"{path}: tensor {excerpt(key)}: its chunk at {list(box.offsets)} is in no file."
                )
            if item.transforms:
                raise UnsupportedError(
                    f"{path}: tensor {excerpt(key)} was changed when it was written ({excerpt(item.transforms)}), and "
                    "cannot be read in parts. Save the checkpoint without extensions."
                )
            if fault := fault_of_name(path, item.file):
                raise CheckpointError(f"{path}: tensor {excerpt(key)}: the file's name {excerpt(item.file)} {fault}.")
            yield key, box, item


def _fields(
    source: ByteSource, folder: str, items: Iterable[MetadataItem]
) -> tuple[dict[MetadataItem, dict[str, Any]], dict[str, tuple[int, str]]]:
    """(item -> dtype, shape and place of its elements, file -> its size and tag)."""
    names, groups = [], []
    for name, group in groupby(sorted(items), key=lambda item: item.file):
        names.append(name)
        groups.append(list(group))
    with ThreadPoolExecutor(_THREADS) as threads:
        found = list(threads.map(partial(_fields_of_file, source, folder), names, groups))
    fields = {item: field for of_file, _, _ in found for item, field in of_file.items()}
    return fields, {name: (size_bytes, tag) for name, (_, size_bytes, tag) in zip(names, found, strict=True)}


def _fields_of_file(
    source: ByteSource, folder: str, name: str, items: Iterable[MetadataItem]
) -> tuple[dict[MetadataItem, dict[str, Any]], int, str]:
    """(item -> dtype, shape and place of its elements, the file's size and tag), for items in order of offset."""
    path, end = os.path.join(folder, name), 0
    fields: dict[MetadataItem, dict[str, Any]] = {}
    with as_read_error(path, _WHAT), source.open_file(path) as file:
        for item in items:
            if item.offset < end or item.offset + item.length > file.size_bytes:
                raise CheckpointError(
                    f"{_where(folder, item)}: it overlaps another one, or lies beyond the end of the file."
                )
            end = item.offset + item.length
            fields[item] = _field(file, folder, item)
        return fields, file.size_bytes, file.tag


def _field(file: ReadableFile, folder: str, item: MetadataItem) -> dict[str, Any]:
    where = _where(folder, item)
    try:
        field = read_single(_FilePart(file, item.offset, item.length), where)
    except NotAMap as reason:
        raise UnsupportedError(f"{where}: {reason}, and not a plain tensor.") from reason
    return {**field, "data_offsets": [item.offset + offset for offset in field["data_offsets"]]}


def _where(folder: str, item: MetadataItem) -> str:
    return f"{os.path.join(folder, item.file)}, bytes {item.offset} to {item.offset + item.length}"


class _FilePart:
    """Some bytes of a file, as a file of its own."""

    def __init__(self, file: ReadableFile, start: int, nbytes: int) -> None:
        self._file, self._start, self.size_bytes, self.tag = file, start, nbytes, file.tag
        self._head = file.read(start, min(_EDGE_BYTES, nbytes))
        self._tail_start = max(0, nbytes - _EDGE_BYTES)
        self._tail = file.read(start + self._tail_start, nbytes - self._tail_start)

    def read(self, start: int, nbytes: int) -> bytes:
        stop = min(start + nbytes, self.size_bytes)
        if stop <= len(self._head):
            return self._head[start:stop]
        if start >= self._tail_start:
            return self._tail[start - self._tail_start : stop - self._tail_start]
        return self._file.read(self._start + start, max(0, stop - start))


BoxPart = tuple[CheckpointBox, View]


def _assembled(whole: CheckpointBox, pieces: list[BoxPart], level: int) -> View | None:
    """The elements of `whole`, which `pieces` fill; None if they do not, or do it twice."""
    if len(pieces) == 1:
        return pieces[0][1] if pieces[0][0] == whole else None
    if not pieces or level == _MOST_CUTS:
        return None
    for dim in range(len(whole.sizes)):
        groups = _cut(pieces, dim)
        if len(groups) == 1:
            continue
        parts, begin = [], whole.offsets[dim]
        for number, group in enumerate(groups):
            stop = min(box.offsets[dim] for box, _ in groups[number + 1]) if number + 1 < len(groups) else None
            end = whole.offsets[dim] + whole.sizes[dim] if stop is None else stop
            part = _assembled(whole.with_range(dim, begin, end), group, level + 1)
            if part is None:
                return None
            parts.append(part)
            begin = end
        return View.joined(tuple(parts), dim)
    return None


def _cut(pieces: list[BoxPart], dim: int) -> list[list[BoxPart]]:
    """Groups of pieces, each of which lies behind the one before along `dim`."""
    groups: list[list[BoxPart]] = []
    end = 0
    for piece in sorted(pieces, key=lambda piece: piece[0].offsets[dim]):
        box = piece[0]
        if not groups or box.offsets[dim] >= end:
            groups.append([])
        groups[-1].append(piece)
        end = max(end, box.offsets[dim] + box.sizes[dim])
    return groups
