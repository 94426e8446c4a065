"""Files that ``torch.save`` wrote (``pytorch_model.bin``), as maps of bytes; no pickle in them is run.

The format has no specification; it is what ``torch/serialization.py`` reads. Since torch 1.6 a file is a zip archive:
``<name>/data.pkl`` describes the tensors, and each ``<name>/data/<key>`` holds the bytes of a storage, not compressed.
Before, it was five pickles, and then each storage's number of elements and bytes.

Rank 0 turns the description into a header like that of a safetensors file, with offsets from the file's beginning.

``torch.load`` under ``FakeTensorMode`` gives offsets too, but none in files of the older kind, and cannot be bounded
(torch 2.13): 20 bytes of a pickle make a ``bytearray`` of any size, or a key whose hash takes for ever; it unpacks
compressed members whole, compares no storage's length, and lets ``.format_version`` move the offsets.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from math import prod
from typing import Any

import torch

from ...errors import CheckpointError
from ...plugin_api import (
    MAX_DIMENSIONS,
    ByteSource,
    CheckpointMap,
    NotAMap,
    ReadableFile,
    Shard,
    ShardHeader,
    View,
    are_sizes,
    as_read_error,
    excerpt,
    file_dtype_name,
    parse_entry,
    parse_object,
    row_major_strides,
    view_of,
)
from .pickles import Call, Global, Persistent, Pickle, object_kind, read_pickle
from .torch_zip import MOST_READ, OPCODES, SIGNATURE, Storage, read_zip


_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_PROTOCOL = 1001

_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "ComplexFloatStorage": torch.complex64,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
_REBUILD = Global("torch._utils", "_rebuild_tensor_v2")
_REBUILD_PARAMETER = Global("torch._utils", "_rebuild_parameter")
_ORDERED = Global("collections", "OrderedDict")
_KNOWN = {_REBUILD, _REBUILD_PARAMETER, _ORDERED, *(Global("torch", name) for name in _STORAGES)}


def read_header(source: ByteSource, path: str) -> ShardHeader:
    """See :meth:`...checkpoint.formats.Format.read_header`; raises :class:`NotAMap` too."""
    try:
        with as_read_error(path, "what torch.save wrote"), source.open_file(path) as file:
            tensors = _tensors(file, path)
            return ShardHeader(file.size_bytes, json.dumps(tensors).encode(), file.tag)
    except NotAMap as reason:
        raise NotAMap(f"{path}: {reason}") from reason


def not_a_map_reason(source: ByteSource, paths: Sequence[str]) -> str:
    """Why these files cannot be read as maps of bytes; "" if they can be."""
    for path in paths:
        try:
            read_header(source, path)
        except NotAMap as reason:
            return str(reason)
    return ""


def parse_header(path: str, number: int, header: ShardHeader) -> CheckpointMap:
    """See :meth:`...checkpoint.formats.Format.parse_header`; tensors may share bytes."""
    fields = parse_object(header.text, f"{path}: header")
    views = {name: view_of_field(path, number, name, field, header.size_bytes) for name, field in fields.items()}
    return CheckpointMap((Shard(path, header.size_bytes, {}, tag=header.tag),), views, format="torch.save")


def read_single(file: ReadableFile, path: str) -> dict[str, Any]:
    """The field of a header (dtype, shape, data_offsets) of a file that holds one tensor.

    Raises:
        CheckpointError: it is no sound file of ``torch.save``; `path` is for the message.
        NotAMap: it holds something else.
    """
    pickle, storages = _description(file, path)
    _check_calls(path, pickle, storages)
    return field_of(path, "the tensor", pickle.root, storages)


def view_of_field(path: str, number: int, name: str, field: dict[str, Any], size_bytes: int) -> View:
    """The elements of a field of a header, which another rank of ours has made, in a file of `size_bytes`."""
    shape, strides = field["shape"], field.pop("strides", None)
    if strides is not None:
        field["shape"] = [field.pop("span")]
    entry = parse_entry(path, number, 0, name, field)
    if entry.stop > size_bytes:
        raise CheckpointError(
            f"{path}: tensor {name!r}: bytes {entry.start} to {entry.stop} lie beyond the end of the file, which has "
            f"{size_bytes} bytes."
        )
    view = view_of(entry)
    return view if strides is None else View(view.node, tuple(shape), tuple(strides))


def _description(file: ReadableFile, path: str) -> tuple[Pickle, dict[str, Storage]]:
    """Return what :func:`describe` gives of a file that names nothing else than tensors need."""
    pickle, storages = describe(file, path, OPCODES)
    strange = next((each for each in pickle.globals if each not in _KNOWN), None)
    if strange is not None:
        raise NotAMap(f"it names {strange}")
    return pickle, storages


def _tensors(file: ReadableFile, path: str) -> dict[str, Any]:
    """The tensors of a file, as fields of a header."""
    pickle, storages = _description(file, path)
    root = pickle.root
    if isinstance(root, Call) and root.function == _ORDERED:
        root = dict(root.entries)
    if not isinstance(root, dict):
        raise NotAMap("it holds something else than a dict of tensors")
    found: dict[str, Any] = {}
    for name, value in root.items():
        if not isinstance(name, str):
            raise CheckpointError(f"{path}: expected names of tensors, found a {type(name).__name__} among them.")
        found[name] = field_of(path, name, value, storages)
    _check_calls(path, pickle, storages)
    return found


def describe(
    file: ReadableFile, path: str, opcodes: AbstractSet[str] | None = None
) -> tuple[Pickle, dict[str, Storage]]:
    """Return a file's pickle, of these `opcodes` only, and the places of the storages' bytes, by key.

    Raises:
        CheckpointError: it is no sound file of ``torch.save``.
        NotAMap: it has storages of another kind than tensors of numbers have.
    """
    is_zip = file.read(0, len(SIGNATURE)) == SIGNATURE
    pickle, storages = (read_zip if is_zip else _read_legacy)(file, path, opcodes)
    for key, dtype, numel in [*_named(pickle.persistents, 5 if is_zip else 6)]:  # also if no tensor is made of it
        place = storages.get(key)
        if type(numel) is not int or place is None or place.stop - place.start != numel * dtype.itemsize:
            held = "no storage" if place is None else f"{place.stop - place.start} bytes"
            raise CheckpointError(
                f"{path}: expected {object_kind(numel)} elements of {dtype} in storage {excerpt(key)}, found {held}. "
                "The file is damaged; save it again."
            )
    return pickle, storages


def _named(persistents: Iterable[Persistent], length: int) -> Iterator[tuple[str, torch.dtype, Any]]:
    """(key, dtype, number of elements) of each storage, which must be named as torch names them, by so many fields."""
    dtypes: dict[str, torch.dtype] = {}
    for persistent in persistents:
        fields = persistent.id[:7] if isinstance(persistent.id, tuple) else ()
        match fields:
            case ("storage", Global("torch", name), str() as key, str(), numel, *view) if (
                name in _STORAGES and len(fields) == length and view in ([], [None])
            ):
                if dtypes.setdefault(key, _STORAGES[name]) != _STORAGES[name]:
                    raise NotAMap(f"its storage {key} has two dtypes")  # torch makes it once, of the first
                yield key, _STORAGES[name], numel
            case _:
                raise NotAMap("it has a storage of an unknown kind")


def _check_calls(path: str, pickle: Pickle, storages: Mapping[str, Storage]) -> None:
    """Refuse a call that torch does not make in every file, also where no tensor of ours comes of it."""
    for call in pickle.calls:
        match call:
            case Call(function=Global("collections", "OrderedDict"), arguments=(), state=None | dict(), members=[]):
                continue
            case Call(function=function, state=None, entries=[], members=[]) if function == _REBUILD:
                field_of(path, "a tensor", call, storages)
                continue
            case Call(arguments=(Call(function=made), _, _), state=None, entries=[], members=[]):
                if call.function == _REBUILD_PARAMETER and made == _REBUILD:
                    continue
        raise NotAMap(f"it makes something else than a tensor ({object_kind(call)})")


def field_of(path: str, name: str, value: Any, storages: Mapping[str, Storage]) -> dict[str, Any]:
    """A tensor as a field of a header; checks that it lies in its storage."""
    if isinstance(value, Call) and value.function == _REBUILD_PARAMETER and value.arguments:
        value = value.arguments[0]
    if not isinstance(value, Call) or value.function != _REBUILD or len(value.arguments) != 6:
        raise NotAMap(f"{name} is no plain tensor ({object_kind(value)})")
    storage, offset, shape, strides, requires_grad, hooks = value.arguments
    if not isinstance(requires_grad, bool) or not isinstance(hooks, Call) or hooks.function != _ORDERED:
        raise NotAMap(f"{name} is no plain tensor")
    if not isinstance(storage, Persistent):
        raise NotAMap(f"{name} has no plain storage")
    _, storage_class, key, _, numel, *_ = storage.id  # which has been checked
    dtype = _STORAGES[storage_class.name]
    # Bounded before any sizes are multiplied.
    are_tuples = isinstance(shape, tuple) and isinstance(strides, tuple) and len(shape) == len(strides)
    if not (are_tuples and are_sizes([offset]) and are_sizes(shape) and are_sizes(strides)):
        raise CheckpointError(
            f"{path}: tensor {name!r}: expected at most {MAX_DIMENSIONS} sizes, as many strides, and an offset, found "
            f"{object_kind(shape)}, {object_kind(strides)}, {object_kind(offset)}."
        )
    place = storages[key]
    count = prod(shape)
    field: dict[str, Any] = {
        "dtype": file_dtype_name(dtype),
        "shape": list(shape),
        "data_offsets": [place.start, place.start],
    }
    if not count:
        return field
    last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if last >= numel:
        raise CheckpointError(
            f"{path}: tensor {name!r}: element {last} lies beyond its storage, which has {numel} elements."
        )
    field["data_offsets"] = [place.start + number * dtype.itemsize for number in (offset, last + 1)]
    expected = row_major_strides(shape)
    if any(size > 1 and mine != its for size, mine, its in zip(shape, strides, expected, strict=True)):
        span = last + 1 - offset
        if count > span:
            raise NotAMap(f"{name} has more elements than it stores")  # a file of any size may say any number
        field |= {"strides": list(strides), "span": span}
    return field


def _read_legacy(file: ReadableFile, path: str, opcodes: AbstractSet[str] | None) -> tuple[Pickle, dict[str, Storage]]:
    """Five pickles: a number, a version, the machine, the tensors, the storages' keys in order."""
    position = 0
    found: list[Pickle] = []
    for what in ("magic number", "version", "machine", "tensors", "storages"):
        pickle = _next_pickle(file, path, what, position, opcodes)
        value, position = pickle.root, position + pickle.size_bytes
        found.append(pickle)
        if what != "tensors" and (pickle.calls or pickle.globals or pickle.persistents):
            raise CheckpointError(f"{path}: this is no file of torch.save: its {what} is no plain value.")
        if (what == "magic number" and value != _MAGIC) or (what == "version" and value != _LEGACY_PROTOCOL):
            raise CheckpointError(f"{path}: this is no file of torch.save: its {what} is another one.")
    machine, tensors, keys = found[2].root, found[3], found[4].root
    if isinstance(machine, dict) and machine.get("little_endian") is False:
        raise CheckpointError(f"{path}: expected little-endian values. Save it again on a little-endian machine.")
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise CheckpointError(f"{path}: expected the keys of its storages.")
    dtypes = {key: dtype for key, dtype, _ in _named(tensors.persistents, 6)}
    storages: dict[str, Storage] = {}
    for key in keys:
        numel = int.from_bytes(file.read(position, 8), "little")
        if key not in dtypes:
            raise NotAMap(f"its storage {key} is of an unknown kind")
        position += 8
        storages[key] = Storage(position, position + numel * dtypes[key].itemsize)
        position = storages[key].stop
        if position > file.size_bytes:
            raise CheckpointError(f"{path}: storage {key!r}: it lies beyond the end of the file.")
    return tensors, storages


def _next_pickle(file: ReadableFile, path: str, what: str, start: int, opcodes: AbstractSet[str] | None) -> Pickle:
    """A pickle whose length nobody says: more and more is read until it ends."""
    length = 2**16
    while True:
        data = file.read(start, length)
        try:
            return read_pickle(data, f"{path}: {what}", opcodes)
        except CheckpointError:
            if len(data) < length or length == MOST_READ:
                raise
            length = min(4 * length, MOST_READ)
