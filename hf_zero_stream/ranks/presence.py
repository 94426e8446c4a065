"""Who the ranks of a process group are, and whether their processes are still there: also between loads and saves.

At its first contact (:func:`make_contact`) a rank writes where it runs into the key-value store of torch's default
process group. From then on others can tell that its process is gone: those of its host look at the process, others
ask the kernel of its host (see :mod:`.pulse`). Neither needs the process to do anything, so one in which
something holds Python's lock, or that is stopped, is not taken for dead.
"""

from __future__ import annotations

import json
import multiprocessing.util
import socket
import threading
import weakref
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ..errors import PeerError
from ..versions import refuse_unknown_version
from .launchers import agent_holds_store, announced_local_rank, announced_local_size
from .pulse import Line, Listener
from .topology import Location, Topology


__all__ = ["PREFIX", "STORE_TIMEOUT_S", "Presence", "is_alone", "make_contact", "why_store_is_lost"]

_RELIED_ON = ((distributed_c10d, "_get_default_store"), (dist.Store, "clone"))
refuse_unknown_version("torch", [name for owner, name in _RELIED_ON if not hasattr(owner, name)])

PREFIX = "hf_zero_stream"
"""What all our keys in the store begin with."""

STORE_TIMEOUT_S = 20.0
"""How long the store may take to answer; afterwards it counts as lost."""


