"""Who the ranks of a process group are, and whether their processes still exist, also between loads and saves.

At its first contact a rank writes where it runs into the store of torch's default process group. From then on, ranks
of its host look at its process. Ranks of other hosts connect to a socket that it listens on: its kernel accepts
connections while the process exists; when it ends, the kernel resets them, and refuses new ones. A process that is
stopped, or in which something such as a slow ``dlopen`` holds Python's lock, does not look dead in either way, because
it need not do anything itself.

Contact is made when a process enters ``streaming()`` or, if there is no process group yet, as soon as there is one.

Which ranks share a host cannot be computed from their numbers: launchers number them host by host or round-robin over
hosts (``mpirun --map-by node``, cyclic ``srun``), and some tell a rank nothing about the others of its host. So each
says where it runs, and all derive the same :class:`Topology` from that. What launchers announce in environment
variables counts only for a rank that cannot ask the others.
"""

from __future__ import annotations

import multiprocessing.util
import os
import socket
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ..errors import PeerError, require_names
from ..settings.config import announced_local_rank, announced_local_size
from .contact import PREFIX, Line, Listener, SharedStore, pauses


require_names("torch", distributed_c10d, "_get_default_store", "_update_default_pg", "_world")
require_names("torch", dist.ProcessGroup, "_get_backend")
require_names("torch", dist.Store, "clone")


