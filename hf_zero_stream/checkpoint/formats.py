"""The formats of files and what a folder holds, by the names of files; maps made of headers, whatever the format.

``model.safetensors.index.json`` says which shard holds which tensor. It is a JSON object with the fields
``weight_map`` (a tensor's name -> a shard's name, relative to the checkpoint's folder) and ``metadata`` (an object).
It is untrusted: transformers opens the files that it names, as we do, so that these must be files of the checkpoint.
docs/sources.md has the rules.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from ..dtypes import dtype_name, is_dtype_name
from ..errors import CheckpointError, ReadError
from ..registry import (
    DISTRIBUTED_ENDING,
    METADATA,
    TORCH_ENDINGS,
    FileFormat,
    import_named,
    missing_plugin_error,
    plugins,
)
from ..sources.base import ByteSource, as_read_error
from ..sources.local import LocalFiles, open_nonblocking, status_of_regular
from .format import ShardHeader, excerpt, parse_object
from .map import CheckpointMap


SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
TORCH_SINGLE = "pytorch_model.bin"
TORCH_INDEX = "pytorch_model.bin.index.json"
WEIGHTS = ((SINGLE, INDEX), (TORCH_SINGLE, TORCH_INDEX))
"""The file of the weights, or the index that names their files; transformers takes the first that is there."""


def distributed_file(folder: Path) -> Path | None:
    """The metadata file of the distributed checkpoint in a folder; None if there is none, or files that go first."""
    return folder / METADATA if os.path.lexists(folder / METADATA) and not has_weights(folder) else None


def has_weights(folder: Path) -> bool:
    """Whether `folder` has files that transformers would load."""
    return any(os.path.lexists(folder / name) for names in WEIGHTS for name in names)


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


def _module_of(row: FileFormat) -> Any:
    return import_named(row.module)


def not_a_map_reason(source: ByteSource, paths: Sequence[str]) -> str:
    """The reason why files that transformers would unpickle are no maps of bytes; ``""`` if they are."""
    row = format_of_file(paths[0])
    if row is SAFETENSORS:  # whatever has another name is unpickled too
        row = format_of_file(TORCH_SINGLE)
    reason: str = _module_of(row).not_a_map_reason(source, paths)
    return reason


def read_header(source: ByteSource, path: str) -> ShardHeader:
    """See :meth:`Format.read_header`."""
    return _module_of(format_of_file(path)).read_header(source, path)


def parse_header(path: str, number: int, header: ShardHeader) -> CheckpointMap:
    """See :meth:`Format.parse_header`."""
    return _module_of(format_of_file(path)).parse_header(path, number, header)


def read_map(
    paths: Sequence[str | os.PathLike[str]],
    weight_map: Mapping[str, str] | None = None,
    first_shard: int = 0,
) -> CheckpointMap:
    """Read and check the headers of files of this host.

    Raises:
        ReadError: a file is missing or cannot be read.
        CheckpointError: a header is not valid, or two shards hold a tensor and `weight_map` names neither for it.
        NotAMap: a file of ``torch.save`` holds something else than tensors.
    """
    source = LocalFiles()
    headers = [read_header(source, os.fspath(path)) for path in paths]
    return map_from_headers(paths, headers, weight_map, first_shard)


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


MAX_INDEX_BYTES = 100_000_000
"""The same limit as for a header; the index of a checkpoint with 90,000 tensors has 8 MB."""

MAX_FILE_NAME_LENGTH = 1024
"""Characters of a shard's name, folders included."""


def read_index_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read and check the index at `path`; raises as :func:`read_index_text` and :func:`parse_index` do."""
    return parse_index(os.fspath(path), read_index_text(path))


def read_index_text(path: str | os.PathLike[str]) -> bytes:
    """The unchecked text of the index at `path`; a ReadError; or a CheckpointError: too long, or no regular file."""
    name = os.fspath(path)
    with as_read_error(name, "the checkpoint's index"), open(name, "rb", opener=open_nonblocking) as file:
        status_of_regular(name, file.fileno())
        text = file.read(MAX_INDEX_BYTES + 1)
    if len(text) > MAX_INDEX_BYTES:
        raise CheckpointError(f"{name}: at most {MAX_INDEX_BYTES} bytes are allowed for an index.")
    return text


def parse_index(path: str, text: bytes) -> dict[str, Any]:
    """The fields of the index `text`, which was read from `path`; a CheckpointError names its first fault."""
    fields = parse_object(text, path)
    for fault in faults_of_index(path, fields):
        raise CheckpointError(f"{path}: {fault}")
    return fields


def faults_of_index(path: str, fields: Mapping[str, Any]) -> Iterator[str]:
    """Yield all faults of the fields of the index at `path`; each file's name counts once."""
    weight_map, metadata = fields.get("weight_map"), fields.get("metadata")
    if not isinstance(weight_map, dict) or not weight_map:
        yield f"weight_map: expected a map of tensors' names to files' names, found {excerpt(weight_map)}."
        return
    if not isinstance(metadata, dict):
        yield f"metadata: expected an object, found {excerpt(metadata)}."
    elif "dtype" in metadata and not _is_dtype(metadata["dtype"]):
        yield f"metadata: dtype: expected a dtype of torch, found {excerpt(metadata['dtype'])}."
    checked = set[str]()
    for tensor, file in weight_map.items():
        if not isinstance(file, str):
            yield f"weight_map: tensor {excerpt(tensor)}: expected a file's name, found {excerpt(file)}."
        elif file not in checked:
            checked.add(file)
            if fault := fault_of_name(path, file):
                name = excerpt(file)
                yield f"weight_map: the file's name {name} {fault}. Expected a file below the checkpoint's folder."


def fault_of_name(path: str, file: str) -> str:
    """The fault of a shard's name in the index at `path`; "" if it has none."""
    suffix = ".safetensors" if path.endswith(".safetensors.index.json") else ""
    if len(file) > MAX_FILE_NAME_LENGTH:
        return f"has more than {MAX_FILE_NAME_LENGTH} characters"
    if not file.isprintable():  # NUL, line ends, the escapes of terminals
        return "has characters that cannot be printed"
    if file.startswith("/"):
        return "is an absolute path"
    if any(part in ("", ".", "..") for part in file.split("/")):
        return "has '.', '..' or nothing between two slashes"
    if "\\" in file:
        return "has a backslash"
    if not file.endswith(suffix):
        return f"does not end in {suffix}"  # another suffix would make transformers unpickle it
    return ""


def _is_dtype(name: Any) -> bool:
    """Whether `name` is a torch dtype: transformers calls ``getattr(torch, metadata["dtype"])``."""
    return isinstance(name, str) and is_dtype_name(dtype_name(name))


def check_files(files: Iterable[str]) -> None:
    """Raise a CheckpointError if a file is, or links to, a folder, a pipe, a socket or a device; it need not exist.

    Check again when opening a file: a link can change in between.
    """
    for file in files:
        with suppress(OSError):  # missing, or a link that leads nowhere or in a circle: the read itself will raise
            status_of_regular(file)
