"""Safetensors headers as data: which tensor lies in which bytes of which shard.

The format (https://github.com/huggingface/safetensors, "Format"): 8 bytes little-endian header length, a JSON
object that maps each tensor's name to ``{"dtype", "shape", "data_offsets": [begin, end]}`` with offsets relative to
the end of the header, then the data. The data must be covered from end to end, with no hole and no overlap.

A header is untrusted input: everything in it is checked before it is believed, at a cost linear in its length, and a
fault is a :class:`~hf_zero_stream.errors.CheckpointError` that names the file and the field. Nothing is accepted that
the safetensors library refuses; docs/untrusted.md lists what it accepts and we do not.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import torch

from ..errors import CheckpointError, ReadError
from .untrusted_json import excerpt, parse_object


__all__ = [
    "DTYPES",
    "MAX_HEADER_BYTES",
    "CheckpointIndex",
    "Shard",
    "ShardHeader",
    "TensorEntry",
    "open_at_once",
    "read_header",
]

MAX_HEADER_BYTES = 100_000_000
"""The safetensors library's own cap on the length of a header."""

MAX_NAME_LENGTH = 1024
"""Characters of a tensor's name: transformers matches names against patterns, whose cost may grow with the square."""

MAX_DIMENSIONS = 64
"""Sizes of one tensor: more than torch's kernels take."""

_INT64_END = 2**63  # sizes, strides and byte counts are int64 in torch

# Names of dtypes in the format; a name whose torch dtype does not exist in this torch is an unknown dtype.
_TORCH_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "C64": "complex64",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, torch_name) for name, torch_name in _TORCH_NAMES.items() if hasattr(torch, torch_name)
}
_ITEM_BYTES = {name: dtype.itemsize for name, dtype in DTYPES.items()}
_PACKED = {"F4", "F6_E2M3", "F6_E3M2"}


class TensorEntry(NamedTuple):
    """One tensor of a shard.

    Attributes:
        name: its key in the checkpoint.
        shard: position of its shard in :attr:`CheckpointIndex.shards`.
        dtype_name: the format's name of the dtype, for instance ``"BF16"``.
        shape: its sizes.
        start: first byte in the file (absolute).
        stop: one past the last byte in the file (absolute).
    """

    name: str
    shard: int
    dtype_name: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.dtype_name]


_FIELDS = {"dtype", "shape", "data_offsets"}


@dataclass(frozen=True, slots=True)
class ShardHeader:
    """The raw header of one shard: what one rank reads and all ranks share.

    Attributes:
        size_bytes: size of the whole file.
        text: the JSON text of the header, not yet believed.
    """

    size_bytes: int
    text: bytes


@dataclass(frozen=True, slots=True)
class Shard:
    """One safetensors file whose header has been checked.

    Attributes:
        path: where it lies for this rank.
        size_bytes: size of the whole file.
        data_start: first byte after the header.
        metadata: the header's ``__metadata__``.
    """

    path: str
    size_bytes: int
    data_start: int
    metadata: Mapping[str, str]


