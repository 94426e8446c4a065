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

from ...errors import CheckpointError
from ...plugin_api import NotAMap, ReadableFile
from .pickles import Pickle, read_pickle


SIGNATURE = b"PK\x03\x04"
_LOCAL_HEADER = 30  # bytes, and then the name and an extra field, whose lengths are its last two numbers

_FLAGS = 0x080E
"""Flags that a member may have: compression, sizes behind it, UTF-8. All others are of encryption and patches."""

_IS_FOLDER = 0x10
"""The bit of a folder in a member's attributes of MS-DOS."""

_NOTES = ("byteorder", ".data/version", "version", ".storage_alignment", ".data/serialization_id")
_VERSIONS = {b"%d" % number for number in range(1, 11)}
"""Versions of the archive's format, as torch's reader has them."""

MOST_READ = 512 * 2**20
"""Most bytes of anything but storages that are read at once."""

OPCODES = {
    *("PROTO", "STOP", "MARK", "GLOBAL", "REDUCE", "BUILD", "BINPERSID", "NONE", "NEWTRUE", "NEWFALSE"),
    *("BININT", "BININT1", "BININT2", "BINFLOAT", "LONG1", "BINUNICODE", "SHORT_BINSTRING"),
    *("EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "EMPTY_SET", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
    *("APPEND", "APPENDS", "SETITEM", "SETITEMS", "BINGET", "LONG_BINGET", "BINPUT", "LONG_BINPUT"),
}
"""The opcodes of ``torch/_weights_only_unpickler.py`` that torch itself writes."""


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


def read_zip(file: ReadableFile, path: str, opcodes: AbstractSet[str] | None) -> tuple[Pickle, dict[str, Storage]]:
    """Return the archive's pickle, of these `opcodes`, and the places of the storages' bytes, by key.

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
            prefix = _folder(path, archive.namelist())
            if f"{prefix}data.pkl" not in places:
                raise CheckpointError(f"{path}: expected data.pkl in the archive.")
            description = archive.read(f"{prefix}data.pkl")  # which compares its checksum
    except (zipfile.BadZipFile, NotImplementedError, ValueError, EOFError) as error:
        raise CheckpointError(f"{path}: this is no sound zip archive of torch.save: {error}") from error
    if f"{prefix}constants.pkl" in places:
        raise NotAMap("it is a TorchScript archive")
    notes = {name: _note(file, places[prefix + name]) for name in _NOTES if prefix + name in places}
    if notes.get("byteorder", b"little") != b"little":
        raise CheckpointError(f"{path}: byteorder: expected 'little'. Save it again on a little-endian machine.")
    version, alignment = notes.get(".data/version", notes.get("version", b"")), notes.get(".storage_alignment", b"64")
    identity = notes.get(".data/serialization_id", b"")
    if version.strip() not in _VERSIONS or not alignment.isdigit() or not identity.isascii():
        raise CheckpointError(f"{path}: expected a known version, an alignment and an identity in the archive.")
    pickle = read_pickle(description, f"{path}: data.pkl", opcodes)
    data = f"{prefix}data/"
    return pickle, {name.removeprefix(data): place for name, place in places.items() if name.startswith(data)}


def _note(file: ReadableFile, place: Storage) -> bytes:
    """Read a small member, such as a version; returns something that is no text if it is not small."""
    return file.read(place.start, place.stop - place.start) if place.stop - place.start <= 256 else b"\xff"


def _folder(path: str, names: Sequence[str]) -> str:
    """The folder of all members, with its slash. torch looks for members without regard to capitals."""
    prefix = names[0][: names[0].find("/") + 1] if names else ""
    if not prefix or any(not name.startswith(prefix) or not name.isascii() for name in names):
        raise CheckpointError(f"{path}: expected all members of the archive in one folder, with names in ASCII.")
    if len({name.lower() for name in names}) != len(names):
        raise CheckpointError(f"{path}: two members of the archive have the same name, but for capitals.")
    return prefix


def _checked_count(file: ReadableFile, path: str) -> int:
    """Count the members, if the directory is where torch looks for it: ``zipfile`` looks elsewhere, too.

    After the directory come one record, or three where numbers have 64 bits (APPNOTE.TXT of PKWARE, 4.3.14 to 4.3.16).
    """
    stop = file.size_bytes - _END.size
    end = _unpacked(_END, file, stop)
    if end[0] == b"PK\5\6" and end[1:3] == (0, 0) and end[3] == end[4] and end[7] == 0:
        size, start, count = end[5], end[6], end[4]
        locator = _unpacked(_LOCATOR, file, stop - _LOCATOR.size)
        if locator[0] == b"PK\6\7":
            stop -= _LOCATOR.size + _END_64.size
            last = _unpacked(_END_64, file, stop)
            is_sound = last[:2] == (b"PK\6\6", _END_64.size - 12) and last[4:6] == (0, 0) and last[6] == last[7]
            size, start, count = (last[8], last[9] if is_sound and locator[1:] == (0, stop, 1) else -1, last[7])
        if start >= 0 and start + size == stop and _fills(file.read(start, min(size, MOST_READ)), count):
            return int(count)
    raise CheckpointError(f"{path}: this is no sound zip archive of torch.save: it was cut, or has another end.")


def _fills(directory: bytes, count: int) -> bool:
    """Whether this many entries, of the lengths that they announce, are the whole directory."""
    position = 0
    for _ in range(count):
        if directory[position : position + 4] != b"PK\1\2":
            return False
        lengths = (directory[position + at : position + at + 2] for at in (28, 30, 32))
        position += 46 + sum(int.from_bytes(length, "little") for length in lengths)
    return position == len(directory)


_END = struct.Struct("<4s4H2IH")  # signature, disks, entries here and in all, size and offset, length of a comment
_LOCATOR = struct.Struct("<4sIQI")  # signature, disk, where the next is, disks
_END_64 = struct.Struct("<4sQ2H2I4Q")  # signature, length, versions, disks, entries here and in all, size and offset


def _unpacked(record: struct.Struct, file: ReadableFile, start: int) -> tuple[Any, ...]:
    """A record at this place, of zeros where the file has none."""
    data = file.read(start, record.size) if start >= 0 else b""
    return record.unpack(data.ljust(record.size, b"\0"))


def _places(file: ReadableFile, path: str, members: Sequence[zipfile.ZipInfo]) -> dict[str, Storage]:
    """Locate the bytes of each member; raises a CheckpointError unless each has its own, as they are."""
    places: dict[str, Storage] = {}
    end = 0
    for member in sorted(members, key=lambda member: member.header_offset):
        name, size = member.filename, member.file_size
        is_plain = member.compress_type == zipfile.ZIP_STORED and not member.flag_bits & ~_FLAGS and not member.volume
        if not is_plain or size != member.compress_size:
            raise CheckpointError(f"{path}: {name!r}: expected bytes as they are, found compressed or encrypted ones.")
        if member.external_attr & _IS_FOLDER or name.endswith("/"):  # torch would leave its memory as it is
            raise CheckpointError(f"{path}: {name!r}: expected a file in the archive, found a folder.")
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
