"""Saves to buckets (:class:`...saving.places.UrlPlaces`): the earlier checkpoint stays until the new one is there.

Objects cannot be renamed. So each save has an id, which the names of its shards bear
(``model-3f9a0c51-00001-of-00003.safetensors``), and an index names them. An object, the *list*, says which save owns
the place: that which began last. It takes the list over from one that has died, or hangs. When all shards are there,
it writes the list anew, with all small files of the save and the names of what it replaces. From that moment on the
save has happened: if the process dies while it writes the files, the next save to the URL, or the next resume from it,
goes on with the list.

The store writes a list or a small file only if what it is to replace is still there (``If-Match``, ``If-None-Match``).
Not all stores compare, and none does so for removals: so right before, it is looked whether the list is still that of
this save. Whoever does not own the place any more removes only what bears its own id.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from transformers.utils import logging

from ...errors import HfZeroStreamError, PlaceTakenError, SaveError
from ...plugin_api import (
    BackgroundCoordinator,
    Copies,
    Finalizer,
    Place,
    PlacedItem,
    SavingRank,
    ShardToWrite,
    Staged,
    Work,
    WritePlan,
    Written,
    outdated_weights,
    taken_place,
)
from .lists import LIST, SaveList, Version, parse_list
from .objects import ConflictError, Guard, ObjectStatus, RemoteFolder, StreamedObject, abort_uploads
from .upload_plan import Upload
from .uploads import KeptObject, check_all, send_all, uploads_of
from .urls import checkpoint_url, joined


__all__ = [
    "BucketPlace",
    "BucketSave",
    "finish_interrupted",
    "has_save",
    "names",
    "place",
    "put",
    "remove",
    "small_files",
]

logger = logging.get_logger(__name__)

_IN_PLACE = "adapter_model.safetensors"
"""PEFT looks for a file of this name, whatever an index says: it is a copy, which one request makes."""

_AT_ONCE = 8
"""Small files that are written at the same time: each request mostly waits."""

_MOST_FINISHED = 8
"""Saves of others that one finishes before it begins: more would be somebody who saves all the time."""

_SHARD = re.compile(r"(.*?)(-\d{5}-of-\d{5})?\.safetensors")


def place(url: str) -> BucketPlace:
    return BucketPlace(checkpoint_url(url))


def names(url: str) -> set[str]:
    return RemoteFolder(url).names()


def put(url: str, data: bytes) -> None:
    place, _, name = url.rpartition("/")
    RemoteFolder(place).put(name, data)


def small_files(url: str) -> dict[str, bytes]:
    place = RemoteFolder(url)
    for name in place.below(""):
        if name.rpartition("/")[2] == LIST:
            finish_interrupted(joined(url, name.removesuffix(LIST).rstrip("/")))
    small = [name for name in place.below("") if not name.endswith((".safetensors", LIST))]
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        return dict(zip(small, threads.map(place.read, small), strict=True))


def has_save(url: str) -> bool:
    return any(name.rpartition("/")[2] == LIST for name in RemoteFolder(url).below(""))


def remove(url: str, first: str) -> None:
    place = RemoteFolder(url)
    names = place.below("")
    place.remove({first} & names.keys())
    place.remove(names)


class BucketPlace(Place):
    """A URL that is saved to."""

    why_copies = "shards that go to a URL are put together of what all ranks hold"

    def begin(self) -> BucketSave:
        return BucketSave(RemoteFolder(str(self.location)), Path(tempfile.mkdtemp(prefix="hf-zero-stream-")))

    def write(self, work: Work, publication: BucketSave, plan: WritePlan, finalizer: Finalizer) -> Written:
        """Send all shards; what they replace stays until :meth:`BucketSave.commit`."""
        uploads, names, begin = self._dealt(work, publication, plan)
        coordinator, sent = work.coordinator, _bytes_of_rank(uploads, work.coordinator.rank)
        with work.clock("write"), work.bar(plan, sum(sent), "Sending") as advance:
            objects, rounds = send_all(uploads, plan.parameters, coordinator, begin, advance)
        work.memory.sample()
        if work.verifies:
            with work.clock("verify"):
                coordinator.run_on_all(partial(check_all, objects))
        return Written(work.publish(finalizer, publication, plan, written=sent[1], rounds=rounds), names)

    def stage(
        self, work: Work, publication: BucketSave, plan: WritePlan, finalizer: Finalizer, copies: Copies
    ) -> Staged:
        uploads, names, begin = self._dealt(work, publication, plan)

        def keep(number: int) -> KeptObject:
            return KeptObject(partial(begin, number))

        kept, rounds = send_all(uploads, plan.parameters, work.coordinator, keep, lambda nbytes: None)
        figures = {"written": _bytes_of_rank(uploads, work.coordinator.rank)[1], "rounds": rounds}
        return _StagedObjects(work, plan, kept, names, figures, partial(finalizer.publish, publication, plan, ()))

    def _dealt(
        self, work: Work, publication: BucketSave, plan: WritePlan
    ) -> tuple[list[Upload], list[str], Callable[[int], StreamedObject]]:
        """Which rank sends which shard, the names of the objects, and what begins them (all ranks)."""
        coordinator = work.coordinator
        single_writer, names = coordinator.broadcast(
            lambda: (work.settings.write_from == "rank0", publication.assign(plan))
        )
        uploads = uploads_of(plan.shards, coordinator, single_writer=single_writer)

        def begin(number: int) -> StreamedObject:
            url = joined(str(self.location), names[number])
            return StreamedObject(url, uploads[number].shard.size_bytes, checks=work.verifies)

        return uploads, names, begin


def _bytes_of_rank(uploads: Sequence[Upload], rank: int) -> tuple[int, int]:
    """The bytes of headers, and those of tensors, that a rank sends."""
    mine = [it.shard for it in uploads if it.writer == rank]
    headers = sum(len(shard.header) for shard in mine)
    return headers, sum(shard.size_bytes for shard in mine) - headers


class _StagedObjects(Staged):
    """Objects whose bytes are in host memory; what has been sent is not any more."""

    def __init__(
        self,
        work: Work,
        plan: WritePlan,
        kept: Sequence[KeptObject],
        names: Sequence[str],
        figures: Mapping[str, int],
        publish: Callable[[], object],
    ) -> None:
        super().__init__(work, plan, names)
        self._kept, self._publish = [*kept], publish
        self._figures = {**figures, "copied": sum(each.nbytes for each in kept)}

    def finish(self, coordinator: BackgroundCoordinator) -> None:
        coordinator.run_on_all(partial(self._send, coordinator.check))
        with self._work.clock("publish"):
            coordinator.run_on_main(self._publish)

    def _send(self, check: Callable[[], None]) -> None:
        with self._work.clock("write"):
            sent = [each.send(check) for each in self._kept]
        if self._work.verifies:
            with self._work.clock("verify"):
                check_all(sent)

    def figures(self) -> SavingRank:
        return self._work.figures(self.plan, **self._figures)

    def end(self) -> None:
        self._kept.clear()


@dataclass
class BucketSave:
    """One save to a bucket, on rank 0 (:class:`...saving.places.Publishing`)."""

    place: RemoteFolder
    temporary: Path
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:8])
    sizes: dict[str, int] = field(default_factory=dict)
    """The shards, by their names below the place, in bytes."""
    order: SaveList | None = None
    """The list, once it has been written; `version` is that of its object."""
    version: Version | None = None

    def assign(self, plan: WritePlan) -> list[str]:
        """Take the place over, and give the names of the objects that the shards become; before any is written.

        What an earlier save has left is finished or removed. Raises a SaveError.
        """
        names = [name for item in plan.items for name in self._named(plan, item)]
        self.sizes = {name: (self.temporary / name).stat().st_size for name in names}
        self._take()
        return names

    def _named(self, plan: WritePlan, item: PlacedItem) -> list[str]:
        """The names of the objects, which also their headers in the temporary folder get; writes the index."""
        planned = plan.names[item.first : item.stop]
        names = [f"{stem}-{self.id}{number}.safetensors" for stem, number in map(_parts, planned)]
        if not _is_in_place(planned[0]):
            self._write_index(item, plan.shards[item.first : item.stop], names)
        for old, new in zip(planned, names, strict=True):
            (self.temporary / old).rename(self.temporary / new)
        return names

    def _write_index(self, item: PlacedItem, shards: Sequence[ShardToWrite], names: Sequence[str]) -> None:
        path = self.temporary / item.folder / item.index_name
        nbytes = sum(shard.size_bytes - len(shard.header) for shard in shards)
        content: dict[str, Any] = {"metadata": {"total_size": nbytes}}
        if path.exists():
            content = json.loads(path.read_bytes())
        files = [name.rpartition("/")[2] for name in names]
        of_files = zip(files, shards, strict=True)
        content["weight_map"] = {tensor: name for name, shard in of_files for tensor in shard.starts}
        path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    def _take(self) -> None:
        """Write the list of this save, in place of that of another one, whose shards then go."""
        for _ in range(_MOST_FINISHED):
            found = _list_at(self.place)
            if found is not None and found[0].stage == "happened":
                _finish(self.place, *found)
                continue
            others = [] if found is None else [name for name in found[0].created if name not in self.sizes]
            order = SaveList(id=self.id, created=sorted({*self.sizes, *others}))
            self.order = order  # also if the answer is lost
            try:
                self.version = self._put(order, None if found is None else found[1])
            except ConflictError as error:
                self.order = None
                raise taken_place(self.place.url) from error
            if others:
                self.place.remove(others)
                abort_uploads(self.place, others)
            return
        raise taken_place(self.place.url)

    def commit(self, weights_name: str, index_name: str, last_name: str = "", replaced: Sequence[str] = ()) -> None:
        assert self.order is not None
        paths = sorted(path for path in self.temporary.rglob("*") if path.is_file())
        named = {str(path.relative_to(self.temporary)): path for path in paths}
        small = [name for name in named if name not in self.sizes]
        small.sort(key=lambda name: (name == last_name, name == index_name, "/" not in name, name))
        copies = {name: _in_place(name, self.id) for name in self.sizes if _is_in_place(_in_place(name, self.id))}
        new = {*small, *self.sizes, *copies.values()}
        there = self._there(replaced)
        removed = outdated_weights([name for name in there if "/" not in name], weights_name, index_name, new)
        for folder in replaced:
            removed += [folder, *(name for name in there if name.startswith(f"{folder}/"))]
        dead = [name for name in self.order.created if name not in self.sizes and name in there]
        files = {name: named[name].read_bytes() for name in small}
        files = {name: data for name, data in files.items() if not (name in there and there[name].version.is_of(data))}
        order = SaveList(
            id=self.id,
            stage="happened",
            files=files,
            over={name: there[name].version if name in there else None for name in files},
            copies=copies,
            removes=sorted({*removed, *dead, *copies} - (new - {*copies})),
        )
        before, self.order = self.order, order  # also if the answer is lost: then the shards have to stay
        try:
            self.version = self._put(order, self.version, partial(_refuse_lost, self.place, self.id))
        except (ConflictError, PlaceTakenError) as error:
            self.order = before
            raise taken_place(self.place.url) from error
        except HfZeroStreamError as error:
            raise SaveError(
                f"{error} Perhaps this save has happened all the same: the next save or load there finds out."
            ) from error
        shutil.rmtree(self.temporary, ignore_errors=True)
        try:
            _finish(self.place, order, self.version)
        except HfZeroStreamError as error:
            raise SaveError(
                f"{error} This save is complete: saving there again, or load_state, finishes it."
            ) from error

    def _put(self, order: SaveList, over: Version | None, guard: Guard | None = None) -> Version:
        """Write the list over the version `over`; a ConflictError if there is another one, which is not this."""
        data = order.to_json()
        try:
            return self.place.put(LIST, data, over=over, guard=guard)
        except ConflictError:  # perhaps with itself: a request whose answer was lost is sent again
            with suppress(FileNotFoundError):
                there, version = self.place.read_version(LIST)
                if there == data:
                    return version
            raise

    def _there(self, replaced: Sequence[str]) -> dict[str, ObjectStatus]:
        """The objects of the place, and in the folders of this save and of what is `replaced`.

        Raises:
            SaveError: a shard is not there as it was sent.
        """
        there = self.place.objects()
        for folder in sorted({name.rpartition("/")[0] for name in self.sizes} | {*replaced}):
            there |= self.place.below(folder) if folder else {}
        for name, size_bytes in self.sizes.items():
            found = there.get(name)
            if found is None or found.size_bytes != size_bytes:
                raise SaveError(
                    f"{joined(self.place.url, name)}: expected the {size_bytes} bytes that were sent; the store lists "
                    f"{'no such object' if found is None else f'{found.size_bytes} bytes'}. Look for a proxy between, "
                    "or for somebody who removes objects. What could be loaded from there before still can be."
                )
        return there

    def abandon(self) -> None:
        shutil.rmtree(self.temporary, ignore_errors=True)
        if self.order is None or self.order.stage != "begun":
            return
        try:
            found = _list_at(self.place)
            if found is None and self.version is None:  # it could not be written
                return
            self.place.remove(self.sizes)
            abort_uploads(self.place, self.sizes)
            guard = partial(_refuse_lost, self.place, self.id)
            version = guard()
            self.place.remove(self.order.created)  # those of the save before, too: it has lost the place to this one
            self.place.put(LIST, SaveList(id=self.id, stage="done").to_json(), over=version, guard=guard)
        except (ConflictError, PlaceTakenError) as error:
            raise taken_place(self.place.url) from error
        except HfZeroStreamError as error:  # there is an error already
            logger.warning(f"{error} The next save there removes what this one has left.")


def finish_interrupted(url: str) -> None:
    """Finish the save to `url` that died after it had happened.

    Raises:
        SaveError: the bucket cannot be read, or written to.
        CheckpointError: the list is not one of ours.
    """
    finish_at(RemoteFolder(url))


def finish_at(place: RemoteFolder) -> None:
    """Do what :func:`finish_interrupted` says."""
    found = _list_at(place)
    if found is not None and found[0].stage == "happened":
        _finish(place, *found)


def _list_at(place: RemoteFolder) -> tuple[SaveList, Version] | None:
    try:
        data, version = place.read_version(LIST)
    except FileNotFoundError:
        return None
    return parse_list(data, joined(place.url, LIST)), version


def _refuse_lost(place: RemoteFolder, save_id: str) -> Version:
    """Raise a PlaceTakenError unless the list is that of this save; returns its version."""
    found = _list_at(place)
    if found is None or found[0].id != save_id:
        raise taken_place(place.url)
    return found[1]


def _finish(place: RemoteFolder, order: SaveList, version: Version) -> None:
    """Do what the list of a save says that has happened, perhaps again, unless somebody else has done it all."""
    guard, names = partial(_refuse_lost, place, order.id), [*order.files]
    with suppress(ConflictError, PlaceTakenError), ThreadPoolExecutor(_AT_ONCE) as threads:
        for name, to in order.copies.items():
            place.copy(name, to, guard=guard)
        for at_once in (names[:-1], names[-1:]):  # the last one is what makes whoever loads find the others
            list(threads.map(partial(_write, place, order, guard), at_once))
        place.remove(order.removes, guard=guard)
        place.put(LIST, SaveList(id=order.id, stage="done").to_json(), over=version, guard=guard)


def _write(place: RemoteFolder, order: SaveList, guard: Guard, name: str) -> None:
    """Write a small file over what was there when the save happened."""
    data, over = order.files[name], order.over[name]
    try:
        place.put(name, data, over=over, guard=None if over is None else guard)
    except ConflictError:
        with suppress(FileNotFoundError):
            if place.read(name) == data:
                return
        place.put(name, data, guard=guard)  # somebody has changed it by other means


def _is_in_place(name: str) -> bool:
    return name.rpartition("/")[2] == _IN_PLACE


def _in_place(name: str, save_id: str) -> str:
    """The name of a shard without the id."""
    return name.replace(f"-{save_id}", "")


def _parts(name: str) -> tuple[str, str]:
    """The stem of a shard's name, and its number, which the only one gets too, but for one with a name of its own."""
    found = _SHARD.fullmatch(name)
    assert found is not None
    return found[1], found[2] or ("" if _is_in_place(name) else "-00001-of-00001")
