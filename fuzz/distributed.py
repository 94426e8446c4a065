"""What is called with every ``.metadata`` of torch.distributed.checkpoint that the fuzzer makes.

The files with the tensors are always the same. The reference is Python's own unpickler with torch's own classes, and
``torch.load(weights_only=True)`` for each piece.
"""

from __future__ import annotations

import atexit
import functools
import io
import pickle
import shutil
import tempfile
import warnings
from pathlib import Path, PosixPath
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.metadata as classes
from torch.distributed.checkpoint.filesystem import _StorageInfo

from hf_zero_stream.checkpoint.formats import METADATA
from hf_zero_stream.checkpoint.nodes import Cat, FileTensor, HostTensor, View
from hf_zero_stream.errors import CheckpointError, ReadError, UnsupportedError
from hf_zero_stream.plugins.pickled import distcp
from hf_zero_stream.sources.local import LocalFiles


__all__ = ["Disagreement", "read_distributed", "seeds"]

_NAMES = "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata MetadataIndex StorageMeta"
_CLASSES = [getattr(classes, name) for name in _NAMES.split()]
_CLASSES += [classes.TensorProperties, classes._MEM_FORMAT_ENCODING, _StorageInfo, torch.Size, PosixPath]
_ALLOWED = {(each.__module__, each.__name__): each for each in _CLASSES}
_ALLOWED["pathlib", "PosixPath"] = PosixPath
_ALLOWED["torch.serialization", "_get_layout"] = torch.serialization._get_layout


class Disagreement(AssertionError):
    """Our reading is not the reference's."""


