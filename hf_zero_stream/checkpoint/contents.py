"""What a folder holds: its tensors as views of byte ranges of its files, whatever the format.

To add a format of folders, write a function that returns :class:`Contents`, and call it in :func:`contents_of`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError, ReadError, UnsupportedError
from ..sources.local import LocalFiles
from . import distcp
from .format import Shard
from .index import CheckpointIndex, view_of
from .kinds import has_weights, is_distributed
from .nodes import View
from .soundness import Soundness, check_soundness, shards_of
from .state_folder import is_state, read_state
from .torch_files import NotAMap
from .untrusted_json import excerpt
from .zero_folder import is_zero_folder, read_zero_folder


@dataclass(frozen=True)
class Contents:
    """The tensors of a checkpoint, none of them read.

    Attributes:
        format: "safetensors", "torch.save", "torch.distributed.checkpoint", "ZeRO", "training state".
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

    @property
    def is_of_training(self) -> bool:
        """Whether the tensors are the fp32 values that an optimizer trains, under the names of its model."""
        return self.format in ("ZeRO", "training state")


def contents_of(path: str | os.PathLike[str]) -> Contents:
    """The contents of a checkpoint: a folder or a single file of this host, whose headers are read.

    If a folder has several kinds of files, those count that transformers would load: safetensors go first. If it has
    none of these, a ZeRO checkpoint of DeepSpeed counts, or the folder of its tag; its tensors are the fp32 values.
    Those of a training state of ours are too, if `path` is the folder of its tag.

    Raises:
        ReadError: a file is missing or cannot be read.
        CheckpointError: the checkpoint is not sound, or lacks a tensor that its index promises.
        UnsupportedError: its tensors are no ranges of bytes.
    """
    if (zero := zero_folder_of(Path(path))) is not None:
        return _contents_of_zero(zero)
    if is_state(path):
        state = read_state(path)
        return Contents("training state", state.shards, state.views, state.notes, {"format": "pt"})
    if is_distributed(path):
        found = distcp.parse_map(os.fspath(path), distcp.read_map(LocalFiles(), os.fspath(path)))
        return Contents("torch.distributed.checkpoint", found.shards, found.views, found.notes, {"format": "pt"})
    files, weight_map = shards_of(path)
    try:
        index = CheckpointIndex.from_files(files, weight_map)
    except NotAMap as reason:
        raise UnsupportedError(
            f"{reason}. So its tensors are no plain ranges of bytes. Load the checkpoint with from_pretrained, and "
            "save that as safetensors."
        ) from reason
    index.refuse_absent(index.absent)  # who copies the others would not even say that they are lost
    views = {name: view_of(entry) for name, entry in index.tensors.items()}
    format_name = _format_of_files(files)
    metadata = index.shards[0].metadata if index.shards and format_name == "safetensors" else {"format": "pt"}
    return Contents(format_name, index.shards, views, index.notes, metadata)


def format_of(path: str | os.PathLike[str]) -> str:
    """The :attr:`Contents.format` of a checkpoint, by the names of its files.

    Raises:
        CheckpointError: a folder holds none, or its index is not sound.
    """
    if zero_folder_of(Path(path)) is not None:
        return "ZeRO"
    if is_state(path):
        return "training state"
    if is_distributed(path):
        return "torch.distributed.checkpoint"
    return _format_of_files(shards_of(path)[0])


def _format_of_files(files: Sequence[str]) -> str:
    return "torch.save" if any(file.endswith((".bin", ".pt", ".pth")) for file in files) else "safetensors"


def zero_folder_of(path: Path) -> Path | None:
    """The folder of the ZeRO checkpoint in `path`, or `path` itself; None if it is or holds another kind."""
    if not path.is_dir() or has_weights(path):
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


def soundness_of(path: str | os.PathLike[str]) -> Soundness:
    """As :func:`.soundness.check_soundness`, whatever the format.

    In a ZeRO or distributed checkpoint, or a training state, it finds only the first fault, because no file says what
    is in another.
    """
    folder = Path(path)
    zero = zero_folder_of(folder)
    if zero is None and not is_state(folder) and not is_distributed(folder):
        return check_soundness(folder)
    found = Soundness()
    try:
        contents = contents_of(folder)
    except (ReadError, CheckpointError) as error:
        found.fault(folder.name, "unreadable" if isinstance(error, ReadError) else "map", str(error))
        return found
    found.shards = [os.path.relpath(shard.path, folder) for shard in contents.shards]
    found.tensors, found.notes = len(contents.views), list(contents.notes)
    found.nbytes = sum(shard.size_bytes for shard in contents.shards)
    return found
