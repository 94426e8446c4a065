"""Who the ranks of a process group are, and whether their processes still exist, also between loads and saves.

At its first contact a rank writes where it runs into the store of torch's default process group. From then on, ranks
of its host look at its process. Ranks of other hosts connect to a socket that it listens on, and send nothing: its
kernel accepts connections while the process exists; when it ends, the kernel resets them, and refuses new ones.
A process that is stopped, or in which something such as a slow ``dlopen`` holds Python's lock, does not look dead
in either way, because it need not do anything itself.
"""

from __future__ import annotations

import errno
import multiprocessing.util
import os
import socket
import threading
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ..errors import PeerError, refuse_unknown_version
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
        self._looking = threading.Lock()  # meetings in the background have threads of their own that look
        server: Any = store
        while hasattr(server, "underlying_store"):
            server = server.underlying_store
        # Of stores other than TCP stores: this host's own name, and no port.
        host, port = getattr(server, "host", socket.gethostname()), getattr(server, "port", 0)
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
                agent_holds_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun's
                _current = cls(group_store, rank, world_size, holds_store=not agent_holds_store)
            elif _current.store.is_lost:  # it may answer again, and the rounds that this rank has come to still count
                _current.store = SharedStore(group_store, ends_with_rank_0=_current.store.ends_with_rank_0)
                _current.store.set(_current._key(_current.rank), _current.location)
            return _current

    def group_store(self) -> dist.Store | None:
        """The group's own store. Its server, if it is in this process, lives as long as somebody refers to it."""
        return self._group_store()

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
        with self._looking:
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


class Listener:
    """This process's socket, on the interface that leads `towards` a host. Forked children close their copy of it."""

    def __init__(self, towards: str) -> None:
        self.address, self.port = "", 0
        self._accepted: list[socket.socket] = []
        self._socket: socket.socket | None = None
        with suppress(OSError):
            family, kind, _, _, address = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(address)  # sends nothing, but chooses an interface
                own = probe.getsockname()[0]
            # The backlog: most connections that the kernel holds until the process takes them.
            self._socket = socket.create_server((own, 0), family=family, backlog=4096)
            self._socket.setblocking(False)
            self.address, self.port = self._socket.getsockname()[:2]
            _listeners.add(self)

    def accept(self) -> None:
        """Take the connections that wait, so that there is always room for more."""
        with suppress(OSError):
            while self._socket is not None:
                self._accepted.append(self._socket.accept()[0])

    def close(self) -> None:
        while self._accepted:
            self._accepted.pop().close()
        if self._socket is not None:
            self._socket.close()
        self._socket = None


class Line:
    """A connection to the listener of another rank's process, at `address` and `port`."""

    def __init__(self, address: str, port: int) -> None:
        self._address = (address, port)
        self._socket: socket.socket | None = None
        self.was_open = False
        """Whether it ever led to the process: then no firewall is in between, and silence means something."""

    def is_alive(self) -> bool | None:
        """Whether the process exists, without waiting; None if that is not known (yet)."""
        if self._socket is None:
            self._dial()
            return None
        error = self._socket.connect_ex(self._address)  # of a socket that connects already, how far it has come
        if error in (errno.EINPROGRESS, errno.EALREADY):
            return None
        self.was_open |= error in (0, errno.EISCONN, errno.ECONNRESET, errno.EPIPE)
        if error in (0, errno.EISCONN):
            try:
                self._socket.recv(1)
            except BlockingIOError:
                return True
            except OSError:
                pass  # the connection has been reset
        self.close()
        if error == errno.ECONNREFUSED and self.was_open:
            return False
        self._dial()  # a connection may end for other reasons: what counts is whether there is a new one
        return None

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None

    def _dial(self) -> None:
        with suppress(OSError):
            family = socket.AF_INET6 if ":" in self._address[0] else socket.AF_INET
            self._socket = socket.socket(family, socket.SOCK_STREAM)
            self._socket.setblocking(False)
            # A host that has lost its power resets nothing.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in ((socket.TCP_KEEPIDLE, 1), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 4)):
                self._socket.setsockopt(socket.IPPROTO_TCP, option, value)
            self._socket.connect_ex(self._address)


_listeners: weakref.WeakSet[Listener] = weakref.WeakSet()


def _close_all() -> None:
    for listener in list(_listeners):
        listener.close()


os.register_at_fork(after_in_child=_close_all)
