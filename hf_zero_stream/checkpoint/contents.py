"""What a folder holds: its tensors as views of byte ranges of its files, whatever the format.

To add a format of folders, write a function that returns :class:`Contents`, and call it in :func:`contents_of`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import UnsupportedError
from ..sources.local import LocalFiles
from . import distcp
from .format import Shard
from .index import CheckpointIndex, view_of
from .index_file import check_files, read_index_file
from .nodes import View
from .soundness import INDEX, SINGLE, shards_of
from .torch_files import NotAMap
from .untrusted_json import excerpt
from .zero_folder import is_zero_folder, read_zero_folder


__all__ = ["Contents", "contents_of", "is_distributed", "torch_files_of", "zero_folder_of"]

TORCH_SINGLE = "pytorch_model.bin"
TORCH_INDEX = "pytorch_model.bin.index.json"


@dataclass(frozen=True)
class Contents:
    """The tensors of a checkpoint, none of them read.

    Attributes:
        format: "safetensors", "torch.save", "torch.distributed.checkpoint", "ZeRO".
        shards: the files; an entry's ``shard`` counts in them.
        views: name -> its elements, in the tensor's own shape and dtype.
        notes: what is odd, and no fault.
        metadata: for the headers of safetensors files with these tensors.
    """

    format: str
    shards: tuple[Shard, ...]
    views: Mapping[str, View]
    notes: tuple[str, ...]
    metadata: Mapping[str, str]

    @property
    def has_names_of_model(self) -> bool:
        """Whether names and layouts are those of a model in training, and not of what ``save_pretrained`` writes."""
        return self.format == "torch.distributed.checkpoint"


def contents_of(path: str | os.PathLike[str]) -> Contents:
    """The contents of a checkpoint: a folder or a single file of this host, whose headers are read.

    Of a folder with both kinds, the files are those that transformers would load: safetensors go first. A ZeRO
    checkpoint of DeepSpeed, or the folder of its tag, counts where it holds neither; its tensors are the fp32 values.

    Raises:
        ReadError: a file is missing or cannot be read.
        CheckpointError: the checkpoint is not sound, or lacks a tensor that its index promises.
        UnsupportedError: its tensors are no ranges of bytes.
    """
    if (zero := zero_folder_of(Path(path))) is not None:
        return _contents_of_zero(zero)
    if is_distributed(path):
        found = distcp.parse_map(os.fspath(path), distcp.read_map(LocalFiles(), os.fspath(path)))
        return Contents("torch.distributed.checkpoint", found.shards, found.views, found.notes, {"format": "pt"})
    pickled = torch_files_of(Path(path))
    files, weight_map = pickled or shards_of(path)
    try:
        index = CheckpointIndex.from_files(files, weight_map)
    except NotAMap as reason:
        raise UnsupportedError(
            f"{reason}. So its tensors are no plain ranges of bytes. Load the checkpoint with from_pretrained, and "
            "save that as safetensors."
        ) from reason
    index.refuse_absent(index.absent)  # who copies the others would not even say that they are lost
    views = {name: view_of(entry) for name, entry in index.tensors.items()}
    metadata = {"format": "pt"} if pickled or not index.shards else index.shards[0].metadata
    return Contents("torch.save" if pickled else "safetensors", index.shards, views, index.notes, metadata)


def zero_folder_of(path: Path) -> Path | None:
    """The folder of the ZeRO checkpoint in `path`, or `path` itself; None if it is or holds another kind."""
    if not path.is_dir() or any(os.path.lexists(path / name) for name in (SINGLE, INDEX, TORCH_SINGLE, TORCH_INDEX)):
        return None
    if is_zero_folder(path):
        return path
    latest = path / "latest"
    name = latest.read_text(encoding="utf-8", errors="replace").strip() if latest.is_file() else ""
    is_name = bool(name) and Path(name).name == name and "\0" not in name
    return path / name if is_name and is_zero_folder(path / name) else None


def _contents_of_zero(folder: Path) -> Contents:
    zero = read_zero_folder(LocalFiles(), folder)
    if zero.lacking:
        raise UnsupportedError(
            f"{folder}: it has no values of {len(zero.lacking)} parameters, among them {excerpt(zero.lacking[0])}, "
            "which were neither trained nor frozen. Load the checkpoint into the training, and save the model."
        )
    views = {**zero.buffers(), **zero.frozen(), **zero.views()}
    views |= {alias: views[name] for alias, name in zero.shared.items()}
    return Contents("ZeRO", zero.shards, views, (), {"format": "pt"})


def is_distributed(folder: str | os.PathLike[str]) -> bool:
    """Whether what a folder holds is a distributed checkpoint; files that transformers would load go first."""
    others = (SINGLE, INDEX, TORCH_SINGLE, TORCH_INDEX)
    return distcp.is_folder(folder) and not any(os.path.lexists(Path(folder) / name) for name in others)


def torch_files_of(path: Path) -> tuple[list[str], dict[str, str] | None] | None:
    """(files of ``torch.save`` that a load would read, their index's weight map); None if it reads others.

    Raises:
        CheckpointError: the index is not sound, or one of them is no regular file.
    """
    if path.is_file():
        return ([str(path)], None) if path.suffix in (".bin", ".pt", ".pth") else None
    if os.path.lexists(path / SINGLE) or os.path.lexists(path / INDEX):
        return None
    weight_map: dict[str, str] | None = None
    if os.path.lexists(path / TORCH_SINGLE):
        names = [TORCH_SINGLE]
    elif os.path.lexists(path / TORCH_INDEX):
        weight_map = read_index_file(path / TORCH_INDEX)["weight_map"]
        names = sorted(set(weight_map.values()))
    else:
        return None
    files = [str(path / name) for name in names]
    check_files(files)
    return files, weight_map
