"""``torch.distributed.checkpoint.metadata.Metadata``, from its pickle that was read and not run.

The classes are dataclasses; their pickles hold the fields by name. See :mod:`.pickles` for what stands for objects.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ...errors import CheckpointError, UnsupportedError
from ...plugin_api import MAX_DIMENSIONS, are_sizes, dtypes, excerpt
from .pickles import Call, Global, Pickle, object_kind


_METADATA = "torch.distributed.checkpoint.metadata"
_LAYOUT = Global("torch.serialization", "_get_layout")
_ENCODING = Global(_METADATA, "_MEM_FORMAT_ENCODING")
_FIELDS = {
    Global(_METADATA, "Metadata"): {"state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"},
    Global(_METADATA, "TensorStorageMetadata"): {"properties", "size", "chunks"},
    Global(_METADATA, "ChunkStorageMetadata"): {"offsets", "sizes"},
    Global(_METADATA, "MetadataIndex"): {"fqn", "offset", "index"},
    Global(_METADATA, "StorageMeta"): {"checkpoint_id", "save_id", "load_id", "modules"},
    Global("torch.distributed.checkpoint.filesystem", "_StorageInfo"): {
        *("relative_path", "offset", "length", "transform_descriptors")
    },
}
"""The dataclasses, and their fields."""
_MOST_PARTS = 256
"""Most parts of the path in a StorageMeta."""
_SIZE = Global("torch", "Size")
_DTYPES = {Global("torch", str(dtype).removeprefix("torch.")): dtype for dtype in dtypes().values()}


OPCODES = {
    *("PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINGET", "LONG_BINGET", "NONE", "NEWTRUE", "NEWFALSE"),
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE"),
    *("EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
    *("STACK_GLOBAL", "NEWOBJ", "REDUCE", "BUILD", "APPEND", "APPENDS", "SETITEM", "SETITEMS"),
}
"""The opcodes with which Python writes such objects since version 3.8."""


class CheckpointBox(NamedTuple):
    """A box of a tensor: its first index in each dimension, and how many there are."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def with_range(self, dim: int, begin: int, end: int) -> CheckpointBox:
        """This box with indices ``[begin, end)`` along `dim`."""
        offsets, sizes = list(self.offsets), list(self.sizes)
        offsets[dim], sizes[dim] = begin, end - begin
        return CheckpointBox(tuple(offsets), tuple(sizes))


