"""Who is alive among the ranks of one load: heartbeats in the key-value store of torch's default process group.

A rank that was killed would leave the others in a collective until its time-out, which is half an hour for gloo and
ten minutes for NCCL. So while a load lasts, a thread of every rank writes a heartbeat and looks at others': rank 0 at
everybody's, everybody at rank 0's. A rank whose heartbeat has not moved for so many seconds is dead. Ranks of one host
also look at each other's processes, and notice within a second; of these nobody has to be patient. A rank that is
slow, for whatever reason, is alive as long as any of its threads runs: it is waited for.

What one rank finds, a *verdict*, goes into the store, so that all ranks name the same one. A rank that fails, without
dying, announces that in the same way, and the others need not read on.

Cost: one more connection to the store per rank during a load, and three small requests per rank and half second.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import NamedTuple

import psutil
import torch.distributed as dist
from torch.distributed import distributed_c10d

from . import errors
from .errors import HfZeroStreamError, PeerError, VersionError


__all__ = ["PEER_TIMEOUT_S", "Verdict", "Watch", "default_store", "peer_error"]

if not hasattr(distributed_c10d, "_get_default_store") or not hasattr(dist.Store, "clone"):
    raise VersionError(
        "torch.distributed has no _get_default_store or no Store.clone; this version of torch is not known to "
        "hf_zero_stream: install torch>=2.11 or a newer hf_zero_stream."
    )

PEER_TIMEOUT_S = 8
"""Seconds without a heartbeat after which a rank counts as dead, unless the settings say otherwise."""

INTERVAL_S = 0.5
"""Time between two heartbeats of a rank."""

STORE_TIMEOUT_S = 20.0
"""How long the store may take to answer; afterwards it counts as lost."""

FAREWELL_S = 3.0
"""How long rank 0, whose process may hold the store, stays after a death for the others to hear of it."""

_PREFIX = "hf_zero_stream"
_loads = 0
_passed: list[str] = []
"""Keys of earlier meetings, which can go once everybody has come to a later one."""


class Verdict(NamedTuple):
    """Which rank the others need not wait for, and why.

    Attributes:
        rank: the rank; -1 if the store, and not a rank, is lost.
        is_dead: whether it will never come to an agreement; otherwise it is on its way, with an error.
        kind: class of its error.
        message: text of its error, or what was seen of its death.
    """

    rank: int
    is_dead: bool
    kind: str
    message: str

    def error(self) -> HfZeroStreamError:
        """What the other ranks raise."""
        return PeerError(self.message) if self.is_dead else peer_error(self.rank, self.kind, self.message)


def peer_error(rank: int, kind: str, message: str) -> HfZeroStreamError:
    """The error of `rank`, as the others raise it: of the same class if that is ours, else :class:`PeerError`."""
    known = getattr(errors, kind, None) if kind in errors.__all__ else None
    if known is not None:
        return known(f"rank {rank}: {message}")
    return PeerError(f"rank {rank} failed, so this rank gives up too: {kind}: {message}")


class _Beat(NamedTuple):
    """What a rank last wrote of itself: load, beats, meetings that it came to, has it left, where it runs."""

    load: int
    beats: int
    arrived: int
    has_left: bool
    host: str
    pid: int


def default_store() -> dist.Store:
    """The store of the default process group."""
    return distributed_c10d._get_default_store()


class Watch:
    """This rank's heartbeat, and its view of the others', from construction to :meth:`close`.

    All ranks must make their watches in the same order.

    Args:
        store: a store that all ranks use; a connection of its own is opened to it.
        rank: this rank.
        world_size: number of ranks.
        timeout_s: seconds without a heartbeat after which a rank counts as dead.
        neighbours: ranks that may run on this host; those that do are looked at as processes too.
        holds_store: whether rank 0's process holds the store, so that both die together.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        *,
        timeout_s: float = PEER_TIMEOUT_S,
        neighbours: Iterable[int] = (),
        holds_store: bool = True,
    ) -> None:
        global _loads
        _loads += 1
        self.timeout_s = timeout_s
        self.verdict: Verdict | None = None
        """The first verdict of any rank that this rank has heard of."""
        self._load = _loads
        self._rank = rank
        self._world_size = world_size
        self._neighbours = [other for other in neighbours if other != rank and 0 <= other < world_size]
        self._holds_store = holds_store
        self._count = 0
        self._arrived = 0
        self._host, self._pid = _host(), os.getpid()
        self._seen: dict[int, _Beat] = {}
        self._still_s: dict[int, float] = {}
        self._processes: dict[int, psutil.Process] = {}
        self._written: set[int] = set()
        self._echoes: list[HfZeroStreamError] = []
        self._patience_s = store.timeout.total_seconds()
        self._looked = time.monotonic()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._store = store.clone()
        self._store.set_timeout(timedelta(seconds=STORE_TIMEOUT_S))
        self._beat()
        self._thread = threading.Thread(target=self._run, name="hf_zero_stream-liveness", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the heartbeat; others see that this rank has left and not died."""
        self._stop.set()
        self._thread.join(STORE_TIMEOUT_S)
        if self.verdict is not None and self.verdict.is_dead:
            self._say_farewell()
        try:
            with self._lock:
                self._beat(has_left=True)
        except RuntimeError:
            pass  # the store is lost, and with it whoever would look
        del self._store

    # ------------------------------------------------------------------------------------------- other threads

    def check(self) -> None:
        """Raise if there is no point in going on, because a rank is dead or has failed; costs nothing.

        Raises:
            PeerError: a rank is dead.
            HfZeroStreamError: the error that a rank has announced.
        """
        if self.verdict is not None:
            self._echoes.append(self.verdict.error())
            raise self._echoes[-1]

    def is_echo(self, error: BaseException) -> bool:
        """Whether :meth:`check` raised `error`, so that there is nothing new in it."""
        return any(error is echo for echo in self._echoes)

    def announce(self, error: BaseException, *, comes: bool) -> None:
        """Tell the others that this rank has failed, so that they stop as well.

        Args:
            comes: whether it is going to bring its error to the next meeting.
        """
        kind, message = type(error).__name__, str(error)
        try:
            if comes:
                self._pass(Verdict(self._rank, False, kind, message))
            else:
                self._pass(self._death_of(self._rank, f"has given up this load ({kind}: {message})"))
        except RuntimeError:
            self._lose_store()

    def meet(self) -> None:
        """Return once every rank has come here as often as this one; nobody is alarmed by one that is slow.

        Raises:
            PeerError: a rank is dead, or has left without coming, or the store's time-out (that of the process group)
                is over and not all ranks have come.
        """
        self._arrived += 1
        name = f"{_PREFIX}/{self._load}/{self._arrived}"
        try:
            with self._lock:
                is_last = self._store.add(f"{name}/count", 1) == self._world_size
                if is_last:
                    self._store.set(f"{name}/all", b"1")
                    for key in _passed:
                        self._store.delete_key(key)
            self._wait_for(f"{name}/all", is_last)
        except RuntimeError as error:
            if isinstance(error, PeerError):
                raise
            self._lose_store()
        if self.verdict is not None and self.verdict.is_dead:
            raise self.verdict.error()
        _passed[:] = [f"{name}/count", f"{name}/all"]

    def _wait_for(self, key: str, is_there: bool) -> None:
        deadline = time.monotonic() + self._patience_s
        longest = max(0.02, self._world_size / 10_000)  # all ranks together ask 10,000 times a second
        pause = 0.0001
        while not is_there and not (self.verdict is not None and self.verdict.is_dead):
            time.sleep(pause)
            pause = min(longest, pause * 1.5)
            with self._lock:
                is_there = self._store.check([key])
            if not is_there and time.monotonic() > deadline:
                raise PeerError(
                    f"Waited {self._patience_s:g} s, the time-out of the process group, for ranks that did not come: "
                    f"{', '.join(map(str, self._absent()))}. All ranks must make the same load."
                )

    def _absent(self) -> list[int]:
        with self._lock:
            beats = self._read(range(self._world_size))
        return [rank for rank, beat in enumerate(beats) if beat is None or beat.arrived < self._arrived]

    def wait_for_verdict(self) -> Verdict | None:
        """The verdict on whoever closed a connection; None if nobody turns out to be dead."""
        deadline = time.monotonic() + self.timeout_s + 4 * INTERVAL_S
        while (self.verdict is None or not self.verdict.is_dead) and time.monotonic() < deadline:
            time.sleep(0.02)
        return self.verdict

    # ------------------------------------------------------------------------------------------- this thread

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            try:
                with self._lock:
                    self._beat()
                    self._listen()
                    found = None if self.verdict is not None and self.verdict.is_dead else self._look()
                if found is not None:
                    self._pass(found)
            except RuntimeError:
                self._lose_store()
                return

    def _beat(self, has_left: bool = False) -> None:
        self._count += 1
        beat = _Beat(self._load, self._count, self._arrived, has_left, self._host, self._pid)
        self._store.set(f"{_PREFIX}/beat/{self._rank}", json.dumps(beat))

    def _listen(self) -> None:
        """Hear of what another rank has found."""
        for key in (self._verdict_key(False), self._verdict_key(True)):
            if self._store.check([key]):
                self._believe(Verdict(*json.loads(self._store.get(key))))

    def _verdict_key(self, is_dead: bool) -> str:
        return f"{_PREFIX}/{self._load}/{'dead' if is_dead else 'failed'}"

    def _believe(self, verdict: Verdict) -> None:
        """Take up `verdict`, unless there is one; that of a death comes before that of a failure."""
        if self.verdict is None or (verdict.is_dead and not self.verdict.is_dead):
            self.verdict = verdict
            if verdict.is_dead:
                self._store.add(f"{_PREFIX}/{self._load}/heard", 1)

    def _pass(self, verdict: Verdict) -> None:
        """Put `verdict` into the store, and believe the one that was there first."""
        with self._lock:
            text = self._store.compare_set(self._verdict_key(verdict.is_dead), "", json.dumps(verdict))
            self._believe(Verdict(*json.loads(text)))

    def _look(self) -> Verdict | None:
        """Whether one of the ranks that this one looks at is dead."""
        now = time.monotonic()
        # If this process, or the store, has been standing still, so have the heartbeats in it: that is not theirs.
        passed, self._looked = min(now - self._looked, 2 * INTERVAL_S), now
        by_heartbeat = range(1, self._world_size) if self._rank == 0 else (0,)
        ranks = sorted({*by_heartbeat, *self._neighbours})
        for rank, beat in zip(ranks, self._read(ranks), strict=True):
            before = self._seen.get(rank)
            if beat is None or beat.has_left:
                continue  # one that has not begun this load may come whenever it likes
            self._seen[rank] = beat
            self._still_s[rank] = 0.0 if beat != before else self._still_s[rank] + passed
            if self._still_s[rank] > self.timeout_s:
                return self._death_of(rank, f"gave no sign of life for {self.timeout_s:g} s")
            if rank in self._neighbours and beat.host == self._host and self._host and not self._runs(rank, beat.pid):
                return self._death_of(rank, f"has died (process {beat.pid} is gone)")
        return None

    def _read(self, ranks: Sequence[int]) -> list[_Beat | None]:
        """The heartbeats of `ranks` in this load; None for those that have not begun it."""
        keys = {rank: f"{_PREFIX}/beat/{rank}" for rank in ranks}
        self._written |= {rank for rank, key in keys.items() if rank not in self._written and self._store.check([key])}
        there = [rank for rank in ranks if rank in self._written]
        if there and self._store.has_extended_api():
            texts = self._store.multi_get([keys[rank] for rank in there])
        else:
            texts = [self._store.get(keys[rank]) for rank in there]
        beats = {rank: _Beat(*json.loads(text)) for rank, text in zip(there, texts, strict=True)}
        return [beats[rank] if rank in beats and beats[rank].load == self._load else None for rank in ranks]

    def _runs(self, rank: int, pid: int) -> bool:
        """Whether the process of a rank on this host runs; one that nobody has reaped yet does not."""
        try:
            process = self._processes.setdefault(rank, psutil.Process(pid))
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False
        except psutil.Error:
            return True

    def _death_of(self, rank: int, what: str) -> Verdict:
        message = (
            f"rank {rank} {what}, so this rank gives up too. Look into that rank's log, and start all ranks anew."
        )
        return Verdict(rank, True, "PeerError", message)

    def _lose_store(self) -> None:
        if self.verdict is None or not self.verdict.is_dead:
            if self._holds_store:
                self.verdict = self._death_of(0, "has died or ended (the store in its process does not answer)")
            else:
                message = "The launcher's key-value store does not answer any more; start all ranks anew."
                self.verdict = Verdict(-1, True, "PeerError", message)

    def _say_farewell(self) -> None:
        """Keep the store up until the other ranks have heard of the death."""
        deadline = time.monotonic() + (FAREWELL_S if self._rank == 0 and self._holds_store else 0.0)
        while time.monotonic() < deadline:
            try:
                with self._lock:
                    if self._store.add(f"{_PREFIX}/{self._load}/heard", 0) >= self._world_size - 1:
                        return
            except RuntimeError:
                return
            time.sleep(0.05)


def _host() -> str:
    """What processes that can see each other's numbers have in common; empty if they cannot be looked at."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{socket.gethostname()} {file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
