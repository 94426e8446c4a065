"""Presence of this process among the ranks of a process group: where ranks run, and where they are in the program.

At its first *contact* a rank writes where it runs into the store of torch's default process group. Contact is made
when a process enters ``streaming()`` or, if there is no process group yet, as soon as there is one. From then on the
plug-in `watch`, if it is there, knows whether ranks live.

Which ranks share a host cannot be computed from their numbers: launchers number them host by host or round-robin over
hosts (``mpirun --map-by node``, cyclic ``srun``), and some tell a rank nothing about the others of its host. So each
says where it runs, in a digest that goes along with the first agreement, and all derive the same :class:`Topology`
from that. What launchers announce in environment variables counts only for a rank that cannot ask the others.
"""

from __future__ import annotations

import hashlib
import multiprocessing.util
import os
import socket
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ..errors import PeerError, require_names
from ..registry import has_tool, tool
from ..settings.config import announced_local_rank, announced_local_size
from .store import PREFIX, SharedStore, Verdict, pauses


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
        self.next_numbers: defaultdict[str, int] = defaultdict(int)
        """The number of this rank's next rendezvous of each kind (see :mod:`.rendezvous`)."""
        self.passed: defaultdict[str, list[str]] = defaultdict(list)
        """The keys of earlier rendezvous of each kind, until all ranks have come to a later one."""
        self.whereabouts: dict[str, Whereabouts] = {}
        """Meetings that this rank is in, and how far it has come; the last one is written into the store."""
        self.left_together = "", dict[str, int]()
        """The last meeting of all ranks, and the collectives that this one had begun when it left."""
        self.group_store = weakref.ref(store)
        """The group's own store. Its server, if it is in this process, lives as long as somebody refers to it."""
        self._locations: dict[int, Location] = {}
        self._reading = threading.Lock()  # meetings in the background have threads of their own that look
        self._topology: Topology | None = None
        self.interval_s = max(0.5, world_size / 4000)
        """Time between two looks for news of deaths and errors: all together ask the store 4,000 times a second."""
        server: Any = store
        while hasattr(server, "underlying_store"):
            server = server.underlying_store
        # Of stores other than TCP stores: this host's own name.
        towards = getattr(server, "host", socket.gethostname())
        self.watch: Watch | None = tool("HostWatch", "watch")(self, towards) if has_tool("HostWatch") else None
        self.location = Location.here(*(self.watch.ports if self.watch else ()))
        # Before the interpreter is gone: a thread that is inside torch then would abort the process.
        self._finalizer = multiprocessing.util.Finalize(None, self.close, exitpriority=10)
        try:
            self._write_contact()
            if self.watch:
                self.watch.begin()
        except BaseException:
            self.close()
            raise

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
            elif earlier.store.is_lost:  # it may answer again, and this rank still knows where it has been
                earlier.store = SharedStore(group_store, ends_with_rank_0=earlier.store.ends_with_rank_0)
                earlier._write_contact()
            assert _current is not None
            return _current

    def _write_contact(self) -> None:
        self.store.set(self._key(self.rank), self.location)
        self.store.set(self._key(self.rank, "place"), Whereabouts())

    def close(self) -> None:
        """Close the sockets, if there are any, from which other ranks see that this process lives."""
        self._finalizer.cancel()
        if self.watch:
            self.watch.close()

    def write_whereabouts(self, where: Whereabouts) -> None:
        """Write into the store how far this rank has come in a meeting."""
        self.whereabouts[where.meeting] = where
        self.store.set(self._key(self.rank, "place"), where)

    def write_moved(self, meeting: str, moved: int) -> None:
        """Write how many bytes this rank has read or written in a meeting, beside the thread that is in it."""
        self.store.set(self._key(self.rank, "place"), self.whereabouts[meeting]._replace(moved=moved))

    def leave(self, meeting: str) -> None:
        """Write that this rank has left a meeting; it may still be in one that it entered before."""
        self.whereabouts.pop(meeting, None)
        outer = next(reversed(self.whereabouts.values()), Whereabouts())
        self.store.set(self._key(self.rank, "place"), outer._replace(left=meeting))

    def whereabouts_of(self, ranks: Sequence[int]) -> list[Whereabouts]:
        """The places of `ranks`."""
        return [
            Whereabouts(*(each or ())) for each in self.store.get_many([self._key(rank, "place") for rank in ranks])
        ]

    def has_come(self, where: Whereabouts) -> bool:
        """Whether this rank has come there, or has been there; True if `where` is nowhere."""
        if not where.meeting:
            return True
        if where.meeting in self.whereabouts:
            return self.whereabouts[where.meeting].agreements >= where.agreements
        _, kind, number = where.meeting.split("/")
        return int(number) < self.next_numbers[kind]

    def locations_of(self, ranks: Sequence[int]) -> dict[int, Location]:
        """Where those of `ranks` run that have made contact; asked for all at once that were not known before."""
        with self._reading:
            self._read_locations(ranks)
            return {rank: self._locations[rank] for rank in ranks if rank in self._locations}

    def strangers(self, ranks: Sequence[int]) -> list[int]:
        """Those of `ranks` that have never made contact."""
        known = self.locations_of(ranks)
        return [rank for rank in ranks if rank not in known]

    def location_of(self, rank: int, *, again: bool = False) -> Location | None:
        """Where `rank` runs, asked `again` or as it was known before; None without contact."""
        with self._reading:
            if again:
                self._locations.pop(rank, None)
            self._read_locations([rank])
            return self._locations.get(rank)

    def write_progress(self) -> None:
        """Write the :meth:`progress` of this rank for those that ask."""
        self.store.set(self._key(self.rank, "progress"), self.progress())

    def ask(self, ranks: Sequence[int]) -> list[tuple[str, dict[str, int]]]:
        """The :meth:`progress` of each of `ranks`; these write it a little later, so ask again and again."""
        if self.watch:
            self.watch.ask(ranks)
        return [(each or ("", {})) for each in self.store.get_many([self._key(rank, "progress") for rank in ranks])]

    def progress(self) -> tuple[str, dict[str, int]]:
        """The meeting that all ranks left last, and for each group how many collectives this rank has begun since."""
        meeting, before = self.left_together
        return meeting, {name: count - before.get(name, 0) for name, count in begun_collectives().items()}

    def digests(self) -> tuple[str, str] | None:
        """What tells this rank's host and machine from others, for an agreement; None once the topology is known."""
        return None if self._topology else (digest_of(self.location.host), digest_of(self.location.machine))

    def learn(self, digests: Sequence[Sequence[str] | None]) -> None:
        """Know the topology from the :meth:`digests` of all ranks, if each has given its own."""
        if self._topology is None and None not in digests:
            hosts, machines = zip(*filter(None, digests), strict=True)
            self._topology = Topology(hosts, machines, self.rank)

    def topology(self) -> Topology:
        """The layout of the ranks on hosts; all of them must have made contact."""
        if self._topology is None:  # before the first agreement, or some know it from one that failed on this rank
            there = self.locations_of(range(self.world_size)).values()
            self._topology = Topology([each.host for each in there], [each.machine for each in there], self.rank)
        return self._topology

    def _read_locations(self, ranks: Sequence[int]) -> None:
        unknown = [rank for rank in ranks if rank not in self._locations]
        for rank, written in zip(unknown, self.store.get_many([self._key(rank) for rank in unknown]), strict=True):
            if written:
                self._locations[rank] = Location(*written)

    def polling(self) -> Iterator[float]:
        """:func:`pauses` in which to ask the store for news: some twenty in a second, however many ranks ask."""
        return pauses(max(0.02, min(1.0, self.world_size / 2_000)), shortest_s=self.world_size / 100_000)

    def _key(self, rank: int, what: str = "location") -> str:
        return f"{PREFIX}/{what}/{rank}"


