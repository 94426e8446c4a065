"""Watchdog of ranks that load or save together: a death, an error or a deadlock ends the meeting on all of them.

If a rank is killed, what collectives of the others do is up to the backend: gloo's fail at once, with an error that
names an address and no rank, and NCCL's may wait for its time-out of ten minutes. A host that is gone, or a process
that is stopped, closes no connection: gloo waits for half an hour then. So during a load or a save a thread of each
rank looks at the ranks that this one watches (see :class:`.presence.Watch`). A rank is dead when its process is gone,
and never before, or when its host has ceased to answer for it. The rank that finds a dead one writes a *verdict* into
the store, so that all name the same one. A rank that fails without dying writes one too, so that the others stop
reading.

Ranks that wait for each other in two places would never go on. If a rank has waited for some seconds for another one
that is in a place to which it has not come itself, neither goes on any more. This is a proof, which time is not: a
slow rank waits for nothing. So the others wait for a rank that lives as long as the bytes that it has read or written
grow; one that does not move for the time-out of the process group ends the meeting.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from ..errors import PeerError
from .presence import Presence, Whereabouts
from .store import TIMEOUT_S, Decision, SharedStore, Verdict, pauses


KEYS = ("agreements", "failed", "dead", "news", "left")
"""The keys that a meeting may write into the store."""

STUCK_S = 10.0
"""After this time a rank looks whether it waits in vain."""

MOVED_S = 10.0
"""Time between two times that a rank says how far it has moved."""

VERDICT_S = 10.0
"""Time for which a rank whose connection was closed waits to hear who has died."""

FAREWELL_S = 3.0
"""Time for which rank 0, whose process may hold the store, waits for others to read what ends a meeting."""


class Watchdog:
    """This rank's view of the others in a `meeting`, from construction to :meth:`close`.

    The keys of the meeting in the store begin with its name, which all ranks give, and no other meeting has. `doing`
    completes "ranks came to ...". In the background of a training, which has its own patience, no wait is too long.
    """

    def __init__(
        self,
        presence: Presence,
        meeting: str,
        doing: str = "",
        *,
        is_background: bool = False,
    ) -> None:
        self.verdict: Verdict | None = None
        """The first that this rank has heard of; one on a dead rank replaces one on a rank that failed."""
        self.also_watched: Sequence[int] = ()
        """Ranks at which this one looks besides those that it watches."""
        self.moved: Callable[[], int] = lambda: 0
        """Gives the bytes that this rank has read or written in the meeting."""
        self.meeting = meeting
        self.presence, self._store = presence, presence.store
        self._doing, self._is_background = doing, is_background
        self._agreements = 0
        self._numbers = sum(presence.next_numbers.values())
        self._elsewhere = set[Whereabouts]()
        self._adopting = threading.Lock()
        self._stop = threading.Event()
        if not is_background:
            presence.write_whereabouts(Whereabouts(meeting, 0, doing))
        self._thread = threading.Thread(target=self._run, name="hf_zero_stream-watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Leave the meeting: others see that this rank has left and not died.

        Rank 0, whose process may hold the store, stays until the others have read of a death. In the background it
        always stays, because no collective follows the last agreement, and deletes the keys.
        """
        self._stop.set()
        self._thread.join(TIMEOUT_S)
        with suppress(PeerError):  # nobody looks for this rank in a store that is lost
            self.presence.leave(self.meeting)
            left = self._store.add(f"{self.meeting}/left", 1)
            stays = self._is_background or (self.knows_dead and self._store.ends_with_rank_0)
            for waited_s in pauses(0.05) if stays and self.presence.rank == 0 else ():
                if waited_s > FAREWELL_S or left >= self.presence.world_size - self.knows_dead:
                    break
                left = self._store.add(f"{self.meeting}/left", 0)
            if self._is_background and self.presence.rank == 0:
                self._store.delete(f"{self.meeting}/{name}" for name in KEYS)

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
        verdict = Verdict.of_failure(self.presence.rank, error)
        if not comes:
            verdict = Verdict.of_death(verdict.rank, f"has given up this load ({verdict.kind}: {verdict.message})")
        with suppress(PeerError):
            self._publish(verdict)

    def end_failed(self) -> None:
        """If a rank has failed, end the meeting, in which others wait for it elsewhere than at the next agreement."""
        failed = self.verdict
        if failed is not None and not failed.is_dead:
            self._publish(Verdict.of_death(failed.rank, f"has failed ({failed.kind}: {failed.message})"))

    def meet(self) -> None:
        """Return once every rank has come here as often as this one.

        Raises PeerError if one dies, or lives and does not move within the time-out of the process group.
        """
        presence, store = self.presence, self._store
        before = self._agreements * presence.world_size
        self._agreements += 1
        if not self._is_background:
            presence.whereabouts[self.meeting] = Whereabouts(self.meeting, self._agreements, self._doing)
        numbers, self._numbers = self._numbers, sum(presence.next_numbers.values())
        if self._numbers != numbers:
            # This rank has been elsewhere, where it may have waited in vain, and been waited for here.
            self._hear()
        self.check(dead_only=True)
        count = store.add(f"{self.meeting}/agreements", 1)
        is_first = count == before + 1  # it looks, on behalf of all, why others do not come
        look_s, moved_s, stood = min(STUCK_S - 1.0, presence.group_timeout_s / 4), 0.0, dict[int, Whereabouts]()
        for waited_s in presence.polling():
            if count >= before + presence.world_size:
                break
            self.check(dead_only=True)
            if waited_s > look_s and not self._is_background:
                look_s = waited_s + max(1.0, presence.world_size / 1000)
                presence.write_whereabouts(presence.whereabouts[self.meeting])
                if is_first:
                    stand = self.absent()
                    self.end_deadlock(waited_s, stand)
                    if any(stood.get(rank) != where for rank, where in stand.items()):
                        moved_s, stood = waited_s, stand
                    elif waited_s - moved_s > presence.group_timeout_s:
                        self._end_standstill(waited_s, stand)
            count = store.add(f"{self.meeting}/agreements", 0)

    def absent(self) -> dict[int, Whereabouts]:
        """Ranks that are not in this meeting or, as far as is known, have come to fewer of its agreements."""
        places = self.presence.whereabouts_of(range(self.presence.world_size))
        here = self.meeting, self._agreements
        return {
            rank: where for rank, where in enumerate(places) if where.meeting != here[0] or where.agreements < here[1]
        }

    def wait_for_verdict(self) -> Verdict | None:
        """The verdict on the rank that closed a connection; None if no rank turns out to be dead."""
        for waited_s in pauses(0.02):
            if self.knows_dead or waited_s > VERDICT_S:
                break
        return self.verdict

    def end_deadlock(self, waited_s: float, absent: Mapping[int, Whereabouts]) -> None:
        """If this rank has waited for long, and some of those `absent` wait elsewhere for it, end it in all places."""
        presence = self.presence
        here = presence.whereabouts[self.meeting]._replace(doing=self._doing)
        ranks = {where._replace(left=""): rank for rank, where in absent.items()}
        ranks = {where: rank for where, rank in ranks.items() if where.doing and not presence.has_come(where)}
        seen, self._elsewhere = self._elsewhere, set(ranks)
        if waited_s < STUCK_S or not seen & ranks.keys():  # what is seen once may be over in this moment
            return
        each = "; ".join(f"rank {rank} {_waits(where)}" for where, rank in {here: presence.rank, **ranks}.items())
        why = (
            f"Ranks wait for each other in several places, and would never go on: {each}. All ranks must go through "
            "the same loads, saves and passes of weight streams, in the same order."
        )
        # First into meetings that have begun: a rank that hears of it in another place may go on in one of these.
        for where in sorted((here, *ranks), key=lambda where: not where.agreements):
            if where.agreements:
                _tell(self._store, where.meeting, Verdict(-1, True, "PeerError", why))
            else:
                self._store.set_first(f"{where.meeting}/decision", Decision("apart", why))

    def _end_standstill(self, waited_s: float, stand: Mapping[int, Whereabouts]) -> None:
        """End the meeting, of which these ranks live, and have not moved for the time-out of the process group."""
        shown = [
            f"rank {rank} {_stands(where) if where.meeting == self.meeting else 'has left it'}"
            for rank, where in [*stand.items()][:8]
        ]
        why = (
            f"Waited {waited_s:.0f} s to {self._doing}. {len(stand)} of {self.presence.world_size} ranks do not come, "
            f"and have not moved for {self.presence.group_timeout_s:g} s, the time-out of the process group: "
            f"{'; '.join(shown)}. Look into their logs, and at what they do (py-spy dump). All ranks must make the "
            "same load."
        )
        _tell(self._store, self.meeting, Verdict(-1, True, "PeerError", why))

    def _run(self) -> None:
        interval_s = self.presence.interval_s
        said_s, said = time.monotonic(), 0
        try:
            while True:
                # Also before the first pause: a look opens a connection to each host, which tells of a death there.
                self._hear()
                if not self.knows_dead:
                    self._look()
                if self._stop.wait(interval_s):
                    return
                moved = said if self._is_background else self.moved()
                if moved != said and time.monotonic() - said_s > min(MOVED_S, self.presence.group_timeout_s / 4):
                    said_s, said = time.monotonic(), moved
                    self.presence.write_moved(self.meeting, moved)
        except PeerError as lost:
            self._adopt(Verdict(-1, True, "PeerError", str(lost)))

    def _hear(self) -> None:
        """Adopt what others have written, of which one key tells."""
        if self._store.get(f"{self.meeting}/news"):
            for name in ("failed", "dead"):
                written = self._store.get(f"{self.meeting}/{name}")
                if written is not None:
                    self._adopt(Verdict(*written))

    def _publish(self, verdict: Verdict) -> None:
        """Write `verdict` into the store, and adopt the first one of its kind that is there."""
        self._adopt(_tell(self._store, self.meeting, verdict))

    def _adopt(self, verdict: Verdict) -> None:
        """Keep the first verdict; a death replaces a failure."""
        with self._adopting:
            if self.verdict is None or (verdict.is_dead and not self.verdict.is_dead):
                self.verdict = verdict

    def _look(self) -> None:
        """Publish the verdict on the first dead rank among those that this one watches."""
        presence = self.presence
        for verdict in presence.watch.look(self.also_watched) if presence.watch else ():
            if presence.whereabouts_of([verdict.rank])[0].left != self.meeting:
                return self._publish(verdict)


def _tell(store: SharedStore, meeting: str, verdict: Verdict) -> Verdict:
    """Write `verdict` into the store for the ranks of a meeting; returns the first one of its kind there."""
    first = Verdict(*store.set_first(f"{meeting}/{'dead' if verdict.is_dead else 'failed'}", verdict))
    store.set(f"{meeting}/news", True)
    return first


def _stands(where: Whereabouts) -> str:
    return f"has begun to {where.doing}, and has read or written {where.moved:,} bytes"


def _waits(where: Whereabouts) -> str:
    if where.agreements:
        return f"has begun to {where.doing}, and waits in the middle"
    return f"waits for all ranks to {where.doing}"