class Presence:
    """This process among the ranks of a process group; `holds_store`: rank 0's process holds its `store`."""

    def __init__(self, store: dist.Store, rank: int, world_size: int, *, holds_store: bool) -> None:
        self.store = SharedStore(store, ends_with_rank_0=holds_store)
        self.rank = rank
        self.world_size = world_size
        self.group_timeout_s = store.timeout.total_seconds()
        self.rounds: defaultdict[str, int] = defaultdict(int)
        """The number of this rank's next round of each occasion (see :mod:`.rendezvous`)."""
        self.agreements: dict[str, int] = {}
        """Of the meetings that this rank is in, to how many agreements it has come."""
        self.passed: defaultdict[str, list[str]] = defaultdict(list)
        """The keys of earlier rounds of each occasion, until all ranks have come to a later one."""
        self.given_up: dict[int, bool] = {}
        """Ranks that were waited for in vain since all came together last, and whether they had made contact then."""
        self.left_together = "", dict[str, int]()
        """The last meeting of all ranks, and the collectives that this one had begun when it left."""
        self.group_store = weakref.ref(store)
        """The group's own store. Its server, if it is in this process, lives as long as somebody refers to it."""
        self._locations: dict[int, Location] = {}
        self._lines: dict[int, Line] = {}
        self._topology: Topology | None = None
        self._looking = threading.Lock()  # meetings in the background have threads of their own that look
        self._answering = threading.Lock()
        self._is_ending = False
        server: Any = store
        while hasattr(server, "underlying_store"):
            server = server.underlying_store
        # Of stores other than TCP stores: this host's own name, and no port.
        host, port = getattr(server, "host", socket.gethostname()), getattr(server, "port", 0)
        self._neighbours: list[int] = []
        self.listener = Listener(host)
        self.location = Location.here(self.listener.address, self.listener.port)
        try:
            self._make_contact()
        except BaseException:
            self.listener.close()
            raise
        self._finalizer = multiprocessing.util.Finalize(None, self._say_end, args=(host, port), exitpriority=10)

    def _make_contact(self) -> None:
        self.store.set(self._key(self.rank), self.location)
        self._count_on_host = f"{PREFIX}/host/{self.location.host}"
        number = self.store.add(self._count_on_host, 1)
        self.store.set(f"{self._count_on_host}/{number}", self.rank)
        self.listener.answer = self._answer
        self._look()

    @classmethod
    def in_default_group(cls) -> Presence:
        """This process in torch's default process group, made at the first call."""
        global _current
        group_store = distributed_c10d._get_default_store()
        with _making:
            earlier = _current
            if earlier is None or earlier.group_store() is not group_store:
                rank, world_size = dist.get_rank(), dist.get_world_size()
                agent_holds_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun's
                _current = cls(group_store, rank, world_size, holds_store=not agent_holds_store)
                if earlier is not None:  # now that the others find the new sockets where they look
                    earlier.close()
            elif earlier.store.is_lost:  # it may answer again, and the rounds that this rank has come to still count
                earlier.store = SharedStore(group_store, ends_with_rank_0=earlier.store.ends_with_rank_0)
                earlier.store.set(earlier._key(earlier.rank), earlier.location)
            assert _current is not None
            return _current

    def close(self) -> None:
        """Close the sockets, from which other ranks see that this process lives."""
        self._finalizer.cancel()
        self.listener.close()
        for line in self._lines.values():
            line.close()

    def has_come(self, meeting: str, number: int) -> bool:
        """Whether this rank has come to an agreement of a meeting; 0: to the meeting."""
        if meeting in self.agreements:
            return self.agreements[meeting] >= number
        _, occasion, of_round = meeting.split("/")
        return int(of_round) < self.rounds[occasion]

    def topology(self) -> Topology:
        """How the ranks lie on hosts; all of them must have made contact."""
        if self._topology is None:
            self._read_locations(range(self.world_size))
            there = [self._locations[rank] for rank in range(self.world_size)]
            self._topology = Topology([each.host for each in there], [each.machine for each in there], self.rank)
        return self._topology

    def watched(self) -> Sequence[int]:
        """The ranks at which this one looks: rank 0 at all, each rank at rank 0 and at those of its host.

        Of its host it knows the ranks that have made contact.
        """
        if self.rank == 0:
            return range(1, self.world_size)
        with self._looking:
            known, there = len(self._neighbours), self.store.add(self._count_on_host, 0)
            found = self.store.get_many([f"{self._count_on_host}/{number}" for number in range(known + 1, there + 1)])
            if None not in found:  # else a rank has been counted, and is about to write its number
                self._neighbours += found
            return sorted({0, *self._neighbours}.intersection(range(self.world_size)) - {self.rank})

    def _look(self) -> None:
        """Open a line to each rank on another host that this one looks at: a line that was open once tells of its end.

        A process that it finds dead stays so; a load or save that needs it will say so.
        """
        for rank in self.watched():
            self.is_alive(rank)

    def _answer(self, is_new: bool) -> None:
        """In the listener's thread: another rank has opened a line to this one, or asks on one."""
        with self._answering, suppress(PeerError):
            if not self._is_ending:
                if is_new:
                    self._look()
                self.store.set(self._key(self.rank, "progress"), self.progress())

    def progress(self) -> tuple[str, dict[str, int]]:
        """The meeting that all ranks left last, and for each group how many collectives this rank has begun since."""
        meeting, before = self.left_together
        return meeting, {name: count - before.get(name, 0) for name, count in begun_collectives().items()}

    def answers(self, ranks: Sequence[int]) -> list[tuple[str, dict[str, int]]]:
        """What :meth:`progress` gave on each of `ranks` when it was asked last; nothing if it was not."""
        return [(each or ("", {})) for each in self.store.get_many([self._key(rank, "progress") for rank in ranks])]

    def line_to(self, rank: int) -> Line:
        """A new line to `rank`, which has made contact."""
        return Line(self._locations[rank].address, self._locations[rank].port)

    def has_contact(self, rank: int) -> bool:
        """Whether `rank` has ever made contact."""
        with self._looking:
            self._read_locations([rank])
            return rank in self._locations

    def is_alive(self, rank: int) -> bool | None:
        """Whether the process of `rank` exists, without waiting; None if that is not known."""
        with self._looking:
            self._read_locations([rank])
            location = self._locations.get(rank)
            if location is None:
                return None
            is_alive: bool | None = None
            if self.location.sees(location):
                is_alive = location.is_running()
            elif location.port:
                is_alive = self._lines.setdefault(rank, Line(location.address, location.port)).is_alive()
            if is_alive is False and self._has_moved(rank, location):
                # That was where it ran in an earlier process group with the same store.
                del self._locations[rank]
                self._lines.pop(rank, Line("", 0)).close()
                return None
            return is_alive

    def has_answered(self, rank: int) -> bool:
        """Whether the host of `rank`, another one, has ever answered for it."""
        return rank in self._lines and self._lines[rank].was_open

    def end_of(self, rank: int) -> tuple[str, bool]:
        """What to say of `rank`, whose process is gone, and whether it ended by itself."""
        location = self._written_location(rank)
        verb = "ended" if location.has_ended else "died"
        return f"has {verb} (process {location.pid} on {location.host.partition(' ')[0]} is gone)", location.has_ended

    def _has_moved(self, rank: int, known: Location) -> bool:
        return self._written_location(rank)._replace(has_ended=False) != known._replace(has_ended=False)

    def _written_location(self, rank: int) -> Location:
        written = self.store.get(self._key(rank))
        return Location(*written) if written else self._locations[rank]

    def polling(self) -> Iterator[float]:
        """:func:`pauses` in which to ask the store for news: all ranks together ask 10,000 times a second."""
        return pauses(max(0.02, self.world_size / 10_000))

    def _read_locations(self, ranks: Sequence[int]) -> None:
        unknown = [rank for rank in ranks if rank not in self._locations]
        for rank, written in zip(unknown, self.store.get_many([self._key(rank) for rank in unknown]), strict=True):
            if written:
                self._locations[rank] = Location(*written)

    def _key(self, rank: int, what: str = "location") -> str:
        return f"{PREFIX}/{what}/{rank}"

    def _say_end(self, host: str, port: int) -> None:
        """At the exit of the interpreter, tell the others that this process ended by itself."""
        with self._answering:  # a thread that is inside torch when the interpreter is gone would abort the process
            self._is_ending = True
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


