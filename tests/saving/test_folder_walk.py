"""Two saves into one folder in every order of their steps, with failures: nothing is mixed, and nothing is lost."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hf_zero_stream.errors import PlaceTakenError, SaveError
from hf_zero_stream.saving import publication
from hf_zero_stream.saving.publication import UNFINISHED, Publication, finish_interrupted
from tests.support.interleavings import CRASH, FAIL, GO, CrashedError, Turn, walk


INDEX, SHARDS = (
    "model.safetensors.index.json",
    ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
)
NAMES = ("a", "b")
_current = threading.local()
_begun: list[str] = []
"""The saves into the present folder, in the order in which they took it."""


def contents(name: str) -> dict[str, str]:
    return {"config.json": name, INDEX: json.dumps([*SHARDS, name]), **dict.fromkeys(SHARDS, name)}


def fill(folder: Path, name: str) -> None:
    for file, text in contents(name).items():
        with open(folder / file, "w") as opened:
            opened.write(text)


def save(folder: Path, turn: Turn | None, name: str) -> str:
    """One save, as rank 0 makes it; of a process that dies the system gives its locks free."""
    _current.turn, _current.name = turn, name
    made: Publication | None = None
    try:
        made = Publication.begin(folder)
        _begun.append(name)
        fill(made.temporary, name)
        made.commit("model.safetensors", INDEX)
    except CrashedError:
        for temporary in [path for path in publication._held if path.name == f"{UNFINISHED}{name}"]:
            publication._let_go(publication._held.pop(temporary))
        raise
    except Exception:
        if made is not None:
            made.abandon()
        raise
    return "saved"


def tree(folder: Path) -> tuple[tuple[str, str], ...]:
    paths = sorted(folder.rglob("*"))
    return tuple((str(path.relative_to(folder)), path.read_text() if path.is_file() else "/") for path in paths)


def saved_by(folder: Path) -> str:
    """Whose the files in the folder are; an AssertionError if they are of several, or some are not there."""
    found = {name: text for name, text in tree(folder) if not name.startswith(UNFINISHED)}
    name = found["config.json"]
    assert found == contents(name), "a mixture"
    return name


@pytest.fixture
def step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """What changes a folder, or locks it, waits for the turn of its thread's writer."""

    def gated(original: Callable[..., Any], what: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            turn = getattr(_current, "turn", None)
            if turn is not None:
                named = [Path(each).name for each in args if isinstance(each, (str, Path))]
                with suppress(*[OSError] * bool(kwargs.get("ignore_errors"))):
                    turn.step(f"{what} {' '.join(named)}")
            return original(*args, **kwargs)

        return call

    def wait(seconds: float) -> None:
        _current.turn.wait("lock")

    for owner, name in ((os, "replace"), (os, "mkdir"), (shutil, "rmtree"), (Path, "write_text")):
        monkeypatch.setattr(owner, name, gated(getattr(owner, name), name))
    clock = SimpleNamespace(sleep=wait, monotonic=lambda: 0.0)
    monkeypatch.setattr(publication, "time", clock)
    monkeypatch.setattr(publication, "uuid", SimpleNamespace(uuid4=lambda: SimpleNamespace(hex=_current.name)))
    monkeypatch.setattr(publication, "_sync", lambda path: None)


def walked(tmp_path: Path, failures: int, kinds: Sequence[str]) -> int:
    """The number of states. At the end of each way the save that began last is there, or failed."""

    @contextmanager
    def place() -> Iterator[Path]:
        _current.turn, folder = None, tmp_path / "place"
        folder.mkdir()
        fill(folder, "old")
        _begun.clear()
        try:
            yield folder
        finally:
            _current.turn = None
            shutil.rmtree(folder)

    def check(folder: Path, turns: Sequence[Turn], way: Sequence[tuple[int, str]]) -> None:
        failed = [order for _, order in way if order != GO]
        outcomes = {NAMES[turn.number]: turn.outcome for turn in turns}
        for outcome in outcomes.values():
            assert isinstance(outcome, str | SaveError)
            assert failed or isinstance(outcome, str | PlaceTakenError)
        finish_interrupted(folder)
        found, saved = saved_by(folder), [name for name, outcome in outcomes.items() if outcome == "saved"]
        assert failed or saved
        assert found != "old" or not saved
        if _begun and _begun[-1] in saved:
            assert found == _begun[-1]
        elif not failed:
            assert found in saved
        assert save(folder, None, "next") == "saved"
        assert saved_by(folder) == "next"
        assert [path.name for path in folder.iterdir() if path.name.startswith(UNFINISHED)] == []

    def checked(folder: Path, turns: Sequence[Turn], way: Sequence[tuple[int, str]]) -> None:
        try:
            check(folder, turns, way)
        except BaseException as error:
            seen = "\n".join(f"{NAMES[turn.number]}: {turn.done} -> {turn.outcome!r}" for turn in turns)
            raise AssertionError(f"{way}\n{seen}\n{tree(folder)}") from error

    writers = [lambda folder, turn, name=name: save(folder, turn, name) for name in NAMES]
    return walk(place, tree, writers, checked, failures=failures, kinds=kinds)


@pytest.mark.parametrize(
    ("failures", "kinds"),
    [(1, (CRASH,)), pytest.param(2, (CRASH, FAIL), marks=pytest.mark.slow)],
)
def test_all_orders(tmp_path: Path, step_by_step: None, failures: int, kinds: Sequence[str]) -> None:
    assert walked(tmp_path, failures, kinds) > 300


@pytest.mark.slow
@pytest.mark.parametrize("of_files", [True, False])
def test_without_locks_of_folders(
    tmp_path: Path, step_by_step: None, monkeypatch: pytest.MonkeyPatch, of_files: bool
) -> None:
    """As on NFS, where only files that are open for writing are locked; or without any locks."""
    original = fcntl.flock

    def flock(handle: int, kind: int) -> None:
        if not of_files or stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        original(handle, kind)

    monkeypatch.setattr(fcntl, "flock", flock)
    if of_files:
        assert walked(tmp_path, 1, (CRASH,)) > 300
        return
    _current.turn, _current.name = None, "a"
    living = Publication.begin(tmp_path / "place")
    _current.name = "b"
    later = Publication.begin(tmp_path / "place")
    assert living.temporary.exists(), "nobody knows that it is dead"
    fill(living.temporary, "a")
    with pytest.raises(PlaceTakenError, match="another save"):
        living.commit("model.safetensors", INDEX)
    fill(later.temporary, "b")
    later.commit("model.safetensors", INDEX)
    living.abandon()
    assert saved_by(tmp_path / "place") == "b"