class Watch(Protocol):
    """Watch over other ranks' processes, as a plug-in brings it: made of a :class:`Presence`, and of what name or
    address leads to the store's host."""

    ports: Sequence[Any]
    """Of this process: the last fields of its :class:`Location`."""

    def begin(self) -> None:
        """Begin, now that other ranks can find this one."""

    def look(self, also: Sequence[int]) -> Sequence[Verdict]:
        """The verdicts on dead ranks among those that this one watches, and those; without waiting."""

    def ask(self, ranks: Sequence[int]) -> None:
        """Have these ranks write their progress."""

    def close(self) -> None:
        """Let the others see that this process ends, or begins anew, by itself."""


_current: Presence | None = None
_making = threading.Lock()


def is_alone() -> bool:
    """Whether this process has no other rank to talk to; collectives of torch's *fake* groups deliver nothing."""
    if not dist.is_available() or not dist.is_initialized():
        return True
    return dist.get_world_size() == 1 or dist.get_backend() == "fake"


def begun_collectives() -> dict[str, int]:
    """Count the collectives that this rank has begun, as torch does, in each of its process groups, by name.

    And the groups that it has made, or is about to make, for which ranks wait for each other too.
    """
    world = distributed_c10d._world
    found = {"": world.group_count}
    for group, name in list(world.pg_names.items()):
        with suppress(RuntimeError):  # a backend that does not count
            backends = [group._get_backend(device) for device in group._device_types]
            found[name] = sum(backend._get_sequence_number_for_group() for backend in backends)
    return found


