"""Which rank looks at which: on each host one rank looks at all, and rank 0 at these.

1,024 ranks on 128 hosts are 128 connections of rank 0's, and 8 of one rank on each host. That one is the first on its
host to make contact; the others look at it, and it at rank 0, so that the death of a rank that looks is told, too. A
rank that makes contact writes itself into a roll in the store, and asks the one that watches it to look there. No rank
reads what it does not watch.
"""

from __future__ import annotations

import logging
import os
import resource
import threading
from collections.abc import Sequence
from contextlib import suppress

from ...errors import PeerError
from ...plugin_api import PREFIX, Location, Presence, Verdict, digest_of
from .lines import ENDED, Line, Listener


logger = logging.getLogger(__name__)

SPARE_HANDLES, LAST_HANDLES = 512, 64
"""Handles that are left to others of this process (shards, the store's server, connections of collectives): as many as
this if the limit can be raised, and these at least."""


class HostWatch:
    """See :class:`.ranks.presence.Watch`; `towards` leads to the host of the store."""

    def __init__(self, presence: Presence, towards: str) -> None:
        self._presence = presence
        self._listener = Listener(towards)
        self.ports = self._listener.address, self._listener.port, self._listener.question_port
        self._lines: dict[int, tuple[Location, Line]] = {}
        self._looking = threading.Lock()  # meetings in the background have threads of their own that look
        self._is_full = False
        """Whether there is no handle left for another line."""

    def begin(self) -> None:
        store, rank, network = self._presence.store, self._presence.rank, self._presence.location.network
        host = f"{PREFIX}/host/{digest_of(network)}"
        self._first_key = f"{host}/first"
        self._host, self._hosts = Roll(self._presence, host), Roll(self._presence, f"{PREFIX}/hosts")
        self._first = store.set_first(self._first_key, rank)
        if self._is_first:
            self._hosts.add(rank)
        else:
            self._host.add(rank)
        self._listener.answer = self._answer
        self.look(())
        self.ask(self._watched())  # so that they look, too

    def close(self) -> None:
        self._listener.close()
        for _, line in self._lines.values():
            line.close()

    @property
    def _is_first(self) -> bool:
        return bool(self._first == self._presence.rank)

    def _watched(self) -> list[int]:
        rank, ranks = self._presence.rank, [0]
        if rank == 0:
            ranks += self._hosts.ranks()
        if not self._is_first:
            ranks.append(self._first_of_host())
        if self._is_first:
            ranks += self._host.ranks()
        elif rank != 0:
            ranks.remove(0)
        return [other for other in dict.fromkeys(ranks) if other != rank]

    def _first_of_host(self) -> int:
        """The rank that watches this host; this one, if that runs elsewhere now, in another group with this store."""
        there, own = self._presence.location_of(self._first), self._presence.location
        if there is not None and there.network != own.network:
            rank = self._presence.rank
            self._first = self._presence.store.set_first(self._first_key, rank, instead_of=self._first)
            if self._is_first:
                self._hosts.add(rank)
        return self._first

    def look(self, also: Sequence[int]) -> list[Verdict]:
        """See :class:`.ranks.presence.Watch`.

        A line that was open once tells of the end of a process, to a load or save that needs it. So lines are opened
        when ranks make contact.
        """
        dead = []
        with self._looking:
            for rank in self._presence.locations_of([*dict.fromkeys((*self._watched(), *also))]):
                if self._is_alive(rank) is False:
                    location, line = self._lines[rank]
                    seen = f"{line.end} (process {location.pid} on {location.host.partition(' ')[0]})"
                    dead.append(Verdict.of_death(rank, seen, "Ended" if line.end == ENDED else "PeerError"))
        return dead

    def _is_alive(self, rank: int) -> bool | None:
        """Whether the process of `rank` exists, without waiting; None if that is not known."""
        location = self._presence.location_of(rank)
        if location is None or not location.port:
            return None
        if rank not in self._lines:
            if not self._has_room():
                return None
            is_local = location.network == self._presence.location.network
            self._lines[rank] = location, Line(location.address, location.port, is_local=is_local)
        known, line = self._lines[rank]
        is_alive = line.is_alive()
        if is_alive is False and self._presence.location_of(rank, again=True) != known:
            # That was where it ran in an earlier process group with the same store.
            self._lines.pop(rank)[1].close()
            return None
        return is_alive

    def _has_room(self) -> bool:
        """Whether one more line leaves room for other files; raises this process's soft limit of them if it must."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        used = len(os.listdir("/proc/self/fd"))
        if soft == resource.RLIM_INFINITY or used + SPARE_HANDLES < soft:
            return True
        wanted = 2 * soft if hard == resource.RLIM_INFINITY else min(2 * soft, hard)
        if wanted > soft:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            logger.info("the soft limit of open files is raised from %d to %d, to watch other ranks", soft, wanted)
            return self._has_room()
        if used + LAST_HANDLES < soft:
            return True
        if not self._is_full:
            self._is_full = True
            logger.warning(
                "rank %d can watch %d ranks only, because this process may open %d files (ulimit -n, which cannot be "
                "raised). The death of another one may be told late, by a time-out.",
                self._presence.rank,
                len(self._lines),
                soft,
            )
        return False

    def ask(self, ranks: Sequence[int]) -> None:
        for location in self._presence.locations_of(ranks).values():
            if location.question_port:
                self._listener.ask(location.address, location.question_port)

    def _answer(self) -> None:
        """Answer another rank that has made contact, or asks; called in the listener's thread."""
        with suppress(PeerError):
            self.look(())
            self._presence.write_progress()


class Roll:
    """A list in the store into which ranks write themselves; `key` begins its keys."""

    def __init__(self, presence: Presence, key: str) -> None:
        self._presence, self._key = presence, key
        self._ranks: list[int] = []

    def add(self, rank: int) -> None:
        store = self._presence.store
        store.set(f"{self._key}/{store.add(f'{self._key}/count', 1) - 1}", rank)

    def ranks(self) -> list[int]:
        """The ranks that are known to be in it: one that adds itself now may come a look later."""
        store = self._presence.store
        new = range(len(self._ranks), store.add(f"{self._key}/count", 0))
        if new:
            for rank in store.get_many([f"{self._key}/{number}" for number in new]):
                if rank is None:
                    break
                self._ranks.append(rank)
        return self._ranks
