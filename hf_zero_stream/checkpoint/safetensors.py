"""Safetensors files: headers that are read (see :class:`.formats.Format`), and headers for files to be written.

The format (https://github.com/huggingface/safetensors, "Format"): 8 bytes little-endian header length, a JSON
object that maps each tensor's name to ``{"dtype", "shape", "data_offsets": [begin, end]}`` with offsets relative to
the end of the header, then the data, which the tensors cover with no hole and no overlap.

A header is untrusted: all of it is checked before use. Nothing is accepted that the safetensors library refuses;
docs/sources.md lists what it accepts and we do not.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError
from ..sources.base import ByteSource, as_read_error
from .format import MAX_DIMENSIONS, Shard, ShardHeader, TensorEntry, are_sizes, dtypes, excerpt, parse_object
from .map import CheckpointMap
from .nodes import HostTensor, View


if TYPE_CHECKING:
    import torch

MAX_HEADER_BYTES = 100_000_000
"""The safetensors library's own cap on the length of a header."""

MAX_NAME_LENGTH = 1024
"""transformers matches names against patterns, in time that may grow with the square of their length."""

_INT64_END = 2**63  # sizes, strides and byte counts are int64 in torch

_PACKED = {"F4", "F6_E2M3", "F6_E3M2"}
_FIELDS = {"dtype", "shape", "data_offsets"}


def read_header(source: ByteSource, path: str) -> ShardHeader:
    """See :meth:`.formats.Format.read_header`."""
    with as_read_error(path, "the safetensors header"), source.open_file(path) as file:
        prefix = file.read(0, 8)
        if len(prefix) < 8:
            raise CheckpointError(f"{path}: expected at least 8 bytes of safetensors header, found {len(prefix)}.")
        if prefix[:4] == b"GGUF":
            raise CheckpointError(f"{path}: this is a GGUF file. from_pretrained(FOLDER, gguf_file=NAME) loads it.")
        length = int.from_bytes(prefix, "little")
        if length > MAX_HEADER_BYTES:
            raise CheckpointError(
                f"{path}: header length: at most {MAX_HEADER_BYTES} bytes are allowed, found {length}. "
                "This is probably not a safetensors file."
            )
        if 8 + length > file.size_bytes:
            raise CheckpointError(
                f"{path}: header length: the header ends at byte {8 + length}, but the file has {file.size_bytes} "
                "bytes. The file is truncated or is not a safetensors file; download or save it again."
            )
        text = file.read(8, length)
    if len(text) != length:
        raise CheckpointError(
            f"{path}: header length: announced {length} bytes, of which only {len(text)} could be read: the file was "
            "cut while it was read."
        )
    return ShardHeader(file.size_bytes, text, file.tag)


def parse_header(path: str, number: int, header: ShardHeader) -> CheckpointMap:
    """See :meth:`.formats.Format.parse_header`; the tensors come in order of the header."""
    fields = parse_object(header.text, f"{path}: header")
    metadata = fields.pop("__metadata__", None)
    if metadata is None:  # absent or null: the library takes both
        metadata = {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path}: header field '__metadata__': expected a map of strings to strings.")

    data_start = 8 + len(header.text)
    entries = [parse_entry(path, number, data_start, name, field) for name, field in fields.items()]
    _check_coverage(path, data_start, header.size_bytes, entries)
    return CheckpointMap.of_entries(Shard(path, header.size_bytes, metadata, tag=header.tag), entries)


