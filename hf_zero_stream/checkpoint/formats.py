"""The formats of files and what a folder holds, by the names of files; maps made of headers, whatever the format."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from ..sources.base import ByteSource
from ..sources.local import LocalFiles
from .format import Format, ShardHeader
from .map import CheckpointMap


SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
TORCH_SINGLE = "pytorch_model.bin"
TORCH_INDEX = "pytorch_model.bin.index.json"
WEIGHTS = ((SINGLE, INDEX), (TORCH_SINGLE, TORCH_INDEX))
"""Where the weights are, or what names their files; transformers takes the first that is there."""

OF_TORCH = (".bin", ".pt", ".pth")
OF_VALUES = (".safetensors", *OF_TORCH, ".distcp")
"""What the names of files with tensors end in, in any format; of those in OF_TORCH ``torch.save`` wrote each."""

METADATA = ".metadata"
"""The file of torch.distributed.checkpoint that says what is in its others."""


def distributed_file(folder: Path) -> Path | None:
    """What describes the distributed checkpoint in a folder; None if there is none, or files that go first."""
    return folder / METADATA if os.path.lexists(folder / METADATA) and not has_weights(folder) else None


def has_weights(folder: Path) -> bool:
    """Whether it has files that transformers would load."""
    return any(os.path.lexists(folder / name) for names in WEIGHTS for name in names)


UNFINISHED = ".hf_zero_stream-saving-"
"""How the names begin of folders in which a save writes files before they get their final names."""


def has_unfinished(folder: Path) -> bool:
    """Whether a save into `folder` has died, or goes on."""
    return folder.is_dir() and next(folder.glob(f"{UNFINISHED}*"), None) is not None


class Row(NamedTuple):
    """A format: what its files' paths end in, and the module here that is a :class:`.format.Format`.

    `holds_values`: these files hold the tensors themselves; otherwise they say which other files do.
    `is_always_map`: its reader raises no :class:`.format.NotAMap`.
    """

    name: str
    endings: tuple[str, ...]
    module: str
    holds_values: bool = True
    is_always_map: bool = True


FORMATS = (
    Row("safetensors", (".safetensors",), "safetensors"),
    Row("torch.save", OF_TORCH, "torch_files", is_always_map=False),
    Row("torch.distributed.checkpoint", (f"/{METADATA}",), "distcp", holds_values=False),
)


def row_of(path: str) -> Row:
    """The row of a file; safetensors is that of any that is in none."""
    return next((row for row in FORMATS if path.endswith(row.endings)), FORMATS[0])


def is_always_map(path: str) -> bool:
    """Whether what is in a file of this name can be read as a map, if it is sound at all."""
    return any(path.endswith(row.endings) for row in FORMATS if row.is_always_map)


def _format_of(path: str) -> Format:
    module: Any = import_module(f".{row_of(path).module}", __package__)  # few checkpoints need another than the first
    return module


def read_header(source: ByteSource, path: str) -> ShardHeader:
    """See :meth:`.format.Format.read_header`."""
    return _format_of(path).read_header(source, path)


def parse_header(path: str, number: int, header: ShardHeader) -> CheckpointMap:
    """See :meth:`.format.Format.parse_header`."""
    return _format_of(path).parse_header(path, number, header)


def read_map(
    paths: Sequence[str | os.PathLike[str]], weight_map: Mapping[str, str] | None = None, first_shard: int = 0
) -> CheckpointMap:
    """Read and check the headers of files of this host.

    Raises:
        ReadError: a file is missing or cannot be read.
        CheckpointError: a header is not valid, or two shards hold a tensor and `weight_map` names neither for it.
        NotAMap: a file of ``torch.save`` holds something else than tensors.
    """
    source = LocalFiles()
    headers = [read_header(source, os.fspath(path)) for path in paths]
    return map_of(paths, headers, weight_map, first_shard)


def map_of(
    paths: Sequence[str | os.PathLike[str]],
    headers: Sequence[ShardHeader],
    weight_map: Mapping[str, str] | None = None,
    first_shard: int = 0,
    *,
    parse: Callable[[str, int, ShardHeader], CheckpointMap] = parse_header,
) -> CheckpointMap:
    """Check `headers`, which some rank read, of the files that this rank sees at `paths`; shards count from there.

    `weight_map` is that of ``model.safetensors.index.json``: a tensor's name -> its shard's name.
    """
    names = [os.fspath(path) for path in paths]
    parts: list[CheckpointMap] = []
    for path, header in zip(names, headers, strict=True):
        parts.append(parse(path, first_shard, header))
        first_shard += len(parts[-1].shards)
    return CheckpointMap.joined(names, parts, weight_map or {})