@dataclass(frozen=True)
class CheckpointIndex:
    """All shards of a checkpoint and all tensors in them.

    Attributes:
        shards: the files.
        tensors: by name.
        absent: tensors that ``model.safetensors.index.json`` promises and no shard holds -> the promised file.
        notes: where the shards are not as that file says, and what was taken instead.
    """

    shards: tuple[Shard, ...]
    tensors: Mapping[str, TensorEntry]
    absent: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @classmethod
    def from_files(
        cls, paths: Sequence[str | os.PathLike[str]], weight_map: Mapping[str, str] | None = None
    ) -> CheckpointIndex:
        """Read and check the headers of `paths`.

        Raises:
            ReadError: a file is missing or cannot be read.
            CheckpointError: a header is not a valid safetensors header, or two shards hold the same tensor and
                `weight_map` does not say which of them counts.
        """
        return cls.from_headers(paths, [read_header(path) for path in paths], weight_map)

    @classmethod
    def from_headers(
        cls,
        paths: Sequence[str | os.PathLike[str]],
        headers: Sequence[ShardHeader],
        weight_map: Mapping[str, str] | None = None,
    ) -> CheckpointIndex:
        """Check `headers`, which some rank read, for the files `paths` as this rank sees them.

        Args:
            weight_map: a tensor's name -> its shard's name, as ``model.safetensors.index.json`` has them.
        """
        weight_map = weight_map or {}
        shards: list[Shard] = []
        tensors: dict[str, TensorEntry] = {}
        repeated: dict[str, list[TensorEntry]] = {}
        for position, (path, header) in enumerate(zip(paths, headers, strict=True)):
            shard, entries = _parse_header(os.fspath(path), position, header)
            shards.append(shard)
            for found in entries:
                other = tensors.setdefault(found.name, found)
                if other is not found:
                    repeated.setdefault(found.name, [other]).append(found)
        names = _names_in_folder(shards, weight_map)
        for name, copies in repeated.items():
            promised = [entry for entry in copies if names[entry.shard] == weight_map.get(name)]
            if not promised:
                first, second = (shards[entry.shard].path for entry in copies[:2])
                raise CheckpointError(
                    f"Tensor {excerpt(name)} is in two shards: {first} and {second}, and no index says which of them "
                    "counts. Keep it in one of them."
                )
            tensors[name] = promised[0]
        absent: dict[str, str] = {}
        misplaced: list[str] = []
        for name, file in weight_map.items():
            entry = tensors.get(name)
            if entry is None:
                absent[name] = file
            elif names[entry.shard] != file:
                misplaced.append(name)
        notes = []
        if repeated:
            notes.append(f"{_some(repeated)} in two shards or more; taken from the one that the index names.")
        if misplaced:
            notes.append(f"{_some(misplaced)} in another shard than the one that the index names; taken from there.")
        return cls(tuple(shards), tensors, absent, tuple(notes))

    def refuse_absent(self, wanted: Iterable[str]) -> None:
        """Raise if any of the tensors `wanted` is in no shard, although the index promises it.

        Raises:
            CheckpointError: names the first of them, and the file that should hold it.
        """
        names = sorted(set(wanted) & self.absent.keys())
        if names:
            more = f" ({len(names)} such tensors in all)" if len(names) > 1 else ""
            folder = os.path.dirname(self.shards[0].path) if self.shards else ""
            raise CheckpointError(
                f"{folder}: the checkpoint's index promises tensor {excerpt(names[0])} in "
                f"{excerpt(self.absent[names[0]])}, but no shard holds it{more}. Download or save the checkpoint "
                "again."
            )

    def numbered_from(self, first: int) -> CheckpointIndex:
        """The same, with `first` as the number of the first shard: for files that are read together with others."""
        if first == 0:
            return self
        return CheckpointIndex(
            self.shards, {name: entry._replace(shard=entry.shard + first) for name, entry in self.tensors.items()}
        )

    @property
    def note_of_absent(self) -> str:
        """What to say of :attr:`absent` where nobody wants them."""
        return f"{_some(self.absent)} in no shard, although the index says so. The model has no use for that."


def _names_in_folder(shards: Sequence[Shard], weight_map: Mapping[str, str]) -> list[str]:
    """The shards' paths relative to the checkpoint's folder, where the shards are those that `weight_map` names."""
    paths = [shard.path for shard in shards]
    # In whatever order they come, the first path is the folder and the first name.
    folder = min(paths).removesuffix(min(weight_map.values())) if paths and weight_map else ""
    return [path.removeprefix(folder) for path in paths]


def _some(names: Iterable[str]) -> str:
    first, *others = names
    return f"{1 + len(others)} tensors, among them {excerpt(first)}, are" if others else f"Tensor {excerpt(first)} is"


def open_at_once(path: str, flags: int) -> int:
    """For ``open(opener=...)``: a pipe without a writer would never open otherwise; regular files do not care."""
    return os.open(path, flags | os.O_NONBLOCK)


def read_header(path: str | os.PathLike[str]) -> ShardHeader:
    """Read the header of the safetensors file at `path`; costs at most :data:`MAX_HEADER_BYTES`.

    Raises:
        ReadError: the file is missing or cannot be read.
        CheckpointError: it is not a regular file, or too short for the header that it announces.
    """
    name = os.fspath(path)
    try:
        with open(name, "rb", opener=open_at_once) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(f"{name}: expected a regular file, found a pipe, a socket or a device.")
            prefix = file.read(8)
            if len(prefix) < 8:
                raise CheckpointError(f"{name}: expected at least 8 bytes of safetensors header, found {len(prefix)}.")
            length = int.from_bytes(prefix, "little")
            if length > MAX_HEADER_BYTES:
                raise CheckpointError(
                    f"{name}: header length: at most {MAX_HEADER_BYTES} bytes are allowed, found {length}. "
                    "This is probably not a safetensors file."
                )
            if 8 + length > status.st_size:
                raise CheckpointError(
                    f"{name}: header length: the header ends at byte {8 + length}, but the file has {status.st_size} "
                    "bytes. The file is truncated or is not a safetensors file; download or save it again."
                )
            text = file.read(length)
    except OSError as error:
        raise ReadError(
            f"{name}: cannot read the safetensors header: {error.strerror or error}. "
            "Check that the file exists on every node and may be read."
        ) from error
    if len(text) != length:
        raise CheckpointError(
            f"{name}: header length: announced {length} bytes, of which only {len(text)} could be read: the file was "
            "cut while it was read."
        )
    return ShardHeader(status.st_size, text)


