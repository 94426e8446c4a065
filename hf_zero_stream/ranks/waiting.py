"""Ranks that wait for each other in two places, where none of them will ever come to the other.

A rank that has waited for some seconds writes into the store for what. If that is something to which another rank has
not come, while that one waits elsewhere, neither goes on any more. This is a proof, which time is not: a slow rank
waits for nothing.
"""

from __future__ import annotations

from contextlib import suppress

from ..errors import PeerError
from .contact import PREFIX, Decision, Verdict
from .presence import Presence


Place = tuple[str, int, str]
"""A meeting, the number of the agreement there, and words that complete "rank 3 ..."; 0: ranks come to the meeting."""


class Wait:
    """This rank's wait for all ranks in a `place`, once it has waited for :data:`.liveness.STUCK_S`."""

    def __init__(self, presence: Presence, place: Place) -> None:
        self._presence = presence
        self._place = place
        self._look_s = 0.0
        self._is_written = False
        self._seen: dict[Place, int] = {}

    def look(self, waited_s: float, *, for_all: bool) -> None:
        """If it is in vain after `waited_s`, end it in all places. One rank in each place looks `for_all` there."""
        presence = self._presence
        if waited_s < self._look_s:
            return
        self._look_s = waited_s + max(1.0, presence.world_size / 1000)
        if not self._is_written:
            presence.store.set(_key(presence.rank), self._place)
            self._is_written = True
        if not for_all:
            return
        found = presence.store.get_many(list(map(_key, range(presence.world_size))))
        elsewhere = {
            tuple(place): rank for rank, place in enumerate(found) if place and not presence.has_come(*place[:2])
        }
        # Only what is seen twice: this rank was no longer on its way then, when the other one began to wait.
        if elsewhere.keys() & self._seen.keys():
            self._end({**elsewhere, self._place: presence.rank})
        self._seen = elsewhere

    def _end(self, ranks: dict[Place, int]) -> None:
        """Write it where all that wait in one of these places look, and all that come there later.

        First into meetings that have begun: a rank that hears of it in another place may go on in one of these.
        """
        each = "; ".join(
            f"rank {rank} {words}" for rank, (*_, words) in sorted(zip(ranks.values(), ranks, strict=True))
        )
        why = (
            f"Ranks wait for each other in several places, and would never go on: {each}. All ranks must go through "
            "the same loads, saves and passes of weight streams, in the same order."
        )
        for meeting, number, _ in sorted(ranks, key=lambda place: not place[1]):
            if number:
                self._presence.store.set_first(f"{meeting}/dead", Verdict(-1, True, "PeerError", why))
            else:
                self._presence.store.set_first(f"{meeting}/decision", Decision("apart", why))

    def close(self) -> None:
        if self._is_written:
            with suppress(PeerError):  # the store is lost
                self._presence.store.set(_key(self._presence.rank), None)


def _key(rank: int) -> str:
    return f"{PREFIX}/waits/{rank}"
