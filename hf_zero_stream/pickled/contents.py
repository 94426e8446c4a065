"""What a folder holds: its tensors as views of byte ranges of its files, whatever the format.

To add a format of folders, write a module that gives the :class:`..checkpoint.map.CheckpointMap` of one, and a row
here. To add one of files, see :mod:`..checkpoint.formats`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ..checkpoint.format import NotAMap
from ..checkpoint.formats import distributed_file, read_map, row_of
from ..checkpoint.map import CheckpointMap
from ..checkpoint.soundness import Soundness, check_soundness, shards_of
from ..checkpoint.state_folder import is_state, read_state
from ..errors import CheckpointError, ReadError, UnsupportedError
from .zero_folder import map_of_zero, zero_folder_of


class Row(NamedTuple):
    """A format of folders: its name; the place that :attr:`read` takes, if a folder is of this format; its reader."""

    name: str
    find: Callable[[Path], Path | None]
    read: Callable[[Path], CheckpointMap]


FOLDERS = (
    Row("ZeRO", zero_folder_of, map_of_zero),
    Row("training state", lambda path: path if is_state(path) else None, read_state),
    Row("torch.distributed.checkpoint", distributed_file, lambda path: read_map([path])),
)
"""What goes first; what is none of these has files that transformers loads."""


def _found(path: str | os.PathLike[str]) -> tuple[Row, Path] | None:
    places = ((row, row.find(Path(path))) for row in FOLDERS)
    return next(((row, place) for row, place in places if place is not None), None)


def contents_of(path: str | os.PathLike[str]) -> CheckpointMap:
    """The contents of a checkpoint: a folder or a single file of this host, whose headers are read.

    If a folder has several kinds of files, those count that transformers would load: safetensors go first. If it has
    none of these, a ZeRO checkpoint of DeepSpeed counts, or the folder of its tag; its tensors are the fp32 values.
    Those of a training state of ours are too, if `path` is the folder of its tag.

    Raises:
        ReadError: a file is missing or cannot be read.
        CheckpointError: the checkpoint is not sound.
        UnsupportedError: its tensors are no ranges of bytes.
    """
    if (found := _found(path)) is not None:
        row, place = found
        return row.read(place)
    try:
        return read_map(*shards_of(path))
    except NotAMap as reason:
        raise UnsupportedError(
            f"{reason}. So it is no map of bytes, and only running its pickle could say what is in it. Load the "
            "checkpoint with from_pretrained, and save that as safetensors."
        ) from reason


def format_of(path: str | os.PathLike[str]) -> str:
    """The :attr:`..checkpoint.map.CheckpointMap.format` of a checkpoint, by the names of its files.

    Raises:
        CheckpointError: a folder holds none, or its index is not sound.
    """
    found = _found(path)
    return row_of(shards_of(path)[0][0]).name if found is None else found[0].name


def soundness_of(path: str | os.PathLike[str]) -> Soundness:
    """As :func:`..checkpoint.soundness.check_soundness`, whatever the format.

    In a ZeRO or distributed checkpoint, or a training state, it finds only the first fault, because no file says what
    is in another.
    """
    folder = Path(path)
    if _found(folder) is None:
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
