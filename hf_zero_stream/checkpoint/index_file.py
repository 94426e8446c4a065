"""``model.safetensors.index.json``: which shard holds which tensor; and where a checkpoint's files may lie.

A JSON object with the fields ``weight_map`` (a tensor's name -> a shard's name, relative to the checkpoint's folder)
and ``metadata`` (an object). It is untrusted: names in it are joined to the folder's path and opened, by transformers
as by us, so they may only lead to files of the checkpoint. docs/untrusted.md has the rules for readers.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import CheckpointError, ReadError
from ..sources.local import open_nonblocking, status_of_regular
from .untrusted_json import excerpt, parse_object


__all__ = ["MAX_INDEX_BYTES", "IndexFile", "check_files", "parse_index", "read_index_file"]

MAX_INDEX_BYTES = 100_000_000
"""Cap on the length of an index, as for a header; that of a checkpoint with 90,000 tensors has 8 MB."""

MAX_FILE_NAME_LENGTH = 1024
"""Characters of a shard's name, folders included."""


@dataclass(frozen=True, slots=True)
class IndexFile:
    """An index that has been checked.

    Attributes:
        path: where it lies for this rank.
        weight_map: a tensor's name -> its shard's name, relative to the checkpoint's folder.
        metadata: what else it says; only a ``"dtype"`` in it has been checked.
    """

    path: str
    weight_map: Mapping[str, str]
    metadata: Mapping[str, Any]

    @property
    def files(self) -> list[str]:
        """The shards' names, each once, sorted."""
        return sorted(set(self.weight_map.values()))


def read_index_file(path: str | os.PathLike[str]) -> IndexFile:
    """Read and check the index at `path`.

    Raises:
        ReadError: it is missing or cannot be read.
        CheckpointError: see :func:`parse_index`; or it is longer than :data:`MAX_INDEX_BYTES`, or no regular file.
    """
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
    return parse_index(name, text)


def parse_index(path: str, text: bytes) -> IndexFile:
    """Check the index `text`, which was read from `path`.

    Raises:
        CheckpointError: it is not a JSON object without repeated keys; ``weight_map`` is not a map of names to names,
            is empty, or names a file outside the folder; ``metadata`` is not an object, or its ``dtype`` no dtype.
    """
    fields = parse_object(text, path)
    weight_map, metadata = fields.get("weight_map"), fields.get("metadata")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{path}: weight_map: expected a map of tensors' names to files' names, found {excerpt(weight_map)}."
        )
    if not isinstance(metadata, dict):
        raise CheckpointError(f"{path}: metadata: expected an object, found {excerpt(metadata)}.")
    for name, file in weight_map.items():
        if not isinstance(file, str):
            raise CheckpointError(
                f"{path}: weight_map: tensor {excerpt(name)}: expected a file's name, found {excerpt(file)}."
            )
    suffix = ".safetensors" if path.endswith(".safetensors.index.json") else ""
    for file in set(weight_map.values()):
        fault = _fault_of_name(file, suffix)
        if fault:
            raise CheckpointError(
                f"{path}: weight_map: the file's name {excerpt(file)} {fault}. Expected a file below the "
                "checkpoint's folder."
            )
    _check_dtype(path, metadata)
    return IndexFile(path, weight_map, metadata)


def _fault_of_name(file: str, suffix: str) -> str:
    """What is wrong with a shard's name; "" if nothing is."""
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


def _check_dtype(path: str, metadata: Mapping[str, Any]) -> None:
    """transformers takes ``getattr(torch, metadata["dtype"])`` for the model's dtype, where nothing else says one."""
    if "dtype" not in metadata:
        return
    name = metadata["dtype"]
    found = vars(torch).get(name.removeprefix("torch.")) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"{path}: metadata: dtype: expected a dtype of torch, found {excerpt(name)}.")


def check_files(files: Iterable[str]) -> None:
    """Check that `files` are regular ones, or links that end at regular ones; they need not exist.

    Whoever opens them must look again: a link can be changed in between.

    Raises:
        CheckpointError: a file is, or leads to, a folder, a pipe, a socket or a device.
    """
    for file in files:
        try:
            mode = os.stat(file).st_mode
        except OSError:  # not there, or a link that leads nowhere or in a circle: reading it says so
            continue
        if not stat.S_ISREG(mode):
            link = f", to which it is a link: {os.path.realpath(file)}" if os.path.islink(file) else ""
            raise CheckpointError(f"{file}: expected a regular file, found {_kind(mode)}{link}.")


def _kind(mode: int) -> str:
    return "a folder" if stat.S_ISDIR(mode) else "a pipe, a socket or a device"
