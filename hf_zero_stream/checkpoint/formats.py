"""The formats of files, by the ends of their names, and of folders, by what is in them; maps made of their headers.

Plug-ins bring formats; this package's own are safetensors, and a training state.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from ..errors import ReadError, UnsupportedError
from ..registry import (
    DISTRIBUTED_ENDING,
    METADATA,
    TORCH_ENDINGS,
    FileFormat,
    FolderFormat,
    import_named,
    import_object,
    missing_plugin_error,
    plugins,
)
from ..sources.base import ByteSource
from ..sources.local import LocalFiles
from .deepspeed_names import zero_folder_of
from .format import NotAMap, ShardHeader
from .index import TORCH_SINGLE, has_weights, shards_of
from .map import CheckpointMap


def distributed_file(folder: Path) -> Path | None:
    """The metadata file of the distributed checkpoint in a folder; None if there is none, or files that go first."""
    return folder / METADATA if os.path.lexists(folder / METADATA) and not has_weights(folder) else None


UNFINISHED = ".hf_zero_stream-saving-"
"""Prefix of the names of folders in which a save writes files before they get their final names."""


def has_unfinished(folder: Path) -> bool:
    """Whether a save into `folder` has died, or goes on; a ReadError if it cannot be looked at."""
    try:
        return folder.is_dir() and next(folder.glob(f"{UNFINISHED}*"), None) is not None
    except OSError as error:
        raise ReadError(f"{folder}: cannot be listed: {error.strerror or error}. Mend its disk.") from error


class Format(Protocol):
    """Finds the tensors in files; a module can be one.

    For each file one rank calls :meth:`read_header`, and then every rank :meth:`parse_header` with what it read.
    """

    def read_header(self, source: ByteSource, path: str) -> ShardHeader:
        """Read the header, which describes the tensors in a file; the cost is bounded for any file.

        Raises:
            ReadError: the file is missing or cannot be read; its cause is the source's error.
            CheckpointError: it is no regular file, or cannot be of this format.
        """

    def parse_header(self, path: str, number: int, header: ShardHeader) -> CheckpointMap:
        """Check a header, which is untrusted, in time linear in its length; a CheckpointError names file and field.

        `path` is where this rank sees the file; `number` is that of its first shard, for the entries.
        """


SAFETENSORS = FileFormat("safetensors", (".safetensors",), ".checkpoint.safetensors")


def _formats() -> Iterator[FileFormat]:
    yield SAFETENSORS  # few checkpoints need another
    yield from (row for plugin in plugins() for row in plugin.files)


def format_of_file(path: str) -> FileFormat:
    """The format of a file, by the end of its name; safetensors if no format has such names.

    Raises:
        MissingPluginError: the plug-in of ours that reads it is not there.
    """
    found = next((row for row in _formats() if path.endswith(row.endings)), None)
    if found is None and path.endswith((*TORCH_ENDINGS, f"/{METADATA}")):
        raise missing_plugin_error("pickled", path)
    return found or SAFETENSORS


def is_always_map(path: str) -> bool:
    """Whether any sound file of this name can be read as a map."""
    return any(path.endswith(row.endings) for row in _formats() if row.is_always_map)


def holds_values(name: str) -> bool:
    """Whether a file of this name holds tensors, in any format, whether or not it can be read."""
    of_rows = any(name.endswith(row.endings) for row in _formats() if row.holds_values)
    return of_rows or name.endswith((*TORCH_ENDINGS, DISTRIBUTED_ENDING))


def not_a_map_reason(source: ByteSource, paths: Sequence[str]) -> str:
    """The reason why files that transformers would unpickle are no maps of bytes; ``""`` if they are."""
    row = format_of_file(paths[0])
    if row is SAFETENSORS:  # whatever has another name is unpickled too
        row = format_of_file(TORCH_SINGLE)
    return import_named(row.module).not_a_map_reason(source, paths)


def read_header(source: ByteSource, path: str) -> ShardHeader:
    """See :meth:`Format.read_header`."""
    return import_named(format_of_file(path).module).read_header(source, path)


def parse_header(path: str, number: int, header: ShardHeader) -> CheckpointMap:
    """See :meth:`Format.parse_header`."""
    return import_named(format_of_file(path).module).parse_header(path, number, header)


def read_map(paths: Sequence[str | os.PathLike[str]], weight_map: Mapping[str, str] | None = None) -> CheckpointMap:
    """Read and check the headers of files of this host.

    Raises:
        ReadError: a file is missing or cannot be read.
        CheckpointError: a header is not valid, or two shards hold a tensor and `weight_map` names neither for it.
        NotAMap: a file of ``torch.save`` holds something else than tensors.
    """
    source = LocalFiles()
    headers = [read_header(source, os.fspath(path)) for path in paths]
    return map_from_headers(paths, headers, weight_map)


def map_from_headers(
    paths: Sequence[str | os.PathLike[str]],
    headers: Sequence[ShardHeader],
    weight_map: Mapping[str, str] | None = None,
    first_shard: int = 0,
    *,
    parse: Callable[[str, int, ShardHeader], CheckpointMap] = parse_header,
) -> CheckpointMap:
    """Check `headers`, which some rank read, of the files that this rank sees at `paths`, and map the files.

    `weight_map` is that of ``model.safetensors.index.json``: a tensor's name -> its shard's name. Shards are numbered
    from `first_shard` on.
    """
    names = [os.fspath(path) for path in paths]
    parts: list[CheckpointMap] = []
    for path, header in zip(names, headers, strict=True):
        parts.append(parse(path, first_shard, header))
        first_shard += len(parts[-1].shards)
    return CheckpointMap.joined(names, parts, weight_map or {})


_STATE = FolderFormat(
    "training state", ".checkpoint.state_folder:state_folder_of", ".checkpoint.state_folder:read_state"
)


def folder_format(path: str | os.PathLike[str]) -> tuple[FolderFormat, Path] | None:
    """The format of a folder that goes before formats of files, and the path that it is read by; None if it has none.

    Formats of files are those that transformers loads. Raises a MissingPluginError if the plug-in of ours that reads
    the folder is not there.
    """
    path = Path(path)
    for row in (*(row for plugin in plugins() for row in plugin.folders), _STATE):
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
        return import_object(row.read)(place)
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
