"""Who is alive among the ranks of one meeting: heartbeats in the key-value store of torch's default process group.

A rank that was killed would leave the others in a collective until its time-out, which is half an hour for gloo and
ten minutes for NCCL. So from the moment that it comes to a load or a save until that ends, a thread of every rank
looks at others: rank 0 at everybody, everybody at rank 0 and at the ranks of its own host. Whoever can be looked at,
as a process or through the kernel of its host (see :mod:`.presence`), is dead when its process is gone,
and no sooner: a rank that is slow is waited for, whatever makes it slow. For the others there are heartbeats; a rank
whose heartbeat has not moved for so many seconds is dead.

What one rank finds, a *verdict*, goes into the store, so that all ranks name the same one. A rank that fails, without
dying, announces that in the same way, and the others need not read on.

Cost: three small requests to the store per rank and half second.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from .. import errors
from ..errors import HfZeroStreamError, PeerError
from .presence import PREFIX, STORE_TIMEOUT_S, Presence, why_store_is_lost


__all__ = ["PEER_TIMEOUT_S", "VERDICT_KEYS", "Verdict", "Watch", "peer_error"]

PEER_TIMEOUT_S = 8
"""Seconds without a heartbeat after which a rank counts as dead, unless the settings say otherwise."""

INTERVAL_S = 0.5
"""Time between two heartbeats of a rank."""

VERDICT_KEYS = ("failed", "dead", "heard")
"""What a meeting may have in the store of ranks that failed."""

FAREWELL_S = 3.0
"""How long rank 0, whose process may hold the store, stays after a death for the others to hear of it."""


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
    """What a rank last wrote of itself: meeting, beats, agreements that it came to, has it left."""

    meeting: str
    beats: int
    arrived: int
    has_left: bool


class Watch:
    """This rank's heartbeat, and its view of the others', from construction to :meth:`close`.

    Args:
        presence: this rank among the others.
        meeting: a name that no other meeting has; the same on all ranks.
        timeout_s: seconds without a heartbeat after which a rank counts as dead.
    """

    def __init__(self, presence: Presence, meeting: str, *, timeout_s: float = PEER_TIMEOUT_S) -> None:
        self.timeout_s = timeout_s
        self.verdict: Verdict | None = None
        """The first verdict of any rank that this rank has heard of."""
        self._presence = presence
        self._meeting = meeting
        self._rank = presence.rank
        self._world_size = presence.world_size
        self._store, self._lock = presence.store, presence.lock
        self._count = 0
        self._arrived = 0
        self._seen: dict[int, _Beat | None] = {}
        self._still_s: dict[int, float] = {}
        self._echoes: list[HfZeroStreamError] = []
        self._looked = time.monotonic()
        self._stop = threading.Event()
        self._beat()
        presence.accept_connections()
        self._thread = threading.Thread(target=self._run, name="hf_zero_stream-liveness", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the heartbeat; others see that this rank has left and not died."""
        self._stop.set()
        self._thread.join(STORE_TIMEOUT_S)
        if self.verdict is not None and self.verdict.is_dead:
            self._say_farewell()
        if not self._presence.is_lost:
            try:
                self._beat(has_left=True)
            except RuntimeError:
                self._presence.is_lost = True  # and with the store whoever would look

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
        name = f"{self._meeting}/{self._arrived}"
        try:
            with self._lock:
                is_last = self._store.add(f"{name}/count", 1) == self._world_size
                if is_last:
                    self._store.set(f"{name}/all", b"1")
                    for key in self._presence.passed["agreements"]:
                        self._store.delete_key(key)
            self._wait_for(f"{name}/all", is_last)
        except RuntimeError as error:
            if isinstance(error, PeerError):
                raise
            self._lose_store()
        if self.verdict is not None and self.verdict.is_dead:
            raise self.verdict.error()
        self._presence.passed["agreements"] = [f"{name}/count", f"{name}/all"]

    def _wait_for(self, key: str, is_there: bool) -> None:
        deadline = time.monotonic() + self._presence.group_timeout_s
        longest = max(0.02, self._world_size / 10_000)  # all ranks together ask 10,000 times a second
        pause = 0.0001
        while not is_there and not (self.verdict is not None and self.verdict.is_dead):
            time.sleep(pause)
            pause = min(longest, pause * 1.5)
            with self._lock:
                is_there = self._store.check([key])
            if not is_there and time.monotonic() > deadline:
                raise PeerError(
                    f"Waited {self._presence.group_timeout_s:g} s, the time-out of the process group, for ranks that "
                    f"did not come: {', '.join(map(str, self.absent()))}. All ranks must make the same load."
                )

    def absent(self) -> list[int]:
        """Ranks that have not come to this meeting, or to as many of its agreements as this one."""
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
        try:
            while True:
                # At once: before a rank can die, there is a line to its host, which tells of its death.
                self._listen()
                found = None if self.verdict is not None and self.verdict.is_dead else self._look()
                if found is not None:
                    self._pass(found)
                if self._stop.wait(INTERVAL_S):
                    return
                self._beat()
        except RuntimeError:
            self._lose_store()

    def _beat(self, has_left: bool = False) -> None:
        self._count += 1
        beat = _Beat(self._meeting, self._count, self._arrived, has_left)
        with self._lock:
            self._store.set(f"{PREFIX}/beat/{self._rank}", json.dumps(beat))

    def _listen(self) -> None:
        """Hear of what another rank has found."""
        with self._lock:
            for key in (self._verdict_key(False), self._verdict_key(True)):
                if self._store.check([key]):
                    self._believe(Verdict(*json.loads(self._store.get(key))))

    def _verdict_key(self, is_dead: bool) -> str:
        return f"{self._meeting}/{'dead' if is_dead else 'failed'}"

    def _believe(self, verdict: Verdict) -> None:
        """Take up `verdict`, unless there is one; that of a death comes before that of a failure."""
        if self.verdict is None or (verdict.is_dead and not self.verdict.is_dead):
            self.verdict = verdict
            if verdict.is_dead:
                self._store.add(f"{self._meeting}/heard", 1)

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
        watched = range(1, self._world_size) if self._rank == 0 else (0,)
        ranks = sorted({*watched, *self._presence.neighbours()})
        for rank, beat in zip(ranks, self._read(ranks), strict=True):
            if beat is not None and beat.has_left:
                continue
            is_alive = self._presence.is_alive(rank)
            if is_alive is False:
                what, has_ended = self._presence.end_of(rank)
                return self._death_of(rank, what, kind="Ended" if has_ended else "PeerError")
            # One that has not come here may come whenever it likes; but if its host answered before, that goes on.
            is_quiet = beat == self._seen.get(rank) and (beat is not None or self._presence.has_answered(rank))
            self._seen[rank] = beat
            self._still_s[rank] = self._still_s.get(rank, 0.0) + passed if is_quiet and not is_alive else 0.0
            if self._still_s[rank] > self.timeout_s:
                return self._death_of(rank, f"gave no sign of life for {self.timeout_s:g} s")
        return None

    def _read(self, ranks: Sequence[int]) -> list[_Beat | None]:
        """The heartbeats of `ranks` in this meeting; None for those that have not come to it."""
        texts = self._presence.read([f"{PREFIX}/beat/{rank}" for rank in ranks])
        beats = [_Beat(*json.loads(text)) if text else None for text in texts]
        return [beat if beat is not None and beat.meeting == self._meeting else None for beat in beats]

    def _death_of(self, rank: int, what: str, kind: str = "PeerError") -> Verdict:
        message = (
            f"rank {rank} {what}, so this rank gives up too. Look into that rank's log, and start all ranks anew."
        )
        return Verdict(rank, True, kind, message)

    def _lose_store(self) -> None:
        self._presence.is_lost = True
        if self.verdict is None or not self.verdict.is_dead:
            holds_store = self._presence.holds_store
            self.verdict = Verdict(0 if holds_store else -1, True, "PeerError", why_store_is_lost(holds_store))

    def _say_farewell(self) -> None:
        """Keep the store up until the other ranks have heard of the death."""
        deadline = time.monotonic() + (FAREWELL_S if self._rank == 0 and self._presence.holds_store else 0.0)
        while time.monotonic() < deadline:
            try:
                with self._lock:
                    if self._store.add(f"{self._meeting}/heard", 0) >= self._world_size - 1:
                        return
            except RuntimeError:
                return
            time.sleep(0.05)
