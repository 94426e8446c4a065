"""Which ranks share a host: each says where it runs, and all derive the same :class:`Topology` from that.

It cannot be computed from the numbers of the ranks: launchers number them host by host or round-robin over hosts
(``mpirun --map-by node``, cyclic ``srun``), and some tell a rank nothing about the others of its host. What launchers
announce in environment variables counts only for a rank that cannot ask the others.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from ..settings.launcher import announced_local_rank, announced_local_size


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
