"""Files that ``torch.save`` wrote (``pytorch_model.bin``), as maps of bytes; no pickle in them is run.

The format has no specification; it is what ``torch/serialization.py`` reads. Since torch 1.6 a file is a zip archive:
``<name>/data.pkl`` describes the tensors, and each ``<name>/data/<key>`` holds the bytes of a storage, not compressed.
Before, it was five pickles, and then each storage's number of elements and bytes.

Rank 0 turns the description into a header like that of a safetensors file, with offsets from the file's beginning.
"""

from __future__ import annotations

import io
import json
import struct
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from ..errors import CheckpointError, ReadError
from ..sources.base import ByteSource, ReadableFile
from .format import Shard, ShardHeader, TensorEntry
from .nodes import row_major_strides
from .pickles import Call, Global, Persistent, Pickle, read_pickle
from .safetensors import dtype_name, parse_entry
from .untrusted_json import parse_object


__all__ = ["parse_header", "read_header", "why_not"]

_ZIP = b"PK\x03\x04"
_LOCAL_HEADER = 30  # bytes, and then the name and an extra field, whose lengths are its last two numbers
_MOST_READ = 512 * 2**20
"""Of anything but storages, at once."""

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

_OPCODES = {
    *("PROTO", "STOP", "MARK", "GLOBAL", "REDUCE", "BUILD", "BINPERSID", "NONE", "NEWTRUE", "NEWFALSE"),
    *("BININT", "BININT1", "BININT2", "BINFLOAT", "LONG1", "BINUNICODE", "SHORT_BINSTRING"),
    *("EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "EMPTY_SET", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
    *("APPEND", "APPENDS", "SETITEM", "SETITEMS", "BINGET", "LONG_BINGET", "BINPUT", "LONG_BINPUT"),
}
"""Of ``torch/_weights_only_unpickler.py``: those that torch itself writes."""


class NotAMap(Exception):
    """A sound file, as far as was seen, whose tensors are not plain ranges of bytes; the message says why."""


def read_header(source: ByteSource, path: str) -> ShardHeader:
    """See :meth:`.format.Format.read_header`; raises :class:`NotAMap` too."""
    try:
        with source.open_file(path) as file:
            tensors = _tensors(file, path)
            return ShardHeader(file.size_bytes, json.dumps(tensors).encode())
    except OSError as error:
        raise ReadError(
            f"{path}: cannot read what torch.save wrote: {error.strerror or error}. Check that the file exists on "
            "every node and may be read."
        ) from error


def why_not(source: ByteSource, paths: Sequence[str]) -> str:
    """Why these files cannot be read as maps of bytes; "" if they can be."""
    for path in paths:
        try:
            read_header(source, path)
        except NotAMap as reason:
            return f"{path}: {reason}"
    return ""


def parse_header(path: str, number: int, header: ShardHeader) -> tuple[Shard, list[TensorEntry]]:
    """See :meth:`.format.Format.parse_header`; tensors may share bytes."""
    fields = parse_object(header.text, f"{path}: header")
    entries = [parse_entry(path, number, 0, name, field) for name, field in fields.items()]
    for entry in entries:
        if entry.stop > header.size_bytes:
            raise CheckpointError(
                f"{path}: tensor {entry.name!r}: bytes {entry.start} to {entry.stop} lie beyond the end of the file, "
                f"which has {header.size_bytes} bytes."
            )
    return Shard(path, header.size_bytes, {}), entries


class _Storage(NamedTuple):
    """Bytes ``[start, stop)`` of the file."""

    start: int
    stop: int


def _tensors(file: ReadableFile, path: str) -> dict[str, Any]:
    """The tensors of a file, as fields of a header."""
    is_zip = file.read(0, len(_ZIP)) == _ZIP
    pickle, storages = (_read_zip if is_zip else _read_legacy)(file, path)
    strange = next((each for each in pickle.globals if each not in _KNOWN), None)
    if strange is not None:
        raise NotAMap(f"it names {strange}")
    for call in pickle.calls:
        _check_call(path, call, storages)
    root = pickle.root
    if isinstance(root, Call) and root.function == _ORDERED:
        root = dict(root.entries)
    if not isinstance(root, dict):
        raise NotAMap("it holds something else than a dict of tensors")
    found: dict[str, Any] = {}
    for name, value in root.items():
        if not isinstance(name, str):
            raise CheckpointError(f"{path}: expected names of tensors, found a {type(name).__name__} among them.")
        found[name] = _field(path, name, value, storages)
    return found


def _check_call(path: str, call: Call, storages: Mapping[str, _Storage]) -> None:
    """What torch would call must be what it calls in every file, also where no tensor of ours comes of it."""
    sets_state = call.state is not None or call.members or call.entries
    if call.function == _ORDERED and not call.arguments and isinstance(call.state, (dict, type(None))):
        if not call.members:
            return
    elif not sets_state and call.function == _REBUILD:
        _field(path, "a tensor", call, storages)
        return
    elif not sets_state and call.function == _REBUILD_PARAMETER and len(call.arguments) == 3:
        if isinstance(call.arguments[0], Call) and call.arguments[0].function == _REBUILD:
            return
    raise NotAMap(f"it makes something else than a tensor ({call.function})")


def _field(path: str, name: str, value: Any, storages: Mapping[str, _Storage]) -> dict[str, Any]:
    """A tensor as a field of a header; checks that it lies in its storage."""
    if isinstance(value, Call) and value.function == _REBUILD_PARAMETER and value.arguments:
        value = value.arguments[0]
    if not isinstance(value, Call) or value.function != _REBUILD or len(value.arguments) != 6:
        kind = value.function if isinstance(value, Call) else type(value).__name__
        raise NotAMap(f"{name} is no plain tensor ({kind})")
    storage, offset, shape, strides, requires_grad, hooks = value.arguments
    if not isinstance(requires_grad, bool) or not isinstance(hooks, Call) or hooks.function != _ORDERED:
        raise NotAMap(f"{name} is no plain tensor")
    if not isinstance(storage, Persistent) or not isinstance(storage.id, tuple) or len(storage.id) < 5:
        raise NotAMap(f"{name} has no plain storage")
    kind, storage_class, key, _, numel, *view = storage.id
    dtype = _STORAGES.get(getattr(storage_class, "name", ""))
    if kind != "storage" or dtype is None or getattr(storage_class, "module", "") != "torch" or any(view):
        raise NotAMap(f"{name} has a storage of an unknown kind ({storage_class})")
    numbers = [offset, numel, *shape, *strides] if isinstance(shape, tuple) and isinstance(strides, tuple) else [None]
    if not all(type(number) is int and 0 <= number < 2**63 for number in numbers) or len(shape) != len(strides):
        raise CheckpointError(f"{path}: tensor {name!r}: expected sizes, strides and an offset, found {numbers[:8]}.")
    place = storages.get(str(key))
    if place is None or place.stop - place.start != numel * dtype.itemsize:
        held = "no storage" if place is None else f"{place.stop - place.start} bytes"
        raise CheckpointError(
            f"{path}: tensor {name!r}: expected {numel} elements of {dtype} in storage {key!r}, found {held}. The "
            "file is damaged; save it again."
        )
    count = prod(shape)
    if count:
        last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        if last >= numel:
            raise CheckpointError(
                f"{path}: tensor {name!r}: element {last} lies beyond its storage, which has {numel} elements."
            )
        expected = row_major_strides(shape)
        if any(size > 1 and mine != its for size, mine, its in zip(shape, strides, expected, strict=True)):
            raise NotAMap(f"{name} is not stored row by row")
    start = place.start + offset * dtype.itemsize if count else place.start
    return {
        "dtype": dtype_name(dtype),
        "shape": list(shape),
        "data_offsets": [start, start + count * dtype.itemsize],
    }


# ----------------------------------------------------------------------------------------------------------------- zip


class _Bytes(io.RawIOBase):
    """A file of a source, for ``zipfile``."""

    def __init__(self, file: ReadableFile) -> None:
        self._file, self._position = file, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size_bytes}[whence]
        if base + offset < 0:
            raise zipfile.BadZipFile("a position before the beginning of the file")
        self._position = base + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._file.size_bytes - self._position)
        wanted = left if size < 0 else min(size, left)
        if wanted > _MOST_READ:
            raise zipfile.BadZipFile(f"{wanted} bytes of something that is no tensor")
        data = self._file.read(self._position, wanted)
        self._position += len(data)
        return data


