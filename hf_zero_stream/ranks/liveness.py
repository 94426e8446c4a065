"""Which ranks are alive while they load or save together.

If a rank is killed, the others stay in a collective until its time-out: half an hour for gloo, ten minutes for NCCL.
So during a load or a save a thread of every rank looks at others: rank 0 at all, each rank at rank 0 and at the ranks
of its own host. If the process of a rank can be seen (see :mod:`.presence`), the rank is dead when the process is
gone, and never before. Otherwise it is dead if its heartbeat in the store has not changed for some seconds.

The rank that finds a dead one writes a *verdict* into the store, so that all name the same one. A rank that fails
without dying writes one too, so that the others stop reading. A rank makes four small requests per half second.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple

from ..errors import PeerError
from ..settings.config import StreamingConfig
from .contact import PREFIX, TIMEOUT_S, Verdict, pauses
from .presence import Presence


if TYPE_CHECKING:
    from .waiting import Wait


KEYS = ("agreements", "failed", "dead", "heard")
"""The keys that a meeting may write into the store."""

INTERVAL_S = 0.5
"""Time between two heartbeats of a rank."""

STUCK_S = 10.0
"""After this time a rank looks whether it waits in vain (see :mod:`.waiting`)."""

FAREWELL_S = 3.0
"""After a death, how long rank 0 waits for the others to read of it, because its process may hold the store."""


class _Beat(NamedTuple):
    """A heartbeat: the rank's meeting, its clock, the agreements that it has come to, and whether it has left."""

    meeting: str
    clock_s: float
    agreements: int
    has_left: bool


