"""The zip archives that ``torch.save`` writes: their description, and where the bytes of each storage lie.

Python's ``zipfile`` reads the directory. What it does not compare is checked here, since torch's own reader does: that
each member has a header and bytes of its own, as they are, and that nothing follows the directory.
"""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

from ..errors import CheckpointError
from ..sources.base import ReadableFile
from .pickles import Pickle, read_pickle


__all__ = ["MOST_READ", "OPCODES", "SIGNATURE", "NotAMap", "Storage", "read_zip"]

SIGNATURE = b"PK\x03\x04"
_LOCAL_HEADER = 30  # bytes, and then the name and an extra field, whose lengths are its last two numbers

_FLAGS = 0x080E
"""Of a member: how it was compressed, sizes behind it, a name in UTF-8. All others are of encryption and patches."""

MOST_READ = 512 * 2**20
"""Bytes of anything but storages, at once."""

OPCODES = {
    *("PROTO", "STOP", "MARK", "GLOBAL", "REDUCE", "BUILD", "BINPERSID", "NONE", "NEWTRUE", "NEWFALSE"),
    *("BININT", "BININT1", "BININT2", "BINFLOAT", "LONG1", "BINUNICODE", "SHORT_BINSTRING"),
    *("EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "EMPTY_SET", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
    *("APPEND", "APPENDS", "SETITEM", "SETITEMS", "BINGET", "LONG_BINGET", "BINPUT", "LONG_BINPUT"),
}
"""Of ``torch/_weights_only_unpickler.py``: those that torch itself writes."""


class NotAMap(Exception):
    """A sound file, as far as was seen, whose tensors are not plain ranges of bytes; the message says why."""


class Storage(NamedTuple):
    """Bytes ``[start, stop)`` of the file."""

    start: int
    stop: int


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
        if wanted > MOST_READ:
            raise zipfile.BadZipFile(f"{wanted} bytes of something that is no tensor")
        data = self._file.read(self._position, wanted)
        self._position += len(data)
        return data


def read_zip(
    file: ReadableFile, path: str, opcodes: AbstractSet[str] | None = OPCODES
) -> tuple[Pickle, dict[str, Storage]]:
    """What the archive describes in these `opcodes`, and where the bytes of each storage lie, by its key.

    Raises:
        CheckpointError: it is no sound archive of ``torch.save``; `path` is for the message.
        NotAMap: it is one of TorchScript.
    """
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
    pickle = read_pickle(description, f"{path}: data.pkl", opcodes)
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


def _places(file: ReadableFile, path: str, members: Sequence[zipfile.ZipInfo]) -> dict[str, Storage]:
    """Where the bytes of each member lie; raises a CheckpointError unless each has its own, as they are."""
    places: dict[str, Storage] = {}
    end = 0
    for member in sorted(members, key=lambda member: member.header_offset):
        name, size = member.filename, member.file_size
        is_plain = member.compress_type == zipfile.ZIP_STORED and not member.flag_bits & ~_FLAGS and not member.volume
        if not is_plain or size != member.compress_size:
            raise CheckpointError(f"{path}: {name!r}: expected bytes as they are, found compressed or encrypted ones.")
        if not end <= member.header_offset < file.size_bytes:
            raise CheckpointError(f"{path}: {name!r}: it overlaps another member, or lies beyond the end of the file.")
        header = file.read(member.header_offset, _LOCAL_HEADER)
        if len(header) < _LOCAL_HEADER or not header.startswith(SIGNATURE):
            raise CheckpointError(f"{path}: {name!r}: expected a header of its own at byte {member.header_offset}.")
        start = (
            member.header_offset
            + _LOCAL_HEADER
            + sum(int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
        )
        end = start + size
        if end > file.size_bytes or name in places:
            raise CheckpointError(f"{path}: {name!r}: it lies beyond the end of the file, or is there twice.")
        places[name] = Storage(start, end)
    return places
