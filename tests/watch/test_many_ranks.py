"""What many ranks ask of the one store, and open as sockets: the same for each, however many there are.

Ranks are simulated, in this process: each has its own presence, its own sockets and its own count of what it asks of a
real TCP store. They run on hosts of 8.
"""

import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from benchmarks.ranks import HOST_SIZE, Counted, on_host
from hf_zero_stream.plugins.watch import lines
from hf_zero_stream.plugins.watch.lines import Line, Listener
from hf_zero_stream.ranks.presence import Location, Presence, digest_of
from hf_zero_stream.ranks.rendezvous import LOAD, Rendezvous
from hf_zero_stream.ranks.watchdog import Watchdog
from tests.support.cluster import SOON_S
from tests.watch.test_contact import said


pytestmark = pytest.mark.plugin("watch")


class Ranks:
    """Simulated ranks of one process group."""

    def __init__(self, world_size: int) -> None:
        self.server = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
        self.world_size = world_size
        self.stores = [Counted(self.server) for _ in range(world_size)]
        self.presences: dict[int, Presence] = {}
        self._real, self._making = Location.here, 0

    def here(self, *ports: Any) -> Location:
        return on_host(self._real(*ports), self._making)

    def make(self) -> None:
        """All make contact, one after the other, in some order."""
        order = random.Random(self.world_size).sample(range(self.world_size), self.world_size)
        for rank in order:
            self._making = rank
            store: Any = self.stores[rank]
            self.presences[rank] = Presence(store, rank, self.world_size, holds_store=False)

    def lines(self, rank: int) -> list[Line]:
        watch: Any = self.presences[rank].watch
        return [line for _, line in watch._lines.values()]

    def wait_for_lines(self, wanted: int) -> None:
        """Until so many lines are open in all; ranks that are asked look a little later."""
        deadline = time.monotonic() + 60
        while sum(len(self.lines(rank)) for rank in self.presences) < wanted:
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def close(self) -> None:
        for presence in self.presences.values():
            presence.close()


