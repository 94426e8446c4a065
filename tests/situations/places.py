"""Situations of a place that two writers save into: drawn, tried against one rule, and made simpler.

The rule: a load afterwards gives the values of exactly one writer. Whoever has lost has an error of ours, what was
published before is there unless somebody has replaced it, the next save is whole, and nobody waits for ever.
"""

from __future__ import annotations

import logging
import multiprocessing
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.situations.drawn import Drawn
from tests.situations.trial import Finding, Trial
from tests.situations.writers import ON_DISK, VALUES, Fault, Job, Proxy, reader, writers
from tests.support.buckets import BUCKET, s3_bucket, s3_client
from tests.support.cluster import HOST, _start, warm_up


HANGS_S = 40.0
"""More than a request to a bucket is tried again."""

WAITS_S = 4.0
"""After this time a writer is taken to wait for the other one, which is held; then that one goes on."""

_OF_PROXY = ("refused", "busy", "unanswered", "cut", "empty", "login")
_NUMBERS = tuple(str(number) for number in range(1, 25))

AXES: dict[str, tuple[str, ...]] = {
    "place": ("folder", "bucket"),
    "what": ("weights", "state", "state_async"),
    "earlier": ("one", "none"),
    "writers": ("processes", "threads"),
    "fault": ("held", "killed", "no_space", "io_error", "stale", *_OF_PROXY),
    "at": ("write", "rename", "list", "delete", "make", "put", "get", "multipart"),
    "number": _NUMBERS,
    "second": ("whole", "begun", "killed", "failed", "none"),
    "second_at": ("write", "rename", "list", "delete", "make", "put", "get", "multipart"),
    "second_number": _NUMBERS,
    "shape": ("same", "fewer"),
}
"""The values of each axis, simplest first."""


@dataclass(frozen=True)
class Place(Drawn):
    """Two writers of one place.

    Attributes:
        fault: what happens to the first writer, at its operation `at` with this `number`.
        second: the second writer begins when that has happened, and is "whole", or is "killed" or has "failed" at its
            own `second_at`; "begun": it begins before, is held there, and goes on when that has happened.
        shape: whether the second writer's model has as many shards.
    """

    place: str = "folder"
    what: str = "weights"
    earlier: str = "one"
    writers: str = "processes"
    fault: str = "held"
    at: str = "write"
    number: str = "1"
    second: str = "whole"
    second_at: str = "write"
    second_number: str = "1"
    shape: str = "same"

    AXES = AXES
    NAMED = "place"

    def settled(self) -> Place:
        """A second writer without a fault has no place of one."""
        is_faulty = self.second in ("begun", "killed", "failed")
        return self if is_faulty else replace(self, second_at=Place.second_at, second_number=Place.second_number)

    def contradiction(self) -> str | None:
        return contradiction(self)

    @property
    def faults(self) -> dict[str, Fault]:
        """Of the first and of the second writer."""
        kind = {"begun": "held", "killed": "killed", "failed": "no_space" if self.place == "folder" else "refused"}
        second = Fault(kind.get(self.second, ""), self.second_at, int(self.second_number))
        return {
            "first": Fault(self.fault, self.at, int(self.number)),
            "second": second if second.kind else Fault(),
        }


def contradiction(place: Place) -> str | None:
    """Why a situation cannot be."""
    on_disk = place.place == "folder"
    operations = [*ON_DISK] if on_disk else ["list", "delete", "put", "get", "multipart"]
    at_first = place.second in ("begun", "killed", "failed")
    rules = {
        "a place has its own operations": place.at not in operations
        or (at_first and place.second_at not in operations),
        "a place has its own faults": (place.fault in _OF_PROXY) == on_disk and place.fault not in ("held", "killed"),
        "a proxy cuts what is sent, and answers wrongly what is asked": (place.fault == "cut" and place.at != "put")
        or (place.fault in ("empty", "login") and place.at not in ("list", "get")),
        "threads die together": place.writers == "threads" and "killed" in (place.fault, place.second),
        "threads have one access key": place.writers == "threads" and not on_disk and at_first,
        "who is held waits for somebody": place.second == "none" and place.fault == "held",
        "threads are several": place.writers == "threads" and place.second == "none",
    }
    return next((reason for reason, holds in rules.items() if holds), None)


