"""The contents of a folder in any format: its tensors as views of byte ranges of its files.

Plug-ins bring formats of folders and of files; this package's own are safetensors, and a training state.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from ..errors import UnsupportedError
from ..registry import FileFormat, FolderFormat, import_object, missing_plugin_error, plugins
from .deepspeed_names import zero_folder_of
from .format import NotAMap
from .formats import distributed_file, format_of_file, read_map
from .index import shards_of
from .map import CheckpointMap


_STATE = FolderFormat(
    "training state", ".checkpoint.state_folder:state_folder_of", ".checkpoint.state_folder:read_state"
)


def _folders() -> Iterator[FolderFormat]:
    """Yield the formats of folders that go before formats of files, which are those that transformers loads."""
    yield from (row for plugin in plugins() for row in plugin.folders)
    yield _STATE


def folder_format(path: str | os.PathLike[str]) -> tuple[FolderFormat, Path] | None:
    """The format of a folder that goes before formats of files, and the path that it is read by; None if it has none.

    Raises a MissingPluginError if the plug-in of ours that reads it is not there.
    """
    path = Path(path)
    for row in _folders():
        if (place := import_object(row.find)(path)) is not None:
            return row, place
    if zero_folder_of(path) or distributed_file(path):
        raise missing_plugin_error("pickled", os.fspath(path))
    return None


def contents_of(path: str | os.PathLike[str]) -> CheckpointMap:
    """The contents of a checkpoint: a folder or a single file of this host, whose headers are read.

    If a folder has several kinds of files, those count that transformers would load: safetensors go first. If it has
    none of these, a ZeRO checkpoint of DeepSpeed counts, or the folder of its tag; its tensors are the fp32 values.
    Those of a training state of ours are too, if `path` is the folder of its tag.

    Raises:
        ReadError: a file is missing or cannot be read.
        CheckpointError: the checkpoint is not sound.
        UnsupportedError: its tensors are no ranges of bytes.
        MissingPluginError: the plug-in of ours that reads it is not there.
    """
    if (found := folder_format(path)) is not None:
        row, place = found
        contents: CheckpointMap = import_object(row.read)(place)
        return contents
    try:
        return read_map(*shards_of(path))
    except NotAMap as reason:
        raise UnsupportedError(
            f"{reason}. So it is no map of bytes, and only running its pickle could say what is in it. Load the "
            "checkpoint with from_pretrained, and save that as safetensors."
        ) from reason


def format_of(path: str | os.PathLike[str]) -> FileFormat | FolderFormat:
    """The format of a checkpoint, by the names of its files.

    Raises:
        CheckpointError: a folder holds none, or its index is not sound.
        MissingPluginError: the plug-in of ours that reads it is not there.
    """
    found = folder_format(path)
    return format_of_file(shards_of(path)[0][0]) if found is None else found[0]