def parse_entry(path: str, number: int, data_start: int, name: str, field: Any) -> TensorEntry:
    if len(name) > MAX_NAME_LENGTH:
        raise _entry_error(path, name, f"name: at most {MAX_NAME_LENGTH} characters are allowed, found {len(name)}")
    if not isinstance(field, dict) or field.keys() != _FIELDS:
        raise _entry_error(path, name, "expected exactly the fields dtype, shape and data_offsets")
    dtype, shape, offsets = field["dtype"], field["shape"], field["data_offsets"]
    known = dtypes()
    if not isinstance(dtype, str) or dtype not in known:
        fault = f"unknown dtype {excerpt(dtype)}; known are {', '.join(known)}"
        if isinstance(dtype, str) and dtype in _PACKED:
            fault = f"dtype {dtype} packs several values into a byte, and is not streamed; load it without streaming()"
        raise _entry_error(path, name, fault)
    if not isinstance(shape, list) or not are_sizes(shape, len(shape)):
        raise _entry_error(path, name, f"shape: expected a list of sizes >= 0, found {excerpt(shape)}")
    if len(shape) > MAX_DIMENSIONS:
        raise _entry_error(path, name, f"shape: at most {MAX_DIMENSIONS} dimensions are allowed, found {len(shape)}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not are_sizes(offsets):
        raise _entry_error(path, name, f"data_offsets: expected two offsets >= 0, found {excerpt(offsets)}")
    begin, end = offsets
    item_bytes = known[dtype].itemsize
    expected = prod(shape) * item_bytes
    if end - begin != expected:
        held = f"data_offsets [{begin}, {end}] hold {end - begin} bytes"
        needed = expected if expected < _INT64_END else "2**63 or more"
        raise _entry_error(path, name, f"{held}, but dtype {dtype} and shape {excerpt(shape)} need {needed}")
    # A size of 0 hides an overflow from the check above, but not from whoever multiplies in another order.
    if not expected and prod(size for size in shape if size) * item_bytes >= _INT64_END:
        raise _entry_error(path, name, f"shape: the sizes of {excerpt(shape)} overflow 64 bits")
    return TensorEntry(name, number, known[dtype], tuple(shape), data_start + begin, data_start + end)


def _entry_error(path: str, name: str, text: str) -> CheckpointError:
    return CheckpointError(f"{path}: tensor {excerpt(name)}: {text}.")


def _check_coverage(path: str, data_start: int, size_bytes: int, entries: Iterable[TensorEntry]) -> None:
    """Check that the tensors cover the data from end to end: no hole, no overlap, nothing past the file's end."""
    covered = data_start
    for entry in sorted(entries, key=lambda entry: (entry.start, entry.stop)):
        if entry.start != covered:
            fault = "overlaps the tensor before it" if entry.start < covered else "leaves a hole before it"
            begin, expected = entry.start - data_start, covered - data_start
            text = f"data_offsets: expected to begin at {expected}, found {begin}, which {fault}"
            raise _entry_error(path, entry.name, text)
        covered = entry.stop
    if covered != size_bytes:
        fault = "is truncated" if covered > size_bytes else "has bytes that belong to no tensor"
        raise CheckpointError(
            f"{path}: the tensors end at byte {covered}, but the file has {size_bytes} bytes: it {fault}. "
            "Download or save it again."
        )


@dataclass(frozen=True)
class NotedShard:
    """The contents that transformers would write into the file `name`: lazy `tensors`, and `metadata` for its header.

    For those in `packed`, the lazy tensor is the flat bytes of a tensor with the dtype and shape of the entry.
    """

    name: str
    tensors: Mapping[str, torch.Tensor]
    metadata: Mapping[str, str]
    packed: Mapping[str, TensorEntry] = field(default_factory=dict)


@dataclass(frozen=True)
class ShardToWrite:
    """A safetensors file of `size_bytes`: first bytes (`header`), each tensor's start, in file order, and elements."""

    name: str
    header: bytes
    starts: Mapping[str, int]
    views: Mapping[str, View]
    size_bytes: int


def lay_out_shard(noted: NotedShard) -> ShardToWrite:
    """A file with the header that ``safetensors.torch.save_file`` would write, from names, dtypes and shapes alone."""
    import torch
    from safetensors.torch import save

    from .lazy import LazyTensor

    # The library writes a header for tensors without elements; sizes and offsets are then filled in.
    as_written: dict[str, TensorEntry | torch.Tensor] = {**noted.tensors, **noted.packed}
    empty = {each.dtype: torch.empty(0, dtype=each.dtype) for each in as_written.values()}
    without_elements = save(
        {name: empty[each.dtype] for name, each in as_written.items()}, dict(noted.metadata) or None
    )
    fields = json.loads(without_elements[8:])
    starts: dict[str, int] = {}
    views: dict[str, View] = {}
    stop = 0
    for name, described in fields.items():
        if name == "__metadata__":
            continue
        tensor = noted.tensors[name]
        views[name] = tensor.view_of_node if isinstance(tensor, LazyTensor) else View.whole(HostTensor.of(tensor))
        starts[name] = stop
        stop += tensor.nbytes
        described["shape"], described["data_offsets"] = list(as_written[name].shape), [starts[name], stop]
    text = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8
    header = len(text).to_bytes(8, "little") + text
    starts = {name: len(header) + start for name, start in starts.items()}
    return ShardToWrite(noted.name, header, starts, views, len(header) + stop)