def begun_collectives() -> dict[str, int]:
    """For each process group of this rank, by its name, how many collectives the rank has begun, by torch's count.

    And how many groups it has made, or is about to make, for which ranks wait for each other too.
    """
    world = distributed_c10d._world
    found = {"": world.group_count}
    for group, name in list(world.pg_names.items()):
        with suppress(RuntimeError):  # a backend that does not count
            backends = [group._get_backend(device) for device in group._device_types]
            found[name] = sum(backend._get_sequence_number_for_group() for backend in backends)
    return found


def set_default_group(original: Callable[..., Any], group: Any) -> None:
    """In place of the function by which torch notes its default process group."""
    original(group)
    with suppress(Exception):  # a load or save that needs the other ranks will raise it
        make_contact()


def make_contact() -> None:
    """Tell the other ranks, if there are any, where this process runs; the second time does nothing."""
    if not is_alone():
        with suppress(PeerError):  # a load or save that needs the other ranks will raise it
            Presence.in_default_group()


class Location(NamedTuple):
    """Where a rank runs. Containers on one machine share its cores, but neither names, nor files, nor processes."""

    machine: str
    """The same for ranks that share cores and memory: one boot of one kernel."""
    host: str
    """The same for ranks that share files: one machine under one name, which is what launchers call a node."""
    sight: str
    """The same for ranks that see each other's processes; empty where processes cannot be seen."""
    pid: int
    started: int
    """When the process started, in clock ticks since the boot; tells it from a later one with the same `pid`."""
    address: str = ""
    port: int = 0
    """Where the process listens (see :mod:`.presence`); 0 if it does not."""
    has_ended: bool = False
    """Whether the process has written, at its end, that it ended by itself."""

    @classmethod
    def here(cls, address: str = "", port: int = 0) -> Location:
        """Where this process runs."""
        name, pid, machine, sight = socket.gethostname(), os.getpid(), "", ""
        with suppress(OSError):
            with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
                machine = file.read().strip()
            if os.readlink("/proc/self") == str(pid):  # else /proc shows the processes of another namespace
                sight = f"{name} {machine} {os.readlink('/proc/self/ns/pid')}"
        _, started = _state_of(pid) or ("", 0)
        return cls(machine or name, f"{name} {machine}", sight, pid, started, address, port)

    def sees(self, other: Location) -> bool:
        """Whether a process here can look at the one there."""
        return bool(self.sight) and self.sight == other.sight

    def is_running(self) -> bool:
        """Whether the process, which this one sees, runs; true of a stopped process, not of one to be reaped."""
        state = _state_of(self.pid)
        if state is not None:
            return state[0] not in "ZX" and state[1] == self.started
        try:
            os.kill(self.pid, 0)  # /proc may hide the processes of other users
        except OSError as error:
            return not isinstance(error, ProcessLookupError)
        return True


class Topology:
    """How the ranks of a process group lie on hosts, seen from `rank`; `hosts` and `machines` are in order of rank."""

    def __init__(self, hosts: Sequence[str], machines: Sequence[str], rank: int) -> None:
        self.ranks_of_host = [other for other, host in enumerate(hosts) if host == hosts[rank]]
        """Ranks on this rank's host, itself included, in order."""
        self.position = self.ranks_of_host.index(rank)
        self.sharing_cores = machines.count(machines[rank])
        """How many ranks share this rank's machine, itself included."""

    @classmethod
    def announced(cls, rank: int, world_size: int) -> Topology:
        """What the launcher announces, for a rank that cannot ask the others; takes ranks as numbered host by host."""
        first, size = rank - announced_local_rank(), max(1, announced_local_size())
        hosts = [str((other - first) // size) for other in range(world_size)]
        return cls(hosts, hosts, rank)


def _state_of(pid: int) -> tuple[str, int] | None:
    """A process's state letter and start, in ticks since the boot; None if it cannot be seen."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        return fields[0], int(fields[19])
    except (OSError, IndexError, ValueError):
        return None