class Presence:
    """This process among the ranks of a process group.

    Args:
        store: a store that all ranks use; a connection of its own is opened to it, and stays open.
        rank: this rank.
        world_size: number of ranks.
        holds_store: whether rank 0's process holds the store, so that both end together.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, *, holds_store: bool) -> None:
        # On the connection that is open: to a server that is gone, a new one would be tried for long.
        store.check([self._key(rank)])
        self.rank = rank
        self.world_size = world_size
        self.holds_store = holds_store
        self.group_timeout_s = store.timeout.total_seconds()
        # Those of an earlier presence with the same store go on: the other ranks count on.
        self.rounds, self.passed = _meetings.setdefault(store, ({}, defaultdict(list)))
        """For each occasion to meet, the number of this rank's next round (see :mod:`.rendezvous`); and
        keys of earlier meetings of a kind, which can go once everybody has come to a later one."""
        self.last_was_apart = False
        """Whether ranks did not all come the last time that they might share a load."""
        self.is_lost = False
        """Whether the store did not answer."""
        self.lock = threading.Lock()
        """Held while :attr:`store` is used."""
        self._of = weakref.ref(store)
        self._written: set[str] = set()
        self._locations: dict[int, Location] = {}
        self._lines: dict[int, Line] = {}
        self._topology: Topology | None = None
        host, port = _server_of(store)
        self._listener = Listener(host)
        self.location = Location.here(self._listener.address, self._listener.port)
        self.store = store.clone()
        self.store.set_timeout(timedelta(seconds=STORE_TIMEOUT_S))
        self.store.set(self._key(rank), json.dumps(self.location))
        self._finalizer = multiprocessing.util.Finalize(None, self._say_end, args=(host, port), exitpriority=10)

    @classmethod
    def in_default_group(cls) -> Presence:
        """That of this process in torch's default process group, made at the first call.

        Raises:
            PeerError: the store does not answer any more.
        """
        global _current
        store = distributed_c10d._get_default_store()
        with _making:
            if _current is None or _current._of() is not store or _current.is_lost:
                if _current is not None:
                    _current.close()
                holds_store = not agent_holds_store()
                try:
                    _current = cls(store, dist.get_rank(), dist.get_world_size(), holds_store=holds_store)
                except RuntimeError as error:
                    _current = None
                    raise PeerError(why_store_is_lost(holds_store)) from error
            return _current

    def close(self) -> None:
        """Give back sockets; others can no longer tell from them whether this process lives."""
        self._finalizer.cancel()
        self._listener.close()
        for line in self._lines.values():
            line.close()

    # ------------------------------------------------------------------------------------------- the others

    def topology(self) -> Topology:
        """How the ranks lie on hosts; all of them must have made contact."""
        if self._topology is None:
            self._read_locations(range(self.world_size))
            locations = [self._locations[rank] for rank in range(self.world_size)]
            hosts, machines = [location.host for location in locations], [location.machine for location in locations]
            self._topology = Topology(hosts, machines, self.rank)
        return self._topology

    def neighbours(self) -> list[int]:
        """Other ranks of this host, as far as that is known: before the first meeting, what the launcher says."""
        if self._topology is not None:
            found: Sequence[int] = self._topology.ranks_of_host
        else:
            first = self.rank - announced_local_rank()
            found = range(first, first + announced_local_size())
        return [rank for rank in found if rank != self.rank and 0 <= rank < self.world_size]

    def accept_connections(self) -> None:
        """Take the connections by which others ask for this process."""
        self._listener.accept()

    def is_alive(self, rank: int) -> bool | None:
        """Whether the process of `rank` exists; None if that is not known. Does not wait for it."""
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
        text = self.read([self._key(rank)])[0]
        location = Location(*json.loads(text)) if text else self._locations[rank]
        how = "ended" if location.has_ended else "died"
        return f"has {how} (process {location.pid} on {location.host.partition(' ')[0]} is gone)", location.has_ended

    def read(self, keys: Sequence[str]) -> list[str]:
        """The values of `keys` in the store; empty for those that are not there."""
        with self.lock:
            self._written |= {key for key in keys if key not in self._written and self.store.check([key])}
            there = [key for key in keys if key in self._written]
            if there and self.store.has_extended_api():
                values = self.store.multi_get(there)
            else:
                values = [self.store.get(key) for key in there]
        found = dict(zip(there, values, strict=True))
        return [found[key].decode() if key in found else "" for key in keys]

    def _read_locations(self, ranks: Sequence[int]) -> None:
        unknown = [rank for rank in ranks if rank not in self._locations]
        for rank, text in zip(unknown, self.read([self._key(rank) for rank in unknown]), strict=True):
            if text:
                self._locations[rank] = Location(*json.loads(text))

    def _key(self, rank: int) -> str:
        return f"{PREFIX}/location/{rank}"

    # ------------------------------------------------------------------------------------------- the end

    def _say_end(self, host: str, port: int) -> None:
        """This process ends by itself; where the store has ended already, torch would print a stack for a try."""
        if self.is_lost or (self.holds_store and self.rank == 0):
            return
        with suppress(OSError, RuntimeError):
            if port:
                socket.create_connection((host, port), 0.5).close()
            self.store.set(self._key(self.rank), json.dumps(self.location._replace(has_ended=True)))


_current: Presence | None = None
_Meetings = tuple[dict[str, int], defaultdict[str, list[str]]]
_meetings: weakref.WeakKeyDictionary[dist.Store, _Meetings] = weakref.WeakKeyDictionary()
_making = threading.Lock()


def is_alone() -> bool:
    """Whether this process has nobody to talk to in torch's default process group, or there is none.

    In a *fake* group, which stands for ranks beyond this machine, collectives deliver nothing.
    """
    if not dist.is_available() or not dist.is_initialized():
        return True
    return dist.get_world_size() == 1 or dist.get_backend() == "fake"


def make_contact() -> None:
    """Let others know of this process, if there is a process group; costs nothing the second time."""
    if not is_alone():
        with suppress(PeerError):  # whoever needs the others will be told
            Presence.in_default_group()


def why_store_is_lost(holds_store: bool) -> str:
    """What it means if the store does not answer."""
    if holds_store:
        what = "rank 0 has died or ended (the store in its process does not answer), so this rank gives up too."
        return f"{what} Look into that rank's log, and start all ranks anew."
    return "The launcher's key-value store does not answer any more; start all ranks anew."


def _server_of(store: dist.Store) -> tuple[str, int]:
    """Where the server of a TCP store is; this host's own name and 0 for other stores."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "host", socket.gethostname()), getattr(store, "port", 0)