class _Hangs(Exception):
    """Somebody waits for ever; says who."""


class _Driver:
    """The processes of one trial, and the place."""

    def __init__(self, situation: Place, folder: Path, stack: ExitStack) -> None:
        self.situation = situation
        self.found: dict[str, dict[str, Any]] = {}
        """What became of each writer."""
        self.held: set[str] = set()
        self._proxy = Proxy()
        self._processes: dict[str, Any] = {}
        self._connections: dict[str, Connection] = {}
        self._stack = stack
        self._bucket: dict[str, str] = {}
        self.place = str(folder / "place")
        if situation.place == "bucket":
            (folder / "nothing").mkdir(parents=True)
            self._bucket = stack.enter_context(s3_bucket(folder / "nothing", self._proxy))
            self.place = f"s3://{BUCKET}/run"
        self._proxy.kill = lambda name: self._processes[name].kill()

    def job(self, name: str) -> Job:
        fewer = name == "second" and self.situation.shape == "fewer"
        return Job(name, self.place, self.situation.what, 1 if fewer else 3, self.situation.faults.get(name, Fault()))

    def start(self) -> None:
        """All processes; each waits to be told."""
        for name in ("reader", "loader", "last"):
            self._start(reader, [name])
        names = ["first"] if self.situation.second == "none" else ["first", "second"]
        for each in [names] if self.situation.writers == "threads" else [[name] for name in names]:
            self._start(writers, each, [self.job(name) for name in each])
        for name in names if self.situation.place == "bucket" else ():
            self._proxy.expect(name, self.situation.faults[name])

    def _start(self, main: Any, names: list[str], *args: Any) -> None:
        pipes = [multiprocessing.Pipe() for _ in names]
        theirs = [pipe[1] for pipe in pipes]
        environment = {**self._bucket, "HF_ZERO_STREAM_PROGRESS": "false"}
        if self._bucket:
            environment["AWS_ACCESS_KEY_ID"] = names[0]
        process = _start(HOST, main, theirs[0] if main is reader else theirs, *args, environment)
        self._stack.callback(_end, process)
        for name, (ours, _) in zip(names, pipes, strict=True):
            self._processes[name], self._connections[name] = process, ours
        for each in theirs:
            each.close()

    def ask(self, order: Any, who: str) -> dict[str, Any]:
        """Have a reader do something: each load has a process of its own, as a new start of a job has."""
        connection = self._connections[{"a load": "loader", "the last load": "last"}.get(who, "reader")]
        connection.send(order)
        if not connection.poll(HANGS_S):
            raise _Hangs(who)
        found: dict[str, Any] = connection.recv()
        return found

    def begin(self, name: str) -> None:
        self._connections[name].send("save")

    def wait(self, name: str, seconds: float = HANGS_S, *, until_held: bool = False) -> bool:
        """Wait until a writer has ended, or is held; whether it is so."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for each in [each for each in ("first", "second") if each in self._connections and each not in self.found]:
                self._hear(each)
            if name in self.found or name not in self._connections or (until_held and name in self.held):
                return True
            time.sleep(0.01)
        return False

    def _hear(self, name: str) -> None:
        is_held = self.situation.faults[name].kind == "held"
        if is_held and name in self._proxy.struck and self._proxy.struck[name].is_set():
            self.held.add(name)
        if not self._connections[name].poll():
            return
        try:
            message = self._connections[name].recv()
        except EOFError:
            message = {"killed": True}
        if "struck" not in message:
            self.found[name] = message
        elif is_held:
            self.held.add(name)

    def let_go(self, name: str) -> None:
        """Let a writer go on where it is held, or will be."""
        if self.situation.place == "bucket":
            self._proxy.go[name].set()
        elif name not in self.found:
            self._connections[name].send("go on")

    def strays(self) -> list[str]:
        """What is in the place beside one checkpoint."""
        if self.situation.place == "folder":
            there = {str(path.relative_to(self.place)) for path in Path(self.place).rglob("*") if path.is_file()}
            return sorted(name for name in there if name.startswith("."))
        from hf_zero_stream.plugins.remote.lists import LIST  # a plug-in, which may have been taken away

        listed = s3_client(self._bucket).list_objects_v2(Bucket=BUCKET).get("Contents", [])
        names = sorted(entry["Key"].removeprefix("run/") for entry in listed)
        uploads = s3_client(self._bucket).list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])
        # What says whose the place is may stay.
        hidden = [name for name in names if name.startswith(".") and name != LIST]
        return hidden + [f"upload {each['Key']}" for each in uploads]


def _end(process: Any) -> None:
    process.kill()
    process.join()
    process.close()


def trial(situation: Place, folder: Path, checkpoints: Path | None = None) -> Trial:
    """Try a situation in `folder`, which is emptied first."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    warm_up()
    with ExitStack() as stack:
        driver = _Driver(situation, folder, stack)
        driver.start()
        try:
            return Trial(findings=tuple(_tried(driver)))
        except _Hangs as who:
            return Trial(findings=(Finding("hangs", f"{who}; ended: {driver.found}"),))