def _read_zip(file: ReadableFile, path: str) -> tuple[Pickle, dict[str, _Storage]]:
    count = _checked_count(file, path)
    try:
        with zipfile.ZipFile(_Bytes(file)) as archive:
            if len(archive.infolist()) != count:
                raise CheckpointError(f"{path}: expected {count} members, found {len(archive.infolist())}.")
            places = _places(file, path, archive.infolist())
            pickles = [name for name in places if name.endswith("/data.pkl")]
            if len(pickles) != 1:
                raise CheckpointError(f"{path}: expected one data.pkl in the archive, found {len(pickles)}.")
            description = archive.read(pickles[0])  # which compares its checksum
    except (zipfile.BadZipFile, NotImplementedError, ValueError, EOFError) as error:
        raise CheckpointError(f"{path}: this is no sound zip archive of torch.save: {error}") from error
    prefix = pickles[0].removesuffix("data.pkl")
    if f"{prefix}constants.pkl" in places:
        raise NotAMap("it is a TorchScript archive")
    order = places.get(f"{prefix}byteorder")
    if order is not None and file.read(order.start, min(8, order.stop - order.start)) != b"little":
        raise CheckpointError(f"{path}: byteorder: expected 'little'. Save it again on a little-endian machine.")
    pickle = read_pickle(description, f"{path}: data.pkl", _OPCODES)
    data = f"{prefix}data/"
    return pickle, {name.removeprefix(data): place for name, place in places.items() if name.startswith(data)}


