"""What many ranks ask of one key-value store before the first byte of a load, and its processor time.

::

    python -m benchmarks.ranks --ranks 1024

A process holds a TCP store, as torchrun's agent or rank 0 does. Others hold simulated ranks, threads on hosts of 8,
which go the way of a load's ranks: first contact, the rendezvous, and as many agreements as a load makes before it
reads. What ranks exchange in collectives is left out. Printed are seconds from the first contact to the last rank's
first byte (threads share this machine's cores, so this is the sum of all ranks' work), requests, and the store's
processor time.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time
from contextlib import closing
from datetime import timedelta
from typing import Any

import psutil
import torch.distributed as dist

from hf_zero_stream.ranks.presence import Location, Presence
from hf_zero_stream.ranks.rendezvous import LOAD, Rendezvous
from hf_zero_stream.ranks.watchdog import Watchdog


HOST_SIZE, PROCESSES, AGREEMENTS = 8, 4, 4


class Counted:
    """A store's connection, which the simulated ranks of a process share; counts what they ask."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.requests = 0

    def clone(self) -> Counted:
        return self

    def set_timeout(self, timeout: timedelta) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if not callable(found) or name == "has_extended_api":
            return found

        def counted(*args: Any) -> Any:
            self.requests += 1
            return found(*args)

        return counted


def on_host(location: Location, rank: int) -> Location:
    """`location` as if it were on the host of `rank`."""
    host = f"host {rank // HOST_SIZE}"
    return location._replace(host=host, machine=host, network=host)


def hold_ranks(port: int, first: int, stop: int, world_size: int) -> None:
    """The process of the ranks from `first` to `stop`; prints its requests, and those of the rank that asked most."""
    connection = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=600))
    stores = [Counted(connection) for _ in range(first, stop)]
    presences: list[Presence] = []
    real, making = Location.here, [0]

    Location.here = lambda *ports: on_host(real(*ports), making[0])  # type: ignore[method-assign]
    print("ready", flush=True)
    sys.stdin.readline()
    for rank in range(first, stop):
        making[0], store = rank, stores[rank - first]
        presences.append(Presence(store, rank, world_size, holds_store=False))  # type: ignore[arg-type]

    def load(presence: Presence) -> None:
        arrival = Rendezvous(presence, LOAD)
        with closing(Watchdog(presence, arrival.key, arrival.doing)) as watchdog:
            arrival.gather(watchdog)
            for _ in range(AGREEMENTS):
                watchdog.meet()
            arrival.leave()

    threads = [threading.Thread(target=load, args=(presence,)) for presence in presences]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    requests = [store.requests for store in stores]
    print(sum(requests), requests[0], max(requests), flush=True)
    sys.stdin.readline()
    for presence in presences:
        presence.close()
    os._exit(0)


def hold_store() -> None:
    """The process of the store."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=600), wait_for_workers=False)
    print(store.port, flush=True)
    sys.stdin.readline()


def start(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.ranks", *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def go_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def run(world_size: int) -> None:
    """Print one row for `world_size` ranks."""
    server = start("--store")
    port = int(line_of(server))
    firsts = range(0, world_size, -(-world_size // PROCESSES))
    stops = [*firsts[1:], world_size]
    processes = [start("--hold", port, *part, world_size) for part in zip(firsts, stops, strict=True)]
    for process in processes:
        line_of(process)
    began, before = time.monotonic(), sum(psutil.Process(server.pid).cpu_times()[:2])
    for process in processes:
        go_on(process)
    counts = [[*map(int, line_of(process).split())] for process in processes]
    seconds, used = time.monotonic() - began, sum(psutil.Process(server.pid).cpu_times()[:2]) - before
    total, of_rank_0, most = sum(each[0] for each in counts), counts[0][1], max(each[2] for each in counts)
    print(
        f"{world_size:6,} ranks: {seconds:6.1f} s, {total / world_size:5.1f} requests a rank, {of_rank_0:,} of rank "
        f"0, {most:,} at most; the store's processor {used:.2f} s",
        flush=True,
    )
    for process in (*processes, server):
        go_on(process)
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[64, 256, 1024])
    parser.add_argument("--store", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--hold", type=int, nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.store:
        hold_store()
    elif arguments.hold:
        hold_ranks(*arguments.hold)
    else:
        for world_size in arguments.ranks:
            run(world_size)


if __name__ == "__main__":
    main()
