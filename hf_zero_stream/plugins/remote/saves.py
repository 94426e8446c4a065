"""Saves to buckets (:class:`...saving.targets.UploadTarget`): the earlier checkpoint stays until the new one is there.

Objects cannot be renamed. So shards get names that nothing in the bucket has or names: those of a save into a folder,
or if there are such objects, others (``model-2-00001-of-00003.safetensors``), and an index that names them. When all
are complete, one object, the *list*, is written, with all small files of the save and the names of what it replaces.
From that moment on the save has happened: if the process dies while it writes the files, the next save to the URL, or
the next resume from it, goes on with the list. Until then the object has another list, of what a later save is to
remove if this one dies.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers.utils import logging

from ...errors import SaveError
from ...saving.publication import outdated_weights
from ...saving.targets import ObjectWriter, PlannedShards
from .lists import LIST, SaveList, parse_list
from .objects import RemoteFolder, StreamedObject, abort_uploads
from .urls import checkpoint_url, joined


__all__ = ["BucketSave", "begin", "canonical", "finish_interrupted", "names", "writer"]

logger = logging.get_logger(__name__)

_IN_PLACE = "adapter_model.safetensors"
"""PEFT looks for a file of this name, whatever an index says: it is replaced, by one request."""

_AT_ONCE = 8
"""Small files that are written at the same time: each request mostly waits."""

_SHARD = re.compile(r"(.*?)(-\d{5}-of-\d{5})?\.safetensors")


def canonical(url: str) -> str:
    return checkpoint_url(url)


def begin(url: str) -> BucketSave:
    place = RemoteFolder(url)
    finish_interrupted(url)
    return BucketSave(place, Path(tempfile.mkdtemp(prefix="hf-zero-stream-")))


def names(url: str) -> set[str]:
    return RemoteFolder(url).names()


def writer(url: str, size_bytes: int, *, checks: bool) -> ObjectWriter:
    return StreamedObject(url, size_bytes, checks=checks)


@dataclass
class BucketSave:
    """One save to a bucket, on rank 0 (:class:`...saving.targets.RemotePublication`)."""

    place: RemoteFolder
    temporary: Path
    objects: set[str] = field(default_factory=set)
    """The names of the shards, below the place."""
    order: SaveList | None = None
    """The list, once it has been written."""

    def assign(self, planned: Sequence[PlannedShards]) -> list[list[str]]:
        found = [self._named(each) for each in planned]
        self.objects = {name for names in found for name in names}
        folders = {name.rpartition("/")[0] for name in self.objects}
        there = {joined_name(folder, name) for folder in folders for name in self.place.names(folder)}
        self.order = SaveList(created=sorted(self.objects - there), replaced=sorted(self.objects & there))
        self.place.put(LIST, self.order.to_json())
        return [[joined(self.place.url, name) for name in names] for names in found]

    def _named(self, planned: PlannedShards) -> list[str]:
        """The names of the objects; if they differ from those of files, the index in the temporary folder has them."""
        folder = planned.index_name.rpartition("/")[0]
        there = {joined_name(folder, name) for name in self.place.names(folder)}
        stem = _parts(planned.names[0])[0]
        has_earlier = bool(there & {planned.index_name, f"{stem}.safetensors", *planned.names})
        if not has_earlier or planned.names[0].rpartition("/")[2] == _IN_PLACE:
            return [*planned.names]
        number = 2
        while any(f"{stem}-{number}{_parts(name)[1]}.safetensors" in there for name in planned.names):
            number += 1
        names = [f"{stem}-{number}{_parts(name)[1]}.safetensors" for name in planned.names]
        self._write_index(planned, names)
        for old, new in zip(planned.names, names, strict=True):
            (self.temporary / old).rename(self.temporary / new)
        return names

    def _write_index(self, planned: PlannedShards, names: Sequence[str]) -> None:
        path = self.temporary / planned.index_name
        content: dict[str, Any] = {"metadata": {"total_size": planned.nbytes}}
        if path.exists():
            content = json.loads(path.read_bytes())
        files = [name.rpartition("/")[2] for name in names]
        of_files = zip(files, planned.tensors, strict=True)
        content["weight_map"] = {tensor: name for name, tensors in of_files for tensor in tensors}
        path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    def read(self, path: str, start: int, nbytes: int) -> bytes:
        return self.place.read(str(Path(path).relative_to(self.temporary)), start, nbytes)

    def commit(self, weights_name: str, index_name: str, last_name: str = "", replaced: Sequence[str] = ()) -> None:
        paths = sorted(path for path in self.temporary.rglob("*") if path.is_file())
        named = {str(path.relative_to(self.temporary)): path for path in paths}
        small = [name for name in named if name not in self.objects]
        small.sort(key=lambda name: (name == last_name, name == index_name, "/" not in name, name))
        new = {*small, *self.objects}
        removed = outdated_weights(self.place.names(), weights_name, index_name, new)
        for name in replaced:
            removed += [name, *self.place.below(name)]
        files = {name: named[name].read_bytes() for name in small}
        order = SaveList(is_complete=True, files=files, removes=sorted({*removed} - new))
        self.place.put(LIST, order.to_json())
        self.order = order
        shutil.rmtree(self.temporary, ignore_errors=True)
        try:
            _carry_out(self.place, order)
        except SaveError as error:
            raise SaveError(
                f"{error} This save is complete: saving there again, or load_state, finishes it."
            ) from error

    def abandon(self) -> None:
        shutil.rmtree(self.temporary, ignore_errors=True)
        if self.order is not None and not self.order.is_complete:
            try:
                _remove_unfinished(self.place, self.order)
            except SaveError as error:  # there is an error already
                logger.warning(f"{error} The next save there removes what this one has left.")


def finish_interrupted(url: str) -> None:
    """Finish the save to `url` that died after it had happened, or remove what one has left that had not.

    Raises:
        SaveError: the bucket cannot be read, or written to.
        CheckpointError: the list is not one of ours.
    """
    place = RemoteFolder(url)
    try:
        order = parse_list(place.read(LIST), joined(url, LIST))
    except FileNotFoundError:
        return
    if order.is_complete:
        _carry_out(place, order)
    else:
        _remove_unfinished(place, order)


def _carry_out(place: RemoteFolder, order: SaveList) -> None:
    """Do what the list says, perhaps again, then remove it."""
    names = [*order.files]
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        for at_once in (names[:-1], names[-1:]):  # the last one is what makes whoever loads find the others
            list(threads.map(lambda name: place.put(name, order.files[name]), at_once))
    place.remove(order.removes)
    place.remove([LIST])


def _remove_unfinished(place: RemoteFolder, order: SaveList) -> None:
    place.remove(order.created)
    abort_uploads(place, order.created, order.replaced)
    place.remove([LIST])


def _parts(name: str) -> tuple[str, str]:
    """The stem of a shard's name, and its number, which the only one gets too."""
    found = _SHARD.fullmatch(name)
    assert found is not None
    return found[1], found[2] or "-00001-of-00001"


def joined_name(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name
