"""Whether a checkpoint of safetensors or ``torch.save`` files is whole and sound: all faults, not only the first.

Only headers are read. Contents are not compared with checksums: ``hf cache verify`` and ``sha256sum -c`` do that.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ...errors import CheckpointError, ReadError
from ...plugin_api import (
    WEIGHTS,
    CheckpointMap,
    Fault,
    NotAMap,
    cached_folder,
    check_files,
    checkpoints_at,
    contents_of,
    excerpt,
    folder_format,
    is_url,
    named_shards,
    parse_object,
    place_of,
    read_map,
    read_weight_map,
    without_path,
)


CONFIG = "config.json"

_JSON_SPACE = b" \t\r\n"


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


def soundness_at(path: str, revision: str | None) -> Soundness:
    """Check all of a checkpoint: a folder, a file, a snapshot in the Hub's cache or a URL."""
    if not is_url(path):
        return soundness_of(cached_folder(path, revision))
    soundness = Soundness()
    with place_of(path, revision) as place:
        soundness.shards, weight_map, maps = checkpoints_at(place).checked(place, soundness.faults)
    _check_tensors(maps, weight_map, soundness)
    return soundness


def soundness_of(path: str | os.PathLike[str]) -> Soundness:
    """Check all of a checkpoint of this host, of any format.

    In a ZeRO or distributed checkpoint, or a training state, it finds only the first fault, because no file says what
    is in another.
    """
    folder = Path(path)
    if folder_format(folder) is None:
        return check_soundness(folder)
    soundness = Soundness()
    try:
        contents = contents_of(folder)
    except (ReadError, CheckpointError) as error:
        soundness.fault(folder.name, "unreadable" if isinstance(error, ReadError) else "map", str(error))
        return soundness
    soundness.shards = [os.path.relpath(shard.path, folder) for shard in contents.shards]
    soundness.tensors, soundness.notes = len(contents.views), list(contents.notes)
    soundness.nbytes = sum(shard.size_bytes for shard in contents.shards)
    return soundness


def check_soundness(path: str | os.PathLike[str]) -> Soundness:
    """Check all of a checkpoint of safetensors or ``torch.save`` files: a folder, or one file."""
    soundness = Soundness()
    folder = Path(path)
    weight_map: dict[str, str] | None = None
    if folder.is_file():
        soundness.shards, folder = [folder.name], folder.parent
    else:
        soundness.shards, weight_map = named_shards(folder, soundness.faults)
    _check_tensors(_check_headers(folder, soundness), weight_map, soundness)
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
        named = read_weight_map(folder / index, []) or {}
        if lost := sorted({name for name in named.values() if not os.path.lexists(folder / name)}):
            soundness.notes.append(
                f"{index} names {excerpt(lost[0])}, which is not there: it is left of an earlier save. transformers "
                f"reads {single}; what begins with the index, as vLLM does, finds no weights. Remove it."
            )


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
            soundness.fault(name, "unreadable" if isinstance(error, ReadError) else kind, without_path(error, path))
        except NotAMap as why:
            soundness.notes.append(
                f"{name}: {without_path(why, path)}. So it is no map of bytes, and was not checked."
            )
    return indexes


def _check_tensors(
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
        soundness.fault(CONFIG, "config", without_path(error, path))


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