def default_group_name() -> str:
    """The name, in :func:`begun_collectives`, of the group of all ranks."""
    world = distributed_c10d._world
    return str(world.pg_names[world.default_pg]) if world.default_pg is not None else ""


def set_default_group(original: Callable[..., Any], group: Any) -> None:
    """Replace the function by which torch notes its default process group."""
    original(group)
    with suppress(Exception):  # a load or save that needs the other ranks will raise it
        make_contact()


def make_contact() -> None:
    """Tell the other ranks, if there are any, where this process runs; the second time does nothing."""
    if not is_alone():
        with suppress(PeerError):  # a load or save that needs the other ranks will raise it
            Presence.in_default_group()


class Whereabouts(NamedTuple):
    """Whereabouts of a rank: in a `meeting`, after so many `agreements`; none if `meeting` is empty."""

    meeting: str = ""
    agreements: int = 0
    doing: str = ""
    """Completes "ranks came to ..."."""
    left: str = ""
    """The meeting that it left last."""
    moved: int = 0
    """The bytes that it has read or written there, a while ago."""


class Location(NamedTuple):
    """Location of a process. Containers on one machine share its cores, but neither names, nor files, nor networks."""

    machine: str
    """The same for ranks that share cores and memory: one boot of one kernel."""
    host: str
    """The same for ranks that share files: one machine under one name, which is what launchers call a node."""
    network: str
    """The same for ranks whose connections to each other stay in one kernel, so that no firewall is in between."""
    pid: int
    address: str
    port: int
    question_port: int
    """The ports of the process, by which it is watched; 0: none."""

    @classmethod
    def here(cls, address: str = "", port: int = 0, question_port: int = 0) -> Location:
        """The location of this process."""
        name, machine, network = socket.gethostname(), "", ""
        with suppress(OSError):
            with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
                machine = file.read().strip()
            network = os.readlink("/proc/self/ns/net")
        host = f"{name} {machine}"
        return cls(machine or name, host, f"{host} {network}", os.getpid(), address, port, question_port)


class Topology:
    """Layout of ranks on hosts, seen from `rank`; `hosts` and `machines` are in order of rank, by any values."""

    def __init__(self, hosts: Sequence[object], machines: Sequence[object], rank: int) -> None:
        self.ranks_of_host = [other for other, host in enumerate(hosts) if host == hosts[rank]]
        """Ranks on this rank's host, itself included, in order."""
        self.position = self.ranks_of_host.index(rank)
        self.sharing_cores = machines.count(machines[rank])
        """The number of ranks on this rank's machine, itself included."""

    @classmethod
    def announced(cls, rank: int, world_size: int) -> Topology:
        """The layout that the launcher announces, for a rank that cannot ask; takes ranks as numbered host by host."""
        first, size = rank - announced_local_rank(), max(1, announced_local_size())
        hosts = [str((other - first) // size) for other in range(world_size)]
        return cls(hosts, hosts, rank)


def digest_of(text: str) -> str:
    """What stands for a text that ranks compare."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