def _parse_header(path: str, position: int, header: ShardHeader) -> tuple[Shard, list[TensorEntry]]:
    fields = parse_object(header.text, f"{path}: header")
    metadata = fields.pop("__metadata__", None)
    if metadata is None:  # absent, or null, as the library has it
        metadata = {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path}: header field '__metadata__': expected a map of strings to strings.")

    data_start = 8 + len(header.text)
    data_bytes = header.size_bytes - data_start
    entries = [_parse_entry(path, position, data_start, name, field) for name, field in fields.items()]
    _check_coverage(path, data_start, data_bytes, entries)
    return Shard(path, header.size_bytes, data_start, metadata), entries


def _parse_entry(path: str, position: int, data_start: int, name: str, field: Any) -> TensorEntry:
    if len(name) > MAX_NAME_LENGTH:
        raise _faulty(path, name, f"name: at most {MAX_NAME_LENGTH} characters are allowed, found {len(name)}")
    if not isinstance(field, dict) or field.keys() != _FIELDS:
        raise _faulty(path, name, "expected exactly the fields dtype, shape and data_offsets")
    dtype_name, shape, offsets = field["dtype"], field["shape"], field["data_offsets"]
    if not isinstance(dtype_name, str) or dtype_name not in DTYPES:
        raise _faulty(path, name, _unknown_dtype(dtype_name))
    if not isinstance(shape, list) or not _are_sizes(shape):
        raise _faulty(path, name, f"shape: expected a list of sizes >= 0, found {excerpt(shape)}")
    if len(shape) > MAX_DIMENSIONS:
        raise _faulty(path, name, f"shape: at most {MAX_DIMENSIONS} dimensions are allowed, found {len(shape)}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not _are_sizes(offsets):
        raise _faulty(path, name, f"data_offsets: expected two offsets >= 0, found {excerpt(offsets)}")
    begin, end = offsets
    item_bytes = _ITEM_BYTES[dtype_name]
    expected = prod(shape) * item_bytes
    if end - begin != expected:
        raise _faulty(
            path,
            name,
            f"data_offsets [{begin}, {end}] hold {end - begin} bytes, but dtype {dtype_name} and shape "
            f"{excerpt(shape)} need {expected if expected < _INT64_END else '2**63 or more'}",
        )
    # A size of 0 hides an overflow from the check above, but not from whoever multiplies in another order.
    if not expected and prod(size for size in shape if size) * item_bytes >= _INT64_END:
        raise _faulty(path, name, f"shape: the sizes of {excerpt(shape)} overflow 64 bits")
    return TensorEntry(name, position, dtype_name, tuple(shape), data_start + begin, data_start + end)


def _faulty(path: str, name: str, text: str) -> CheckpointError:
    return CheckpointError(f"{path}: tensor {excerpt(name)}: {text}.")


def _unknown_dtype(name: Any) -> str:
    if isinstance(name, str) and name in _PACKED:
        return f"dtype {name} packs several values into a byte, and is not streamed; load it without streaming()"
    return f"unknown dtype {excerpt(name)}; known are {', '.join(DTYPES)}"


def _are_sizes(values: list[Any]) -> bool:
    for value in values:
        if type(value) is not int or not 0 <= value < _INT64_END:  # bool is an int too, and JSON has it
            return False
    return True


def _check_coverage(path: str, data_start: int, data_bytes: int, entries: Iterable[TensorEntry]) -> None:
    """The tensors must cover the data from end to end: no hole, no overlap, nothing past the end of the file."""
    covered = data_start
    for entry in sorted(entries, key=lambda entry: (entry.start, entry.stop)):
        if entry.start != covered:
            fault = "overlaps the tensor before it" if entry.start < covered else "leaves a hole before it"
            raise CheckpointError(
                f"{path}: tensor {excerpt(entry.name)}: data_offsets: expected to begin at {covered - data_start}, "
                f"found {entry.start - data_start}, which {fault}."
            )
        covered = entry.stop
    if covered != data_start + data_bytes:
        fault = "is truncated" if covered > data_start + data_bytes else "has bytes that belong to no tensor"
        raise CheckpointError(
            f"{path}: the tensors end at byte {covered}, but the file has {data_start + data_bytes} bytes: "
            f"it {fault}. Download or save it again."
        )
