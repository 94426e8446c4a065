"""Whether a checkpoint of safetensors or ``torch.save`` files is whole and sound: all faults, not only the first.

Only headers are read. Contents are not compared with checksums: ``hf cache verify`` and ``sha256sum -c`` do that.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import CheckpointError, ReadError
from .format import NotAMap, excerpt, parse_object
from .formats import (
    INDEX,
    SINGLE,
    WEIGHTS,
    check_files,
    fault_of_name,
    faults_of_index,
    has_weights,
    read_index_text,
    read_map,
)
from .map import CheckpointMap


CONFIG = "config.json"

_JSON_SPACE = b" \t\r\n"
_SHARD_OF_SET = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong: the file's name in the checkpoint, the kind of fault, and what to do.

    The kinds: "missing" (a file, or a tensor that the index promises), "unreadable", "header" (not valid, or the file
    is truncated), "index", "duplicate" (a tensor in two shards), "misplaced" (a tensor in another shard than
    promised), "link" (to something that is no regular file), "map" (files of a ZeRO or distributed checkpoint do not
    fit together), "config" (``config.json`` is not one JSON object).
    """

    file: str
    kind: str
    message: str


@dataclass
class Soundness:
    """The result of a check of `shards`, which are names of files.

    `tensors` and `nbytes` count what is in shards with sound headers; `notes` are odd, and no faults.
    """

    shards: list[str] = field(default_factory=list)
    tensors: int = 0
    nbytes: int = 0
    faults: list[Fault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def fault(self, file: str, kind: str, message: str) -> None:
        self.faults.append(Fault(file, kind, message))


def check_soundness(path: str | os.PathLike[str]) -> Soundness:
    """Check all of a checkpoint: a folder, or one file."""
    soundness = Soundness()
    folder = Path(path)
    weight_map: dict[str, str] | None = None
    if folder.is_file():
        soundness.shards, folder = [folder.name], folder.parent
    else:
        soundness.shards, weight_map = _shards_and_map(folder, soundness)
    check_tensors(_check_headers(folder, soundness), weight_map, soundness)
    leftovers = sorted({entry.name for entry in folder.glob("*.safetensors")} - set(soundness.shards))
    if weight_map is not None and leftovers:
        soundness.notes.append(
            f"Safetensors files that the index does not name: {', '.join(map(excerpt, leftovers))}."
        )
    _note_other_index(folder, soundness)
    _check_config(folder, soundness)
    _note_links(folder, soundness)
    return soundness


def _note_other_index(folder: Path, soundness: Soundness) -> None:
    """Note an index of an earlier save beside the single file of a new one: transformers leaves it there."""
    for single, index in WEIGHTS:
        if soundness.shards != [single] or not os.path.lexists(folder / index):
            continue
        named = read_weight_map(folder / index, Soundness()) or {}
        if lost := sorted({name for name in named.values() if not os.path.lexists(folder / name)}):
            soundness.notes.append(
                f"{index} names {excerpt(lost[0])}, which is not there: it is left of an earlier save. transformers "
                f"reads {single}; what begins with the index, as vLLM does, finds no weights. Remove it."
            )


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
    soundness = Soundness()
    names, weight_map = _shards_and_map(path, soundness)
    if soundness.faults:
        raise CheckpointError(f"{path / soundness.faults[0].file}: {soundness.faults[0].message}")
    files = [str(path / name) for name in names]
    check_files(files)
    return files, weight_map


def _shards_and_map(folder: Path, soundness: Soundness) -> tuple[list[str], dict[str, str] | None]:
    # A link to nowhere counts: its file is missing.
    for single, index in WEIGHTS:
        if os.path.lexists(folder / single):
            return [single], None
        if os.path.lexists(folder / index):
            weight_map = read_weight_map(folder / index, soundness)
            if weight_map is not None:
                return sorted(set(weight_map.values())), weight_map
            break
    names = sorted(entry.name for entry in folder.glob("*.safetensors"))
    of_a_set = next((name for name in names if _SHARD_OF_SET.fullmatch(name)), None)
    if soundness.faults:
        pass  # the index cannot be used; the shards beside it are checked all the same
    elif of_a_set:
        message = f"{of_a_set} is one of several shards, but there is no index. Download or save the checkpoint again."
        soundness.fault(INDEX, "missing", message)
    elif not names:
        message = "The folder holds neither this file, nor an index, nor any safetensors file."
        soundness.fault(SINGLE, "missing", f"{message}{_advice_on(folder)}")
    return names, None


def _advice_on(folder: Path) -> str:
    """Advise what to name in place of a folder without weights: a trainer's output has one for each checkpoint."""
    below = (entry for entry in folder.glob("[!.]*") if has_weights(entry))
    if newest := max(below, key=os.path.getmtime, default=None):
        return f" A folder in it does: give {excerpt(newest.name)}, the newest."
    return " from_pretrained(FOLDER, gguf_file=NAME) loads its GGUF file." if any(folder.glob("*.gguf")) else ""


def read_weight_map(path: Path, soundness: Soundness) -> dict[str, str] | None:
    """The weight map without its faulty entries; None if nothing of it can be used."""
    try:
        fields = parse_object(read_index_text(path), str(path))
    except (ReadError, CheckpointError) as error:
        soundness.fault(
            path.name, "unreadable" if isinstance(error, ReadError) else "index", _without_path(error, path)
        )
        return None
    for fault in faults_of_index(str(path), fields):
        soundness.fault(path.name, "index", fault)
    weight_map = fields.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        return None
    return {
        tensor: name
        for tensor, name in weight_map.items()
        if isinstance(name, str) and not fault_of_name(str(path), name)
    }


def _check_headers(folder: Path, soundness: Soundness) -> dict[str, CheckpointMap]:
    """The index of each shard whose header is sound, on its own so that no fault hides another shard's."""
    indexes: dict[str, CheckpointMap] = {}
    for name in soundness.shards:
        path = folder / name
        if not path.exists():
            why = "It is a link to a file that is not there" if path.is_symlink() else "The file is not there"
            soundness.fault(name, "missing", f"{why}. Download or save the checkpoint again.")
            continue
        kind = "link" if path.is_symlink() else "unreadable"
        try:
            check_files([str(path)])
            kind = "header"
            indexes[name] = read_map([path])
        except (ReadError, CheckpointError) as error:
            soundness.fault(name, "unreadable" if isinstance(error, ReadError) else kind, _without_path(error, path))
        except NotAMap as why:
            soundness.notes.append(
                f"{name}: {_without_path(why, path)}. So it is no map of bytes, and was not checked."
            )
    return indexes


def _without_path(error: Exception, path: Path) -> str:
    return str(error).removeprefix(f"{path}: ")


def check_tensors(
    indexes: Mapping[str, CheckpointMap], weight_map: Mapping[str, str] | None, soundness: Soundness
) -> None:
    """Count the tensors in shards with sound headers; each must be in one shard, the one that the index promises."""
    soundness.tensors = sum(len(index.views) for index in indexes.values())
    soundness.nbytes = sum(index.shards[0].size_bytes for index in indexes.values())
    homes: dict[str, list[str]] = {}
    for shard, index in indexes.items():
        for tensor in index.views:
            homes.setdefault(tensor, []).append(shard)
    for tensor, (first, *others) in homes.items():
        for other in others:
            soundness.fault(other, "duplicate", f"Tensor {tensor!r} is in {first} too. Keep one of them.")
    if weight_map is None:
        return
    for tensor, promised in weight_map.items():
        if promised not in indexes or promised in homes.get(tensor, ()):
            continue  # a shard without a sound header is a fault already
        if tensor in homes:
            message = f"The index promises tensor {tensor!r} here, but it is in {', '.join(homes[tensor])}."
            soundness.fault(promised, "misplaced", message)
        else:
            soundness.fault(promised, "missing", f"The index promises tensor {tensor!r} here, but no shard holds it.")
    unlisted = sorted(homes.keys() - weight_map.keys())
    if unlisted:
        soundness.notes.append(f"Tensors that the index does not list: {len(unlisted)}, among them {unlisted[0]!r}.")


def _check_config(folder: Path, soundness: Soundness) -> None:
    """Check that the config, if there is one, can be read: without it sound weights make no model."""
    path = folder / CONFIG
    if not path.is_file():
        return
    try:
        parse_object(path.read_bytes().lstrip(_JSON_SPACE), str(path))  # people write configs, with blank lines too
    except OSError as error:
        soundness.fault(CONFIG, "unreadable", f"Cannot read it: {error.strerror or error}.")
    except CheckpointError as error:
        soundness.fault(CONFIG, "config", _without_path(error, path))


def _note_links(folder: Path, soundness: Soundness) -> None:
    """Note links out of the folder: they are read like files, and the user may not know of them."""
    own = Path(os.path.realpath(folder))
    files = {*soundness.shards, *(entry.name for entry in folder.iterdir() if entry.is_file())}
    links = ", ".join(excerpt(name) for name in sorted(files) if not _is_at_home(folder / name, own))
    if links:
        soundness.notes.append(f"Links out of the folder, which a copy of it would need too: {links}.")


def _is_at_home(file: Path, own: Path) -> bool:
    """Whether a file lies in its checkpoint's folder `own`, or where huggingface_hub keeps the files of its cache."""
    real = Path(os.path.realpath(file))
    # ``models--.../blobs`` of a hub cache, or the store that its repositories share.
    return real.is_relative_to(own) or any(
        folder.parent.name.startswith("models--") or (folder / ".huggingface-shared-blobs").is_file()
        for folder in real.parents
        if folder.name == "blobs"
    )
