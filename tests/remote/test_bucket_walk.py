"""Two saves to one URL in every order of their requests, with failures: nothing is mixed, and nothing is lost."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from hf_zero_stream.checkpoint.safetensors import ShardToWrite
from hf_zero_stream.errors import HfZeroStreamError, PlaceTakenError, SaveError
from hf_zero_stream.plugins.remote import saves
from hf_zero_stream.plugins.remote.lists import LIST, Version, parse_list
from hf_zero_stream.plugins.remote.objects import ConflictError, Guard, ObjectStatus, RemoteFolder
from hf_zero_stream.plugins.remote.saves import BucketSave
from hf_zero_stream.saving.preparation import PlacedItem, WritePlan
from tests.support.interleavings import CRASH, FAIL, GO, LOSE, Turn, walk


INDEX = "model.safetensors.index.json"
SHARD = "model-{}-00001-of-00001.safetensors"
URL = "s3://bucket/place"
PLAN = WritePlan(
    parameters=cast(Any, None),  # nothing is written by it
    plan=cast(Any, None),
    shards=[ShardToWrite("model.safetensors", b"", {"a": 0}, {}, 1)],
    names=["model.safetensors"],
    items=[PlacedItem("", INDEX, 0, 1)],
    changes_with={},
    has_single_writer=False,
)


@dataclass
class Store:
    """What a bucket holds; `happened` are the ids of saves, in the order in which their lists were complete."""

    compares: bool
    objects: dict[str, tuple[bytes, int]] = field(default_factory=dict)
    happened: list[str] = field(default_factory=list)

    def write(self, name: str, data: bytes) -> int:
        """Returns the new version."""
        version = self.objects.get(name, (b"", 0))[1] + 1
        self.objects[name] = data, version
        if name == LIST and (order := parse_list(data, "")).stage == "happened":
            self.happened.append(order.id)
        return version


class StepByStep(RemoteFolder):
    """The objects of a :class:`Store`, for one writer.

    Stores that compare nothing are safe as far as nobody comes between a look at the list and the request behind it.
    """

    def __init__(self, store: Store, turn: Turn | None) -> None:
        super().__init__(URL)
        self._store, self._turn = store, turn

    @contextmanager
    def _request(self, what: str) -> Iterator[None]:
        try:
            is_lost = self._turn is not None and self._turn.step(what)
        except OSError as error:
            raise SaveError(str(error)) from error
        yield
        if is_lost:
            raise SaveError(f"{what}: no answer")

    def _guarded(self, guard: Guard | None) -> None:
        if guard is None:
            return
        if self._store.compares:
            guard()
        else:
            turn, self._turn = self._turn, None
            try:
                guard()
            finally:
                self._turn = turn

    def read_version(self, name: str) -> tuple[bytes, Version]:
        with self._request(f"read {name}"):
            found = self._store.objects.get(name)
            if found is None:
                raise FileNotFoundError(name)
            return found[0], Version(str(found[1]), None)

    def objects(self) -> dict[str, ObjectStatus]:
        with self._request("list"):
            return {
                name: ObjectStatus(len(data), Version(str(number), None))
                for name, (data, number) in self._store.objects.items()
            }

    def put(self, name: str, data: bytes, *, over: Any = "any", guard: Guard | None = None) -> Version:
        if self._store.compares:
            self._guarded(guard)
        # Whoever takes the place has read the list right before.
        is_at_once = not self._store.compares and isinstance(over, Version) and guard is None
        with nullcontext() if is_at_once else self._request(f"put {name}"):
            if not self._store.compares:
                self._guarded(guard)
            found = self._store.objects.get(name)
            there = None if found is None else Version(str(found[1]), None)
            if there != over != "any" and (self._store.compares or over is None):
                raise ConflictError(name)
            return Version(str(self._store.write(name, data)), None)

    def remove(self, names: Collection[str], *, guard: Guard | None = None) -> None:
        if not names:
            return
        if self._store.compares:
            self._guarded(guard)
        with self._request(f"remove {sorted(names)}"):
            if not self._store.compares:
                self._guarded(guard)
            for name in names:
                self._store.objects.pop(name, None)

    def send(self, name: str, data: bytes) -> None:
        with self._request(f"send {name}"):
            self._store.write(name, data)


def fill(folder: Path, name: str) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(f"{{}} {name}")
    (folder / "model.safetensors").write_text(name)


def save(store: Store, turn: Turn | None, folder: Path, name: str) -> str:
    """One save of a single shard, as rank 0 makes it."""
    place = StepByStep(store, turn)
    publication = BucketSave(place, folder / name, id=name)
    if turn is not None:
        turn.remembers = lambda: (publication.order, publication.version)
    try:
        shutil.rmtree(publication.temporary, ignore_errors=True)
        fill(publication.temporary, name)
        publication.assign(PLAN)
        for shard in publication.sizes:
            place.send(shard, name.encode())
        publication.commit("model.safetensors", INDEX)
    except Exception:
        publication.abandon()
        raise
    return "saved"


def published(store: Store) -> str:
    """The save of which all files are; an AssertionError if they are of several, or some are not there."""
    index = json.loads(store.objects[INDEX][0])
    [shard] = index["weight_map"].values()
    name = store.objects[shard][0].decode()
    assert SHARD.format(name) == shard
    assert store.objects["config.json"][0].decode() == f"{{}} {name}", "a mixture"
    return name


def check(store: Store, turns: Sequence[Turn], way: Sequence[tuple[int, str]], folder: Path) -> None:
    names, failed = ["a", "b"], [order for _, order in way if order != GO]
    for turn in turns:
        if isinstance(turn.outcome, Exception):
            assert isinstance(turn.outcome, HfZeroStreamError)
            assert failed or isinstance(turn.outcome, PlaceTakenError), turn.outcome
        elif turn.outcome == "saved":
            assert names[turn.number] in store.happened
    if not failed:
        assert "saved" in [turn.outcome for turn in turns]
    saves.finish_at(StepByStep(store, None))
    last = (["old", *store.happened])[-1]
    assert published(store) == last
    if not failed:
        assert {*store.objects} == {LIST, "config.json", INDEX, SHARD.format(last)}
    assert save(store, None, folder, "next") == "saved"
    assert published(store) == "next"
    dead = {SHARD.format(names[turn.number]) for turn in turns if turn.outcome == "crashed"}
    assert {*store.objects} - dead == {LIST, "config.json", INDEX, SHARD.format("next")}


@pytest.mark.parametrize(
    ("failures", "compares"),
    [
        (0, True),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((0, False), (1, True), (1, False), (2, True))),
    ],
)
def test_all_orders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int, compares: bool) -> None:
    monkeypatch.setattr(saves, "_AT_ONCE", 1)
    monkeypatch.setattr(saves, "abort_uploads", lambda place, names: None)
    ends: Counter[str] = Counter()

    @contextmanager
    def store() -> Iterator[Store]:
        made = Store(compares)
        for name, text in (("config.json", "{} old"), (SHARD.format("old"), "old")):
            made.write(name, text.encode())
        made.write(INDEX, json.dumps({"weight_map": {"a": SHARD.format("old")}}).encode())
        yield made

    def checked(store: Store, turns: Sequence[Turn], way: Sequence[tuple[int, str]]) -> None:
        try:
            check(store, turns, way, tmp_path)
        except BaseException as error:
            steps = [f"{number} {order}" for number, order in way]
            seen = "\n".join(f"{turn.number}: {turn.done} -> {turn.outcome!r}" for turn in turns)
            raise AssertionError(f"{steps}\n{seen}\n{sorted(store.objects)}") from error
        ends[str(sorted(str(turn.outcome)[:40] for turn in turns))] += 1

    writers = [lambda it, turn, name=name: save(it, turn, tmp_path, name) for name in ("a", "b")]
    states = walk(
        store,
        lambda it: tuple(sorted(it.objects.items())),
        writers,
        checked,
        failures=failures,
        kinds=(CRASH, FAIL, LOSE),
    )
    assert states > 300 and len(ends) > 1