def _checked_count(file: ReadableFile, path: str) -> int:
    """How many members there are, if the directory is where torch looks for it: ``zipfile`` looks elsewhere, too.

    After the directory come one record, or three where numbers have 64 bits (APPNOTE.TXT of PKWARE, 4.3.14 to 4.3.16).
    """
    stop = file.size_bytes - _END.size
    end = _unpacked(_END, file, stop)
    if end[0] == b"PK\5\6" and end[1:3] == (0, 0) and end[3] == end[4] and end[7] == 0:
        begin, count = end[5] + end[6], end[4]
        locator = _unpacked(_LOCATOR, file, stop - _LOCATOR.size)
        if locator[0] == b"PK\6\7":
            stop -= _LOCATOR.size + _END_64.size
            last = _unpacked(_END_64, file, stop)
            is_sound = last[:2] == (b"PK\6\6", _END_64.size - 12) and last[4:6] == (0, 0) and last[6] == last[7]
            begin, count = last[8] + last[9] if is_sound and locator[1:] == (0, stop, 1) else -1, last[7]
        if begin == stop:
            return int(count)
    raise CheckpointError(f"{path}: this is no sound zip archive of torch.save: it was cut, or has another end.")


_END = struct.Struct("<4s4H2IH")  # signature, disks, entries here and in all, size and offset, length of a comment
_LOCATOR = struct.Struct("<4sIQI")  # signature, disk, where the next is, disks
_END_64 = struct.Struct("<4sQ2H2I4Q")  # signature, length, versions, disks, entries here and in all, size and offset


def _unpacked(record: struct.Struct, file: ReadableFile, start: int) -> tuple[Any, ...]:
    """A record at this place, of zeros where the file has none."""
    data = file.read(start, record.size) if start >= 0 else b""
    return record.unpack(data.ljust(record.size, b"\0"))