class Watch:
    """This rank's heartbeat, and its view of the other ranks, from construction to :meth:`close`.

    The keys of this `meeting` in the store begin with its name, which all ranks give, and no other meeting has. Of
    meetings at the same time each has its own kind of heartbeat, `beats`. `doing` completes "ranks came to ...".
    """

    def __init__(self, presence: Presence, meeting: str, beats: str = "beat", doing: str = "") -> None:
        self.timeout_s: float = StreamingConfig.peer_timeout_s
        self.verdict: Verdict | None = None
        """The first that this rank has heard of; one on a dead rank replaces one on a rank that failed."""
        self._presence = presence
        self._store = presence.store
        self.meeting = meeting
        self._beats = f"{PREFIX}/{beats}"
        self._agreements = presence.agreements[meeting] = 0
        self._doing = doing
        self._rounds = sum(presence.rounds.values())
        self._seen: dict[int, tuple[_Beat | None, float]] = {}
        """Of each rank that this one looks at: its last heartbeat, and for how many seconds it has not moved."""
        self._looked = time.monotonic()
        self._adopting = threading.Lock()
        self._stop = threading.Event()
        self._beat()
        self._thread = threading.Thread(target=self._run, name="hf_zero_stream-liveness", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the heartbeat; others see that this rank has left and not died."""
        self._stop.set()
        self._thread.join(TIMEOUT_S)
        with suppress(PeerError):  # nobody looks at the heartbeats in a store that is lost
            if self.knows_dead and self._presence.rank == 0 and self._store.ends_with_rank_0:
                others = self._presence.world_size - 1
                for waited_s in pauses(0.05):
                    if waited_s > FAREWELL_S or self._store.add(f"{self.meeting}/heard", 0) >= others:
                        break
            self._beat(has_left=True)
        self._presence.agreements.pop(self.meeting, None)

    @property
    def knows_dead(self) -> bool:
        """Whether a rank is known to be dead, or the store to be lost."""
        return self.verdict is not None and self.verdict.is_dead

    def check(self, *, dead_only: bool = False) -> None:
        """Raise if a rank is dead or, unless `dead_only`, has announced an error; costs nothing."""
        if self.verdict is not None and (self.verdict.is_dead or not dead_only):
            raise self.verdict.error()

    def announce(self, error: BaseException, *, comes: bool) -> None:
        """Tell the others that this rank has failed, and `comes` to the next agreement with its `error`, or never."""
        verdict = Verdict.of_failure(self._presence.rank, error)
        if not comes:
            verdict = Verdict.of_death(verdict.rank, f"has given up this load ({verdict.kind}: {verdict.message})")
        with suppress(PeerError), self.naming_lost_store():
            self._publish(verdict)

    def meet(self, patience_s: float | None = None) -> None:
        """Return once every rank has come here as often as this one; raises if one dies, or a time-out is over.

        The time-out is `patience_s`, or that of the process group.
        """
        presence = self._presence
        before = self._agreements * presence.world_size
        expected = before + presence.world_size
        self._agreements = presence.agreements[self.meeting] = self._agreements + 1
        timeout_s = presence.group_timeout_s if patience_s is None else patience_s
        key = f"{self.meeting}/agreements"
        wait: Wait | None = None
        with self.naming_lost_store(), ExitStack() as stack:
            rounds, self._rounds = self._rounds, sum(presence.rounds.values())
            if self._rounds != rounds:
                # This rank has been elsewhere, where it may have waited in vain, and been waited for here.
                self._hear()
                self.check(dead_only=True)
            count = self._store.add(key, 1)
            is_first = count == before + 1
            for waited_s in presence.polling():
                self.check(dead_only=True)
                if count >= expected:
                    return
                # Beside a training, which has its own patience, ranks may wait for anything meanwhile.
                if patience_s is None and waited_s > STUCK_S:
                    from .waiting import Wait

                    words = f"has begun to {self._doing}, and waits in the middle"
                    place = self.meeting, self._agreements, words
                    wait = wait or stack.enter_context(closing(Wait(presence, place)))
                    wait.look(waited_s, for_all=is_first)
                if waited_s > timeout_s:
                    raise PeerError(
                        f"Waited {timeout_s:g} s, the time-out of the process group, for ranks that did not come: "
                        f"{', '.join(map(str, self.absent()))}. All ranks must make the same load."
                    )
                count = self._store.add(key, 0)

    def absent(self) -> list[int]:
        """Ranks that have not come to this meeting, or to fewer of its agreements than this one."""
        beats = self._read(range(self._presence.world_size))
        return [
            rank
            for rank, beat in enumerate(beats)
            if beat is None or beat.meeting != self.meeting or beat.agreements < self._agreements
        ]

    def elsewhere(self, ranks: Sequence[int]) -> list[int]:
        """Those of `ranks` that are in a meeting to which this rank has not come, where they may wait for it."""
        found = []
        for rank, values in zip(ranks, self._store.get_many([f"{self._beats}/{rank}" for rank in ranks]), strict=True):
            if values is None or _Beat(*values).has_left:
                continue
            _, occasion, number = _Beat(*values).meeting.split("/")
            if int(number) >= self._presence.rounds[occasion]:
                found.append(rank)
        return found

    def wait_for_verdict(self) -> Verdict | None:
        """The verdict on the rank that closed a connection; None if no rank turns out to be dead."""
        for waited_s in pauses(0.02):
            if self.knows_dead or waited_s > self.timeout_s + 4 * INTERVAL_S:
                break
        return self.verdict

    @contextmanager
    def naming_lost_store(self) -> Iterator[None]:
        """If the store is lost inside, raise the error of the rank that is known to be dead, if there is one."""
        try:
            yield
        except PeerError as error:
            if not self._store.is_lost:
                raise
            if self.verdict is None or not self.verdict.is_dead:
                rank = 0 if self._store.ends_with_rank_0 else -1
                self.verdict = Verdict(rank, True, "PeerError", self._store.why_lost())
            raise self.verdict.error() from error

    def _run(self) -> None:
        with suppress(PeerError), self.naming_lost_store():
            while True:
                # Also before the first pause: a look opens a connection to each host, which tells of a death there.
                self._hear()
                found = None if self.knows_dead else self._look()
                if found is not None:
                    self._publish(found)
                if self._stop.wait(INTERVAL_S):
                    return
                self._beat()

    def _hear(self) -> None:
        """Adopt what others have written."""
        for name in ("failed", "dead"):
            written = self._store.get(f"{self.meeting}/{name}")
            if written is not None:
                self._adopt(Verdict(*written))

    def _beat(self, has_left: bool = False) -> None:
        beat = _Beat(self.meeting, time.monotonic(), self._agreements, has_left)
        self._store.set(f"{self._beats}/{self._presence.rank}", beat)

    def _publish(self, verdict: Verdict) -> None:
        """Write `verdict` into the store, and adopt the first one of its kind that is there."""
        name = "dead" if verdict.is_dead else "failed"
        self._adopt(Verdict(*self._store.set_first(f"{self.meeting}/{name}", verdict)))

    def _adopt(self, verdict: Verdict) -> None:
        """Keep the first verdict; a death replaces a failure."""
        with self._adopting:
            if self.verdict is None or (verdict.is_dead and not self.verdict.is_dead):
                self.verdict = verdict
                if verdict.is_dead:
                    self._store.add(f"{self.meeting}/heard", 1)

    def _look(self) -> Verdict | None:
        """The verdict on the first dead rank among those that this one watches; None if all are alive."""
        now = time.monotonic()
        # Do not count time in which this process or the store was stopped: no heartbeat could arrive.
        passed_s, self._looked = min(now - self._looked, 2 * INTERVAL_S), now
        presence = self._presence
        ranks = presence.watched()
        for rank, beat in zip(ranks, self._read(ranks), strict=True):
            came = beat is not None and beat.meeting == self.meeting
            if beat is not None and came and beat.has_left:
                continue
            is_alive = presence.is_alive(rank)
            if is_alive is False:
                seen, has_ended = presence.end_of(rank)
                return Verdict.of_death(rank, seen, "Ended" if has_ended else "PeerError")
            # A rank that has not come to this meeting may take its time, unless its host has ceased to answer for it.
            # One in another meeting besides writes heartbeats of both, of which perhaps only the other's are seen.
            last, still_s = self._seen.get(rank, (None, 0.0))
            is_quiet = beat == last and (came or presence.has_answered(rank))
            still_s = still_s + passed_s if is_quiet and not is_alive else 0.0
            self._seen[rank] = beat, still_s
            if still_s > self.timeout_s:
                return Verdict.of_death(rank, f"gave no sign of life for {self.timeout_s:g} s")
        return None

    def _read(self, ranks: Sequence[int]) -> list[_Beat | None]:
        """The last heartbeats of `ranks`, perhaps in another meeting than this one; None of those without any."""
        written = self._store.get_many([f"{self._beats}/{rank}" for rank in ranks])
        return [_Beat(*values) if values else None for values in written]
