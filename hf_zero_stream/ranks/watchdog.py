"""Watchdog of ranks that load or save together: a death, an error or a deadlock ends the meeting on all of them.

If a rank is killed, what collectives of the others do is up to the backend: gloo's fail at once, with an error that
names an address and no rank, and NCCL's may wait for its time-out of ten minutes. A host that is gone, or a process
that is stopped, closes no connection: gloo waits for half an hour then. So during a load or a save a thread of rank 0
looks whether the processes of the others exist, and theirs look at rank 0 (see :mod:`.presence`). A rank is dead when
its process is gone, and never before, or when its host has ceased to answer for it. The rank that finds a dead one
writes a *verdict* into the store, so that all name the same one. A rank that fails without dying writes one too, so
that the others stop reading.

Ranks that wait for each other in two places would never go on. If a rank has waited for some seconds for another one
that is in a place to which it has not come itself, neither goes on any more. This is a proof, which time is not: a
slow rank waits for nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress

from ..errors import PeerError
from .presence import Presence, Whereabouts
from .transport import TIMEOUT_S, Decision, Verdict, pauses


KEYS = ("agreements", "failed", "dead", "left")
"""The keys that a meeting may write into the store."""

INTERVAL_S = 0.5
"""Time between two looks."""

STUCK_S = 10.0
"""After this time a rank looks whether it waits in vain."""

VERDICT_S = 10.0
"""Time for which a rank whose connection was closed waits to hear who has died."""

FAREWELL_S = 3.0
"""Time for which rank 0, whose process may hold the store, waits for others to read what ends a meeting."""


class Watchdog:
    """This rank's view of the others in a `meeting`, from construction to :meth:`close`.

    The keys of the meeting in the store begin with its name, which all ranks give, and no other meeting has. `doing`
    completes "ranks came to ..."; if `is_optional`, they need not. In the background of a training, which has its own
    patience, no wait is too long.
    """

    def __init__(
        self,
        presence: Presence,
        meeting: str,
        doing: str = "",
        *,
        is_optional: bool = False,
        is_background: bool = False,
    ) -> None:
        self.verdict: Verdict | None = None
        """The first that this rank has heard of; one on a dead rank replaces one on a rank that failed."""
        self.also_watched: Sequence[int] = ()
        """Ranks at which this one looks besides those of :meth:`.Presence.watched`."""
        self.meeting = meeting
        self._presence, self._store = presence, presence.store
        self._doing, self._is_background = doing, is_background
        self._agreements = 0
        self._numbers = sum(presence.next_numbers.values())
        self._elsewhere = set[Whereabouts]()
        self._adopting = threading.Lock()
        self._stop = threading.Event()
        if not is_background:
            presence.write_whereabouts(Whereabouts(meeting, 0, "" if is_optional else doing))
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
            self._presence.leave(self.meeting)
            left = self._store.add(f"{self.meeting}/left", 1)
            stays = self._is_background or (self.knows_dead and self._store.ends_with_rank_0)
            for waited_s in pauses(0.05) if stays and self._presence.rank == 0 else ():
                if waited_s > FAREWELL_S or left >= self._presence.world_size - self.knows_dead:
                    break
                left = self._store.add(f"{self.meeting}/left", 0)
            if self._is_background and self._presence.rank == 0:
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
        verdict = Verdict.of_failure(self._presence.rank, error)
        if not comes:
            verdict = Verdict.of_death(verdict.rank, f"has given up this load ({verdict.kind}: {verdict.message})")
        with suppress(PeerError):
            self._publish(verdict)

    def meet(self) -> None:
        """Return once every rank has come here as often as this one.

        Raises PeerError if one dies, or does not come within the time-out of the process group.
        """
        presence = self._presence
        before = self._agreements * presence.world_size
        self._agreements += 1
        if not self._is_background:
            presence.whereabouts[self.meeting] = Whereabouts(self.meeting, self._agreements, self._doing)
        look_s = STUCK_S - 1.0
        numbers, self._numbers = self._numbers, sum(presence.next_numbers.values())
        if self._numbers != numbers:
            # This rank has been elsewhere, where it may have waited in vain, and been waited for here.
            self._hear()
        self.check(dead_only=True)
        count = self._store.add(f"{self.meeting}/agreements", 1)
        is_first = count == before + 1
        for waited_s in presence.polling():
            if count >= before + presence.world_size:
                break
            self.check(dead_only=True)
            if waited_s > look_s and not self._is_background:
                presence.write_whereabouts(presence.whereabouts[self.meeting])
                if is_first:
                    self.end_deadlock(waited_s, self.absent())
                look_s += max(1.0, presence.world_size / 1000)
            if waited_s > presence.group_timeout_s and not self._is_background:
                raise PeerError(
                    f"Waited {presence.group_timeout_s:g} s, the time-out of the process group, for ranks that "
                    f"did not come: {', '.join(map(str, self.absent()))}. All ranks must make the same load."
                )
            count = self._store.add(f"{self.meeting}/agreements", 0)

    def absent(self) -> list[int]:
        """Ranks that are not in this meeting or, as far as is known, have come to fewer of its agreements."""
        places = self._presence.whereabouts_of(range(self._presence.world_size))
        here = self.meeting, self._agreements
        return [rank for rank, where in enumerate(places) if where.meeting != here[0] or where.agreements < here[1]]

    def wait_for_verdict(self) -> Verdict | None:
        """The verdict on the rank that closed a connection; None if no rank turns out to be dead."""
        for waited_s in pauses(0.02):
            if self.knows_dead or waited_s > VERDICT_S:
                break
        return self.verdict

    def end_deadlock(self, waited_s: float, absent: Sequence[int]) -> None:
        """If this rank has waited for long, and some of those `absent` wait elsewhere for it, end it in all places."""
        presence = self._presence
        here = presence.whereabouts[self.meeting]._replace(doing=self._doing)
        ranks = {
            where._replace(left=""): rank for rank, where in zip(absent, presence.whereabouts_of(absent), strict=True)
        }
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
                self._store.set_first(f"{where.meeting}/dead", Verdict(-1, True, "PeerError", why))
            else:
                self._store.set_first(f"{where.meeting}/decision", Decision("apart", why))

    def _run(self) -> None:
        try:
            while True:
                # Also before the first pause: a look opens a connection to each host, which tells of a death there.
                self._hear()
                if not self.knows_dead:
                    self._look()
                if self._stop.wait(INTERVAL_S):
                    return
        except PeerError as lost:
            self._adopt(Verdict(-1, True, "PeerError", str(lost)))

    def _hear(self) -> None:
        """Adopt what others have written."""
        for name in ("failed", "dead"):
            written = self._store.get(f"{self.meeting}/{name}")
            if written is not None:
                self._adopt(Verdict(*written))

    def _publish(self, verdict: Verdict) -> None:
        """Write `verdict` into the store, and adopt the first one of its kind that is there."""
        name = "dead" if verdict.is_dead else "failed"
        self._adopt(Verdict(*self._store.set_first(f"{self.meeting}/{name}", verdict)))

    def _adopt(self, verdict: Verdict) -> None:
        """Keep the first verdict; a death replaces a failure."""
        with self._adopting:
            if self.verdict is None or (verdict.is_dead and not self.verdict.is_dead):
                self.verdict = verdict

    def _look(self) -> None:
        """Publish the verdict on the first dead rank among those that this one watches."""
        presence = self._presence
        for rank in (*presence.watched(), *self.also_watched):
            if presence.is_alive(rank) is False and presence.whereabouts_of([rank])[0].left != self.meeting:
                return self._publish(presence.end_of(rank))


def _waits(where: Whereabouts) -> str:
    if where.agreements:
        return f"has begun to {where.doing}, and waits in the middle"
    return f"waits for all ranks to {where.doing}"
