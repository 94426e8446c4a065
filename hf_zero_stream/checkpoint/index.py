"""The index and the shards of a checkpoint's folder, which are untrusted.

``model.safetensors.index.json`` says which shard holds which tensor. It is a JSON object with the fields
``weight_map`` (a tensor's name -> a shard's name, relative to the checkpoint's folder) and ``metadata`` (an object).
transformers opens the files that it names, as we do, so that these must be files of the checkpoint. docs/sources.md
has the rules.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import CheckpointError, ReadError
from ..settings.values import dtype_name, is_dtype_name
from ..sources.base import as_read_error
from ..sources.local import open_nonblocking, status_of_regular
from .format import excerpt, parse_object


SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
TORCH_SINGLE = "pytorch_model.bin"
TORCH_INDEX = "pytorch_model.bin.index.json"
WEIGHTS = ((SINGLE, INDEX), (TORCH_SINGLE, TORCH_INDEX))
"""The file of the weights, or the index that names their files; transformers takes the first that is there."""

_SHARD_OF_SET = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


def has_weights(folder: Path) -> bool:
    """Whether `folder` has files that transformers would load."""
    return any(os.path.lexists(folder / name) for names in WEIGHTS for name in names)


class Fault(NamedTuple):
    """One thing that is wrong: the file's name in the checkpoint, the kind of fault, and what to do.

    The kinds: "missing" (a file, or a tensor that the index promises), "unreadable", "header" (not valid, or the file
    is truncated), "index", "duplicate" (a tensor in two shards), "misplaced" (a tensor in another shard than
    promised), "link" (to something that is no regular file), "map" (files of a ZeRO or distributed checkpoint do not
    fit together), "config" (``config.json`` is not one JSON object).
    """

    file: str
    kind: str
    message: str


def shards_of(path: str | os.PathLike[str]) -> tuple[list[str], dict[str, str] | None]:
    """(paths of the shards that a load would read, the index's weight map if there is an index).

    As in transformers, a ``model.safetensors`` goes before an index, and both before files of ``torch.save``. Without
    any of them, all safetensors files count.

    Raises:
        CheckpointError: there are none, the index is not sound, or a shard is no regular file.
    """
    path = Path(path)
    if path.is_file():
        return [str(path)], None
    faults: list[Fault] = []
    names, weight_map = named_shards(path, faults)
    for fault in faults:
        raise CheckpointError(f"{path / fault.file}: {fault.message}")
    files = [str(path / name) for name in names]
    check_files(files)
    return files, weight_map


def named_shards(folder: Path, faults: list[Fault]) -> tuple[list[str], dict[str, str] | None]:
    """(names of the shards of a folder, the weight map of its index if there is one); adds to `faults`."""
    # A link to nowhere counts: its file is missing.
    for single, index in WEIGHTS:
        if os.path.lexists(folder / single):
            return [single], None
        if os.path.lexists(folder / index):
            weight_map = read_weight_map(folder / index, faults)
            if weight_map is not None:
                return sorted(set(weight_map.values())), weight_map
            break
    names = sorted(entry.name for entry in folder.glob("*.safetensors"))
    of_a_set = next((name for name in names if _SHARD_OF_SET.fullmatch(name)), None)
    if faults:
        pass  # the index cannot be used; the shards beside it are checked all the same
    elif of_a_set:
        message = f"{of_a_set} is one of several shards, but there is no index. Download or save the checkpoint again."
        faults.append(Fault(INDEX, "missing", message))
    elif not names:
        message = "The folder holds neither this file, nor an index, nor any safetensors file."
        faults.append(Fault(SINGLE, "missing", f"{message}{_advice_on(folder)}"))
    return names, None


def _advice_on(folder: Path) -> str:
    """Advise what to name in place of a folder without weights: a trainer's output has one for each checkpoint."""
    below = (entry for entry in folder.glob("[!.]*") if has_weights(entry))
    if newest := max(below, key=os.path.getmtime, default=None):
        return f" A folder in it does: give {excerpt(newest.name)}, the newest."
    return " from_pretrained(FOLDER, gguf_file=NAME) loads its GGUF file." if any(folder.glob("*.gguf")) else ""


def read_weight_map(path: Path, faults: list[Fault]) -> dict[str, str] | None:
    """The weight map without its faulty entries, which are added to `faults`; None if nothing of it can be used."""
    try:
        fields = parse_object(read_index_text(path), str(path))
    except (ReadError, CheckpointError) as error:
        kind = "unreadable" if isinstance(error, ReadError) else "index"
        faults.append(Fault(path.name, kind, without_path(error, path)))
        return None
    faults += [Fault(path.name, "index", fault) for fault in faults_of_index(str(path), fields)]
    weight_map = fields.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        return None
    return {
        tensor: name
        for tensor, name in weight_map.items()
        if isinstance(name, str) and not fault_of_name(str(path), name)
    }


def without_path(error: Exception, path: Any) -> str:
    """The message of an error about the file at `path`."""
    return str(error).removeprefix(f"{path}: ")


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