def _places(file: ReadableFile, path: str, members: Sequence[zipfile.ZipInfo]) -> dict[str, _Storage]:
    """Where the bytes of each member lie; raises a CheckpointError unless each has its own, as they are."""
    places: dict[str, _Storage] = {}
    end = 0
    for member in sorted(members, key=lambda member: member.header_offset):
        name, size = member.filename, member.file_size
        is_plain = member.compress_type == zipfile.ZIP_STORED and not member.flag_bits & 1 and not member.volume
        if not is_plain or size != member.compress_size:
            raise CheckpointError(f"{path}: {name!r}: expected bytes as they are, found compressed or encrypted ones.")
        if not end <= member.header_offset < file.size_bytes:
            raise CheckpointError(f"{path}: {name!r}: it overlaps another member, or lies beyond the end of the file.")
        header = file.read(member.header_offset, _LOCAL_HEADER)
        if len(header) < _LOCAL_HEADER or not header.startswith(_ZIP):
            raise CheckpointError(f"{path}: {name!r}: expected a header of its own at byte {member.header_offset}.")
        start = (
            member.header_offset
            + _LOCAL_HEADER
            + sum(int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
        )
        end = start + size
        if end > file.size_bytes or name in places:
            raise CheckpointError(f"{path}: {name!r}: it lies beyond the end of the file, or is there twice.")
        places[name] = _Storage(start, end)
    return places


def _read(file: ReadableFile, path: str, start: int, stop: int) -> bytes:
    if stop - start > _MOST_READ:
        raise CheckpointError(f"{path}: expected a description of at most {_MOST_READ} bytes; got {stop - start}")
    return file.read(start, stop - start)


# -------------------------------------------------------------------------------------------------------------- legacy


def _read_legacy(file: ReadableFile, path: str) -> tuple[Pickle, dict[str, _Storage]]:
    """Five pickles: a number, a version, the machine, the tensors, the storages' keys in order."""
    position = 0
    found: list[Pickle] = []
    for what in ("magic number", "version", "machine", "tensors", "storages"):
        pickle = _next_pickle(file, path, what, position)
        value, position = pickle.root, position + pickle.size_bytes
        found.append(pickle)
        if (what == "magic number" and value != _MAGIC) or (what == "version" and value != _LEGACY_PROTOCOL):
            raise CheckpointError(f"{path}: this is no file of torch.save: its {what} is another one.")
    machine, tensors, keys = found[2].root, found[3], found[4].root
    if isinstance(machine, dict) and machine.get("little_endian") is False:
        raise CheckpointError(f"{path}: expected little-endian values. Save it again on a little-endian machine.")
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise CheckpointError(f"{path}: expected the keys of its storages.")
    itemsizes = _itemsizes(tensors.calls)
    storages: dict[str, _Storage] = {}
    for key in keys:
        numel = int.from_bytes(file.read(position, 8), "little")
        if key not in itemsizes:
            raise NotAMap(f"its storage {key} is of an unknown kind")
        position += 8
        storages[key] = _Storage(position, position + numel * itemsizes[key])
        position = storages[key].stop
        if position > file.size_bytes:
            raise CheckpointError(f"{path}: storage {key!r}: it lies beyond the end of the file.")
    return tensors, storages


def _next_pickle(file: ReadableFile, path: str, what: str, start: int) -> Pickle:
    """A pickle whose length nobody says: more and more is read until it ends."""
    length = 2**16
    while True:
        data = _read(file, path, start, min(file.size_bytes, start + length))
        try:
            return read_pickle(data, f"{path}: {what}", _OPCODES)
        except CheckpointError:
            if len(data) < length or length >= _MOST_READ:
                raise
            length *= 4


def _itemsizes(calls: Iterable[Call]) -> dict[str, int]:
    """The size of the elements of each storage that tensors are made of."""
    found: dict[str, int] = {}
    for call in calls:
        match call.arguments:
            case (Persistent(id=(_, Global(module="torch", name=name), str() as key, *_)), *_) if name in _STORAGES:
                found[key] = _STORAGES[name].itemsize
    return found
