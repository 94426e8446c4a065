"""Who the ranks of a process group are, and whether their processes still exist, also between loads and saves.

At its first contact a rank writes where it runs into the store of torch's default process group. From then on, ranks
of its host look at its process, and ranks of other hosts ask the kernel of its host (see :mod:`.pulse`). Neither takes
a process for dead that is stopped, or in which something holds Python's lock: it need not do anything.
"""

from __future__ import annotations

import multiprocessing.util
import socket
import threading
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ..errors import PeerError, refuse_unknown_version
from .launchers import agent_holds_store
from .pulse import Line, Listener
from .store import PREFIX, SharedStore, pauses
from .topology import Location, Topology


__all__ = ["Presence", "is_alone", "make_contact"]

_RELIED_ON = ((distributed_c10d, "_get_default_store"), (dist.Store, "clone"))
refuse_unknown_version("torch", [name for owner, name in _RELIED_ON if not hasattr(owner, name)])


class Presence:
    """This process among the ranks of a process group; `holds_store`: rank 0's process holds its `store`."""

    def __init__(self, store: dist.Store, rank: int, world_size: int, *, holds_store: bool) -> None:
        self.store = SharedStore(store, ends_with_rank_0=holds_store)
        self.rank = rank
        self.world_size = world_size
        self.group_timeout_s = store.timeout.total_seconds()
        self.rounds: defaultdict[str, int] = defaultdict(int)
        """The number of this rank's next round of each occasion (see :mod:`.rendezvous`)."""
        self.passed: defaultdict[str, list[str]] = defaultdict(list)
        """The keys of earlier rounds of each occasion, until all ranks have come to a later one."""
        self.last_was_apart = False
        """Whether ranks were missing the last time that they might have shared a load."""
        self._group_store = weakref.ref(store)
        self._locations: dict[int, Location] = {}
        self._lines: dict[int, Line] = {}
        self._topology: Topology | None = None
        host, port = _server_of(store)
        self.listener = Listener(host)
        self.location = Location.here(self.listener.address, self.listener.port)
        self.store.set(self._key(rank), self.location)
        self._finalizer = multiprocessing.util.Finalize(None, self._say_end, args=(host, port), exitpriority=10)

    @classmethod
    def in_default_group(cls) -> Presence:
        """This process in torch's default process group, made at the first call."""
        global _current
        group_store = distributed_c10d._get_default_store()
        with _making:
            if _current is not None and _current._group_store() is not group_store:
                _current.close()
                _current = None
            if _current is None:
                rank, world_size = dist.get_rank(), dist.get_world_size()
                _current = cls(group_store, rank, world_size, holds_store=not agent_holds_store())
            elif _current.store.is_lost:  # it may answer again, and the rounds that this rank has come to still count
                _current.store = SharedStore(group_store, ends_with_rank_0=_current.store.ends_with_rank_0)
                _current.store.set(_current._key(_current.rank), _current.location)
            return _current

    def close(self) -> None:
        """Close the sockets, from which other ranks see that this process lives."""
        self._finalizer.cancel()
        self.listener.close()
        for line in self._lines.values():
            line.close()

    def topology(self) -> Topology:
        """How the ranks lie on hosts; all of them must have made contact."""
        if self._topology is None:
            self._read_locations(range(self.world_size))
            there = [self._locations[rank] for rank in range(self.world_size)]
            self._topology = Topology([each.host for each in there], [each.machine for each in there], self.rank)
        return self._topology

    def neighbours(self) -> list[int]:
        """The other ranks of this host; before the first meeting, those that the launcher announces."""
        topology = self._topology or Topology.announced(self.rank, self.world_size)
        return [rank for rank in topology.ranks_of_host if rank != self.rank]

    def is_alive(self, rank: int) -> bool | None:
        """Whether the process of `rank` exists, without waiting; None if that is not known."""
        self._read_locations([rank])
        location = self._locations.get(rank)
        if location is None:
            return None
        if self.location.sees(location):
            return location.is_running()
        line = self._lines.setdefault(rank, Line(location.address, location.port))
        return line.is_alive() if location.port else None

    def has_answered(self, rank: int) -> bool:
        """Whether the host of `rank`, another one, has ever answered for it."""
        return rank in self._lines and self._lines[rank].was_open

    def end_of(self, rank: int) -> tuple[str, bool]:
        """What to say of `rank`, whose process is gone, and whether it ended by itself."""
        written = self.store.get(self._key(rank))
        location = Location(*written) if written else self._locations[rank]
        verb = "ended" if location.has_ended else "died"
        return f"has {verb} (process {location.pid} on {location.host.partition(' ')[0]} is gone)", location.has_ended

    def polling(self) -> Iterator[float]:
        """:func:`pauses` in which to ask the store for news: all ranks together ask 10,000 times a second."""
        return pauses(max(0.02, self.world_size / 10_000))

    def _read_locations(self, ranks: Sequence[int]) -> None:
        unknown = [rank for rank in ranks if rank not in self._locations]
        for rank, written in zip(unknown, self.store.get_many([self._key(rank) for rank in unknown]), strict=True):
            if written:
                self._locations[rank] = Location(*written)

    def _key(self, rank: int) -> str:
        return f"{PREFIX}/location/{rank}"

    def _say_end(self, host: str, port: int) -> None:
        """At the exit of the interpreter, tell the others that this process ended by itself."""
        if self.store.is_lost or (self.store.ends_with_rank_0 and self.rank == 0):
            return
        with suppress(OSError, PeerError):
            if port:  # torch's client would print a stack if the store has ended already
                socket.create_connection((host, port), 0.5).close()
            self.store.set(self._key(self.rank), self.location._replace(has_ended=True))


_current: Presence | None = None
_making = threading.Lock()


def is_alone() -> bool:
    """Whether this process has no other rank to talk to; collectives of torch's *fake* groups deliver nothing."""
    if not dist.is_available() or not dist.is_initialized():
        return True
    return dist.get_world_size() == 1 or dist.get_backend() == "fake"


def make_contact() -> None:
    """Tell the other ranks, if there are any, where this process runs; the second time does nothing."""
    if not is_alone():
        with suppress(PeerError):  # a load or save that needs the other ranks will raise it
            Presence.in_default_group()


def _server_of(store: dist.Store) -> tuple[str, int]:
    """Host and port of the server of a TCP store; this host's own name and 0 for other stores."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "host", socket.gethostname()), getattr(store, "port", 0)