class StoredBytes(NamedTuple):
    """A tensor, and the boxes of it that were written."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[CheckpointBox, ...]


class MetadataItem(NamedTuple):
    """`length` bytes of a file from `offset` on; `transforms` names what was done to them, mostly nothing."""

    file: str
    offset: int
    length: int
    transforms: str


@dataclass(frozen=True)
class Metadata:
    """The contents of a distributed checkpoint.

    Attributes:
        tensors: by key.
        others: keys of everything else.
        key_paths: key -> the keys of the nested dicts and lists that lead to it.
        items: (key, offsets of a chunk) -> where it is.
    """

    tensors: Mapping[str, StoredBytes]
    others: tuple[str, ...]
    key_paths: Mapping[str, tuple[str | int, ...]]
    items: Mapping[tuple[str, tuple[int, ...]], MetadataItem]


def metadata_of(path: str, pickle: Pickle) -> Metadata:
    """The metadata at `path`, from its pickle.

    Raises:
        CheckpointError: it is another object, or a field is not what torch writes.
        UnsupportedError: a tensor is of a layout or dtype that is not streamed.
    """
    if pickle.persistents:
        raise CheckpointError(f"{path}: expected a pickle that is whole; it refers to other objects.")
    for call in pickle.calls:
        _check_call(path, call)
    fields = _fields(path, pickle.root, "Metadata")
    tensors: dict[str, StoredBytes] = {}
    others: list[str] = []
    for key, value in _dict(path, fields, "state_dict_metadata").items():
        if not isinstance(key, str):
            raise _faulty(path, "state_dict_metadata", "keys that are strings", key)
        if isinstance(value, Call) and value.function == Global(_METADATA, "BytesStorageMetadata"):
            others.append(key)
        else:
            tensors[key] = _stored(path, key, value)
    items: dict[tuple[str, tuple[int, ...]], MetadataItem] = {}
    for index, value in _dict(path, fields, "storage_data").items():
        place = _fields(path, index, "MetadataIndex")
        key, offset = place.get("fqn"), place.get("offset")
        if not isinstance(key, str):
            raise _faulty(path, "storage_data", "a key that is a string", key)
        if offset is None:
            continue  # of something else than a tensor
        at = (key, _sizes(path, key, offset))
        if at in items:
            raise CheckpointError(f"{path}: tensor {excerpt(key)}: its chunk at {list(at[1])} is there twice.")
        items[at] = _item(path, key, value)
    key_paths = fields.get("planner_data") or {}
    return Metadata(tensors, tuple(others), _key_paths(path, key_paths), items)


def _check_call(path: str, call: Call) -> None:
    """Refuse a call that torch does not make in every such file, also where nothing of ours comes of it."""
    sound = False
    if not call.entries and not call.members:
        match call:
            case Call(function=Global() as function, arguments=(), state=dict() as state):
                sound = function in _FIELDS and state.keys() <= _FIELDS[function]
            case Call(function=Global(module, "BytesStorageMetadata"), arguments=(), state=None):
                sound = module == _METADATA
            case Call(function=Global(module, "TensorProperties"), arguments=(), state=(_, _, _, Call(), _, *later)):
                # torch 2.15 has added strides, of what was saved: in files all is contiguous
                sound = module == _METADATA and call.state[3].function == _ENCODING
                sound = sound and (later in ([], [None]) or (len(later) == 1 and _is_tuple_of_sizes(later[0])))
            case Call(function=function, arguments=(tuple() as sizes,), state=None) if function == _SIZE:
                sound = are_sizes(sizes)
            case Call(function=function, arguments=("torch.strided",), state=None):
                sound = function == _LAYOUT
            case Call(function=function, arguments=(int() as number,), state=None) if function == _ENCODING:
                sound = number in (0, 1, 2)
            case Call(function=Global("pathlib", "PosixPath"), arguments=parts, state=None):
                sound = len(parts) <= _MOST_PARTS and all(isinstance(part, str) for part in parts)
    if not sound:
        raise CheckpointError(
            f"{path}: it makes something else than torch.distributed.checkpoint does ({object_kind(call)})."
        )


def _stored(path: str, key: str, value: Any) -> StoredBytes:
    fields = _fields(path, value, "TensorStorageMetadata")
    shape = _sizes(path, key, fields.get("size"))
    properties = fields.get("properties")
    state = getattr(properties, "state", None)
    if getattr(properties, "function", None) != Global(_METADATA, "TensorProperties") or not isinstance(state, tuple):
        raise _faulty(path, key, "properties of a tensor", properties)
    match state:
        case (Global() as dtype, Call(function=layout, arguments=("torch.strided",)), *_):
            if dtype not in _DTYPES or layout != _LAYOUT:
                raise UnsupportedError(f"{path}: tensor {excerpt(key)} is of {dtype}, which is not streamed.")
        case _:
            raise UnsupportedError(f"{path}: tensor {excerpt(key)} is no plain tensor, and is not streamed.")
    chunks = fields.get("chunks")
    if not isinstance(chunks, list):
        raise _faulty(path, key, "a list of chunks", chunks)
    boxes = []
    for chunk in chunks:
        of_chunk = _fields(path, chunk, "ChunkStorageMetadata")
        box = CheckpointBox(_sizes(path, key, of_chunk.get("offsets")), _sizes(path, key, of_chunk.get("sizes")))
        if not len(box.offsets) == len(box.sizes) == len(shape) or any(
            offset + size > end for offset, size, end in zip(box.offsets, box.sizes, shape, strict=True)
        ):
            raise CheckpointError(
                f"{path}: tensor {excerpt(key)}: expected a chunk inside its shape {list(shape)}; found one at "
                f"{list(box.offsets)} of {list(box.sizes)}."
            )
        boxes.append(box)
    return StoredBytes(_DTYPES[dtype], shape, tuple(boxes))


def _item(path: str, key: str, value: Any) -> MetadataItem:
    state = _fields(path, value, "_StorageInfo")
    file, offset, length = (state.get(name) for name in ("relative_path", "offset", "length"))
    if not (isinstance(file, str) and isinstance(offset, int) and isinstance(length, int)) or min(offset, length) < 0:
        raise _faulty(path, key, "a file's name, an offset and a length", value)
    transforms = state.get("transform_descriptors") or []
    if not isinstance(transforms, list):
        raise _faulty(path, key, "a list of what was done to the bytes", transforms)
    return MetadataItem(file, offset, length, ", ".join(map(object_kind, transforms)))


def _key_paths(path: str, key_paths: Any) -> dict[str, tuple[str | int, ...]]:
    """Return the key paths of a planner that flattens nested dicts; another one's are of no use."""
    if not isinstance(key_paths, dict):
        return {}
    for key, key_path in key_paths.items():
        if not isinstance(key, str) or not isinstance(key_path, tuple) or not key_path:
            raise _faulty(path, "planner_data", "the keys that lead to a tensor", key_path)
        if not all(isinstance(part, (str, int)) for part in key_path):
            raise _faulty(path, "planner_data", "the keys that lead to a tensor", key_path)
    return key_paths


def _fields(path: str, value: Any, name: str) -> dict[str, Any]:
    """The fields of a dataclass of this name."""
    match value:
        case Call(function=Global(_, found), state=dict() as state) if found == name and value.function in _FIELDS:
            return state
    raise CheckpointError(f"{path}: expected a {name} of torch.distributed.checkpoint; found {object_kind(value)}.")


def _dict(path: str, fields: Mapping[str, Any], name: str) -> dict[Any, Any]:
    value = fields.get(name)
    if not isinstance(value, dict):
        raise _faulty(path, name, "a dict", value)
    return value


def _sizes(path: str, key: str, value: Any) -> tuple[int, ...]:
    match value:
        case Call(function=function, arguments=(sizes,)) if function == _SIZE and _is_tuple_of_sizes(sizes):
            found: tuple[int, ...] = sizes
            return found
    raise _faulty(path, key, f"at most {MAX_DIMENSIONS} sizes", value)


def _is_tuple_of_sizes(value: Any) -> bool:
    return isinstance(value, tuple) and are_sizes(value)


def _faulty(path: str, what: str, expected: str, found: Any) -> CheckpointError:
    return CheckpointError(f"{path}: {excerpt(what)}: expected {expected}; found {object_kind(found)}.")
