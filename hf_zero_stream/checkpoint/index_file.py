"""``model.safetensors.index.json``: which shard holds which tensor; and where a checkpoint's files may lie.

A JSON object with the fields ``weight_map`` (a tensor's name -> a shard's name, relative to the checkpoint's folder)
and ``metadata`` (an object). It is untrusted: transformers opens the files that it names, as we do, so that these must
be files of the checkpoint. docs/sources.md has the rules.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch

from ..errors import CheckpointError, ReadError
from ..sources.local import open_nonblocking, status_of_regular
from .untrusted_json import excerpt, parse_object


MAX_INDEX_BYTES = 100_000_000
"""As for a header; the index of a checkpoint with 90,000 tensors has 8 MB."""

MAX_FILE_NAME_LENGTH = 1024
"""Characters of a shard's name, folders included."""


def read_index_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read and check the index at `path`; raises as :func:`read_index_text` and :func:`parse_index` do."""
    return parse_index(os.fspath(path), read_index_text(path))


def read_index_text(path: str | os.PathLike[str]) -> bytes:
    """The unchecked text of the index at `path`; a ReadError; or a CheckpointError: too long, or no regular file."""
    name = os.fspath(path)
    try:
        with open(name, "rb", opener=open_nonblocking) as file:
            status_of_regular(name, file.fileno())
            text = file.read(MAX_INDEX_BYTES + 1)
    except OSError as error:
        raise ReadError(
            f"{name}: cannot read the checkpoint's index: {error.strerror or error}. "
            "Check that the file exists on every node and may be read."
        ) from error
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
    """All that is wrong with the fields of the index at `path`; each file's name counts once."""
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
    """What is wrong with a shard's name in the index at `path`; "" if nothing is."""
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
    return isinstance(name, str) and isinstance(vars(torch).get(name.removeprefix("torch.")), torch.dtype)


def check_files(files: Iterable[str]) -> None:
    """Raise a CheckpointError if a file is, or links to, a folder, a pipe, a socket or a device; it need not exist.

    Check again when opening a file: a link can change in between.
    """
    for file in files:
        with suppress(OSError):  # missing, or a link that leads nowhere or in a circle: the read itself will raise
            status_of_regular(file)