class _Reference(pickle.Unpickler):
    """Makes what torch makes, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        raise pickle.UnpicklingError(f"{module}.{name}")


def _saved() -> dict[str, Any]:
    values = torch.arange(24, dtype=torch.float32)
    model = {"a": values.view(4, 6), "b": values[:3].bfloat16(), "c": torch.tensor(7), "t": values.view(6, 4).t()}
    return {"model": model, "step": 3, "optimizer": {"state": [values[:2]]}}


@functools.cache
def _folder() -> tuple[Path, bytes]:
    """A folder in memory, and its ``.metadata``; the first tensor is in two chunks."""
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    folder = Path(tempfile.mkdtemp(prefix="hf-zero-stream-fuzz-", dir=memory))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(_saved(), checkpoint_id=folder, no_dist=True)
    metadata = pickle.loads((folder / METADATA).read_bytes())
    first = next(index for index in metadata.storage_data if index.fqn == "model.a")
    info, halves = metadata.storage_data.pop(first), _saved()["model"]["a"].chunk(2)
    with open(folder / info.relative_path, "ab") as file:
        chunks = []
        for row, half in zip((0, 2), halves, strict=True):
            piece, start = io.BytesIO(), file.tell()
            torch.save(half.clone(), piece)
            file.write(piece.getvalue())
            offsets = torch.Size([row, 0])
            chunks.append(classes.ChunkStorageMetadata(offsets, half.shape))
            metadata.storage_data[classes.MetadataIndex("model.a", offsets)] = _StorageInfo(
                info.relative_path, start, file.tell() - start
            )
    metadata.state_dict_metadata["model.a"].chunks = chunks
    metadata.storage_meta = classes.StorageMeta(PosixPath("/x"))
    return folder, pickle.dumps(metadata)


def seeds() -> dict[str, bytes]:
    """A name -> a ``.metadata``, which the files of :func:`read_distributed` fit."""
    _, text = _folder()
    plain = pickle.loads(text)
    plain.planner_data, plain.storage_meta = None, None
    del plain.state_dict_metadata["model.a"], plain.state_dict_metadata["step"]
    hole = pickle.loads(text)
    del hole.state_dict_metadata["model.a"].chunks[0]
    no_chunks = pickle.loads(text)
    no_chunks.state_dict_metadata["model.a"].chunks.clear()
    found = {"nested": text, "plain": plain, "hole": hole, "no-chunks": no_chunks}
    pickled = {name: each if isinstance(each, bytes) else pickle.dumps(each) for name, each in found.items()}
    head, body = pickled["plain"][:3], pickled["plain"][11:]
    inside_a_name = body.index(b"torch.distributed") + 5
    return {**pickled, "across-a-frame": head + inside_a_name.to_bytes(8, "little") + body}


def read_distributed(text: bytes) -> str:
    """Read a folder with this ``.metadata`` with both; "same", or "refused".

    Raises:
        Disagreement: the reference refuses what we accept, or reads it otherwise.
    """
    folder, _ = _folder()
    path = folder / METADATA
    path.write_bytes(text)
    try:
        found = distcp.parse_header(str(path), 0, distcp.read_header(LocalFiles(), str(path)))
    except (CheckpointError, ReadError, UnsupportedError):
        return "refused"
    try:
        metadata = _Reference(io.BytesIO(text)).load()
        theirs = {key: value for key, value in metadata.state_dict_metadata.items() if _has_tensor(value)}
        values = {_name(metadata, key): _value(folder, metadata, key) for key in theirs if _is_of_model(metadata, key)}
    except Exception as error:
        raise Disagreement(f"we read what the reference refuses: {error!r}") from error
    if values.keys() != found.views.keys():
        raise Disagreement(f"we read {sorted(found.views)}, the reference {sorted(values)}")
    for name, expected in values.items():
        mine = _evaluated(found.views[name], found.shards)
        if mine.dtype != expected.dtype or mine.shape != expected.shape or _raw(mine) != _raw(expected):
            raise Disagreement(f"{name} has other values")
    return "same"


def _has_tensor(value: Any) -> bool:
    return isinstance(value, classes.TensorStorageMetadata)


def _way(metadata: Any, key: str) -> tuple[Any, ...]:
    return tuple((metadata.planner_data or {}).get(key, (key,)))


def _is_of_model(metadata: Any, key: str) -> bool:
    tensors = [each for each, value in metadata.state_dict_metadata.items() if _has_tensor(value)]
    if any("model" in _way(metadata, each)[:-1] for each in tensors):
        return "model" in _way(metadata, key)[:-1]
    return len(_way(metadata, key)) == 1


def _name(metadata: Any, key: str) -> str:
    way = _way(metadata, key)
    return ".".join(map(str, way[way.index("model") + 1 :] if "model" in way[:-1] else way))


def _value(folder: Path, metadata: Any, key: str) -> torch.Tensor:
    stored = metadata.state_dict_metadata[key]
    value = torch.zeros(stored.size, dtype=stored.properties.dtype)
    for chunk in stored.chunks:
        if 0 in chunk.sizes:
            continue
        info = metadata.storage_data[classes.MetadataIndex(key, chunk.offsets)]
        data = (folder / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
        piece = torch.load(io.BytesIO(data), weights_only=True)
        for dim, (offset, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
            assert piece.shape[dim] == size and offset + size <= value.shape[dim]
        box = tuple(slice(offset, offset + size) for offset, size in zip(chunk.offsets, chunk.sizes, strict=True))
        value[box] = piece
    return value


def _evaluated(view: View, shards: Any) -> torch.Tensor:
    match view.node:
        case FileTensor(entry=entry):
            data = Path(shards[entry.shard].path).read_bytes()[entry.start : entry.stop]
            flat = torch.frombuffer(bytearray(data), dtype=entry.dtype)
        case Cat(dim=dim, pieces=pieces):
            flat = torch.cat([_evaluated(piece, shards) for piece in pieces], dim).contiguous().view(-1)
        case HostTensor(tensor=tensor):
            flat = tensor
        case _:
            raise TypeError(type(view.node).__name__)
    return flat.as_strided(view.sizes, view.strides, view.offset)


def _raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