def _tried(driver: _Driver) -> Iterator[Finding]:
    situation, load = driver.situation, (driver.place, driver.situation.what)
    if situation.earlier == "one":
        driver.ask(driver.job("earlier"), "the earlier save")
    order = ["first", "second"] if situation.second != "begun" else ["second", "first"]
    for name in order if situation.second != "none" else ["first"]:
        driver.begin(name)
        driver.wait(name, WAITS_S, until_held=True)
    # Who is held may have what the other one waits for: that is no hang, as long as it goes on then.
    if "second" in driver.held:
        driver.let_go("second")
    driver.wait("second", WAITS_S)
    if situation.fault == "held":
        driver.let_go("first")
    for name in order:
        if not driver.wait(name):
            raise _Hangs(name)
    found = driver.ask(load, "a load")
    yield from _against_the_rule(situation, driver.found, found)
    after = driver.ask(driver.job("next"), "the next save")
    if not after.get("saved"):
        yield Finding("the next save fails", f"{after}; writers: {driver.found}")
        return
    again = driver.ask(load, "the last load")
    if again.get("values") != [VALUES["next"]]:
        yield Finding("after the next save", f"{again}; writers: {driver.found}, then {found}")
    if strays := driver.strays():
        yield Finding("left", f"{strays}; writers: {driver.found}")


def _against_the_rule(
    situation: Place, writers: dict[str, dict[str, Any]], found: dict[str, Any]
) -> Iterator[Finding]:
    saved = [name for name, each in writers.items() if each.get("saved")]
    # Killed, or failed when it had happened, which its error says.
    perhaps = [name for name, each in writers.items() if "killed" in each or "complete" in each.get("error", "")]
    allowed = [*(saved or ["earlier"] * (situation.earlier == "one")), *perhaps]
    text = f"{found}; writers: {writers}"
    for name, each in writers.items():
        if "error" in each and "HfZeroStreamError" not in each["kinds"]:
            yield Finding("an error of somebody else", f"{name}: {each['error']} {each['frames']}")
    if "values" not in found:
        if saved or situation.earlier == "one":
            yield Finding("lost", text)
    elif len(found["values"]) > 1:
        yield Finding("a mixture", text)
    elif found["values"] not in [[VALUES[name]] for name in allowed]:
        yield Finding("another's values", text)