@contextmanager
def ranks_of(world_size: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    ranks = Ranks(world_size)
    monkeypatch.setattr(Location, "here", ranks.here)
    with closing(ranks):
        ranks.make()
        yield ranks


MANY = [64, 256, *(pytest.param(world_size, marks=pytest.mark.slow) for world_size in (1024, 4096))]


@pytest.mark.parametrize("world_size", MANY)
def test_what_a_rank_asks_and_opens(world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with ranks_of(world_size, monkeypatch) as ranks:
        hosts = world_size // HOST_SIZE
        ranks.wait_for_lines(2 * (world_size - hosts) + 2 * (hosts - 1))
        firsts = {presence.watch._first for presence in ranks.presences.values()}  # type: ignore[union-attr]
        assert len(firsts) == hosts
        for rank, presence in ranks.presences.items():
            asked, opened = ranks.stores[rank].requests, len(ranks.lines(rank))
            if rank == 0:
                assert asked <= 4 * world_size and opened <= 0.15 * world_size + HOST_SIZE
            elif rank in firsts:  # and each of its host asks it once to look
                assert asked <= 12 + 10 * HOST_SIZE and opened <= HOST_SIZE
            else:
                assert asked <= 16 and opened == 1
        digests = [presence.digests() for _, presence in sorted(ranks.presences.items())]
        before = [store.requests for store in ranks.stores]
        for rank in (0, 1, world_size - 1):
            ranks.presences[rank].learn(digests)
            topology = ranks.presences[rank].topology()
            first = rank // HOST_SIZE * HOST_SIZE
            assert topology.ranks_of_host == [*range(first, first + HOST_SIZE)]
            assert topology.sharing_cores == HOST_SIZE and ranks.stores[rank].requests == before[rank]


@pytest.mark.parametrize("world_size", [64, pytest.param(256, marks=pytest.mark.slow)])
def test_what_a_meeting_asks(world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that come in a moment of each other ask the store a few times for each agreement."""
    agreements = 7
    with ranks_of(world_size, monkeypatch) as ranks:
        ranks.wait_for_lines(world_size)
        time.sleep(0.5)
        before = [store.requests for store in ranks.stores]
        failed = list[BaseException]()

        def take_part(rank: int) -> None:
            try:
                presence = ranks.presences[rank]
                arrival = Rendezvous(presence, LOAD)
                with closing(Watchdog(presence, arrival.key, arrival.doing)) as watchdog:
                    arrival.gather(watchdog)
                    for _ in range(agreements):
                        watchdog.meet()
                    arrival.leave()
            except BaseException as error:
                failed.append(error)

        began = time.monotonic()
        threads = [threading.Thread(target=take_part, args=(rank,)) for rank in ranks.presences]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.monotonic() - began
        assert not failed
        asked = [store.requests - earlier for store, earlier in zip(ranks.stores, before, strict=True)]
        # Arrival, news and whereabouts; then each agreement, and the polls of a wait, of which there are some twenty
        # before they come 20 ms after each other.
        assert max(asked[1:]) < 40 + agreements * 25 + 50 * seconds, (max(asked), seconds)


def test_a_process_that_dies_is_told_to_ranks_of_all_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is watched by the first of its host, and one that watches."""
    for victim_is_first in (False, True):
        with ranks_of(32, monkeypatch) as ranks:
            ranks.wait_for_lines(2 * (32 - 4) + 2 * 3)
            firsts = {presence.watch._first for presence in ranks.presences.values()}  # type: ignore[union-attr]
            victim = max(rank for rank in range(1, 32) if (rank in firsts) == victim_is_first)
            time.sleep(0.2)
            with ExitStack() as stack:
                watchdogs = {
                    rank: stack.enter_context(closing(Watchdog(presence, "a/meeting/0", "load")))
                    for rank, presence in ranks.presences.items()
                    if rank != victim
                }
                watch: Any = ranks.presences[victim].watch
                watch._listener._is_closed = True
                watch._listener.ask(*watch.ports[::2])  # ends its thread
                watch._listener._thread.join()
                watch._listener.forget()  # as the kernel does when a process is killed
                began = time.monotonic()
                for rank in (0, 31 - (victim == 31), 8):
                    if rank != victim:
                        verdict = watchdogs[rank].wait_for_verdict()
                        assert verdict is not None and verdict.rank == victim and verdict.is_dead
                        assert verdict.message.startswith(f"rank {victim} has died (process ")
                assert time.monotonic() - began < 5


def test_more_ranks_than_an_accept_queue_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """128 on kernels before 5.4. A connection that cannot be made is no proof of a death."""
    real = socket.create_server
    monkeypatch.setattr(socket, "create_server", lambda *args, backlog, **kwargs: real(*args, backlog=8, **kwargs))
    monkeypatch.setattr(lines, "_SILENCE", (*lines._SILENCE[:-1], (socket.TCP_SYNCNT, 1)))  # gives up after 3 s
    listener = Listener("127.0.0.1")
    monkeypatch.undo()
    monkeypatch.setattr(lines, "_SILENCE", (*lines._SILENCE[:-1], (socket.TCP_SYNCNT, 1)))
    dialled = [Line(listener.address, listener.port, is_local=True) for _ in range(40)]
    began, seen = time.monotonic(), set[bool | None]()
    while time.monotonic() - began < 8:
        seen |= {line.is_alive() for line in dialled}
        time.sleep(0.1)
    alive = [line for line in dialled if line.is_alive()]
    assert seen == {None, True} and 8 <= len(alive) < 20
    listener.forget()
    assert all(said(line, False) for line in alive)
    for line in dialled:
        line.close()


RANK_0 = """
import os, resource, sys, time
resource.setrlimit(resource.RLIMIT_NOFILE, (256, int(sys.argv[3])))
import torch.distributed as dist
from hf_zero_stream.ranks.presence import Presence
from hf_zero_stream.sources.base import SourceFile
from hf_zero_stream.sources.local import LocalFiles
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), None, False)
presence = Presence(store, 0, 300, holds_store=False)
deadline = time.monotonic() + 30
watched = presence.watch._watched()
while time.monotonic() < deadline:
    alive = sum(presence.watch._is_alive(rank) is True for rank in watched)
    if alive >= int(sys.argv[4]):
        break
    time.sleep(0.1)
files = [SourceFile(os.path.join(sys.argv[2], name), 4096) for name in os.listdir(sys.argv[2])]
source = LocalFiles(files)
source.open(range(len(files)))
presence.watch.look(())
print(len(watched), alive, resource.getrlimit(resource.RLIMIT_NOFILE)[0], flush=True)
presence._finalizer()
"""


@pytest.mark.parametrize(
    ("one_host", "hard", "least", "most"),
    [
        pytest.param(False, 256, 38, 38, id="38 hosts"),
        pytest.param(True, 4096, 299, 299, id="one host, soft limit"),
        pytest.param(True, 256, 100, 192, id="one host, hard limit", marks=pytest.mark.slow),
    ],
)
def test_a_low_limit_of_open_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_host: bool, hard: int, least: int, most: int
) -> None:
    """Rank 0 of 300 ranks with ``ulimit -n 256`` watches what it can, and its own load has handles left."""
    for number in range(40):
        (tmp_path / f"{number}.safetensors").write_bytes(bytes(4096))
    ranks = Ranks(300)
    here = Location.here()
    monkeypatch.setattr(Location, "here", lambda *ports: ranks._real(*ports) if one_host else ranks.here(*ports))
    order = [rank for rank in range(1, 300)]
    with closing(ranks):
        if one_host:  # rank 0 comes first, and so watches its host
            ranks.server.set(f"hf_zero_stream/host/{digest_of(here.network)}/first", "0")
            ranks.server.set("hf_zero_stream/hosts/count", "1")
            ranks.server.set("hf_zero_stream/hosts/0", "0")
        for rank in order:
            ranks._making = rank
            store: Any = ranks.stores[rank]
            ranks.presences[rank] = Presence(store, rank, 300, holds_store=False)
        command = [sys.executable, "-c", RANK_0, str(ranks.server.port), str(tmp_path), str(hard), str(least)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SOON_S + 60)
    assert done.returncode == 0, done.stderr
    watched, alive, soft = map(int, done.stdout.split())
    assert watched == (299 if one_host else 38)
    assert least <= alive <= most and soft <= hard
    assert ("can watch" in done.stderr) == (alive < watched)
