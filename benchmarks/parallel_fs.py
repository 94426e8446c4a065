"""What a parallel file system makes of the requests of many ranks: the plan's true requests, a simulated file system.

::

    python -m benchmarks.parallel_fs --ranks 64 1024 --models deepseek-v3

Requests are those of `hf_zero_stream.plan` for each rank (checked against the plan of one), of sparse checkpoints of
true size. Simulated is all else: ranks on hosts of 8 with 64 requests in flight; each storage target (OST) a queue
with a time per request and a bandwidth; a latency; each host's link. Not modelled: caches and read-ahead of targets,
how a client cuts requests, locks, other users. So these are figures to compare ways of reading by, and no promise.

A row says how long it takes until the last rank has its bytes: the bytes alone; each rank reads its own, 2 MiB at a
time; as it is now: larger requests, and a host's part at once where that saves requests (`engine/host_part.py`).
"""

from __future__ import annotations

import argparse
import heapq
import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.scale import CACHE, MODELS
from benchmarks.sparse_checkpoint import make_sparse_checkpoint
from hf_zero_stream import plan
from hf_zero_stream.engine.host_part import HOST_REQUEST_BYTES, WORTH_IT
from hf_zero_stream.planning.plan import LoadPlan, partition_range


HOST_SIZE, STREAMS, SEEK_BYTES = 8, 64 // 8, 4096
SMALL_REQUEST, LARGE_REQUEST = 2 * 2**20, 8 * 2**20


class FileSystem(NamedTuple):
    """Storage targets, bytes per second and seconds per request of each; latency in s; a host's bytes per second."""

    name: str
    targets: int
    bandwidth: float
    seek_s: float
    latency_s: float
    link: float


FILE_SYSTEMS = {
    "disks": FileSystem("100 targets on disks, 2 GB/s and 1 ms a request each", 100, 2e9, 1e-3, 1e-3, 12e9),
    "flash": FileSystem("100 targets on flash, 5 GB/s and 20 us a request each", 100, 5e9, 20e-6, 0.5e-3, 20e9),
}

Request = tuple[int, int, int]
"""Shard, first byte, bytes."""


class Parameter(NamedTuple):
    """Where a parameter's bytes lie: of each run its place in the parameter, its shard, its place there, its size."""

    numel: int
    itemsize: int
    runs: list[tuple[int, int, int, int]]


def parameters_of(whole: LoadPlan) -> list[Parameter]:
    """All parameters, from the plan of one rank of one."""
    (batch,) = whole.batches
    found = [Parameter(target.numel, target.dtype.itemsize, []) for target in batch.targets]
    for read in batch.reads:
        for piece in read.pieces:
            assert piece.box.is_run or piece.box.to_extent == piece.box.numel
            to = piece.box.to * piece.dtype.itemsize
            found[piece.target].runs.append((to, piece.shard, piece.start, piece.stop - piece.start))
    return [parameter._replace(runs=sorted(parameter.runs)) for parameter in found if parameter.runs]


def requests_of(parameters: Sequence[Parameter], rank: int, world_size: int, most: int) -> list[Request]:
    """The requests of one rank (or host) of a world, in file order; none is longer than `most`."""
    runs = []
    for parameter in parameters:
        _, start, stop = partition_range(parameter.numel, rank, world_size)
        begin, end = start * parameter.itemsize, stop * parameter.itemsize
        for to, shard, at, nbytes in parameter.runs[max(0, bisect_right(parameter.runs, (begin, 1 << 60)) - 1) :]:
            if to >= end:
                break
            low, high = max(begin, to), min(end, to + nbytes)
            if low < high:
                runs.append((shard, at + low - to, high - low))
    return list(_merged(sorted(runs), most))


def _merged(runs: Sequence[Request], most: int) -> Iterator[Request]:
    shard, begin, end = -1, 0, 0
    for this, start, nbytes in runs:
        while nbytes:
            hole = start - end
            if this == shard and 0 <= hole <= SEEK_BYTES and end - begin + hole < most:
                taken = min(nbytes, most - (end - begin) - hole)
                end = start + taken
            else:
                if end > begin:
                    yield shard, begin, end - begin
                taken = min(nbytes, most)
                shard, begin, end = this, start, start + taken
            start, nbytes = start + taken, nbytes - taken
    if end > begin:
        yield shard, begin, end - begin


def simulate(of_ranks: Sequence[Sequence[Request]], system: FileSystem) -> float:
    """Seconds until the last rank has its bytes.

    Of a request: half a latency, the target's queue, the host's link, the other half of the latency.
    """
    targets, links = [0.0] * system.targets, [0.0] * -(-len(of_ranks) // HOST_SIZE)
    next_of, numbers, last = [0] * len(of_ranks), random.Random(7), 0.0
    begins = [rank % HOST_SIZE * len(requests) // HOST_SIZE for rank, requests in enumerate(of_ranks)]
    waiting = [(numbers.uniform(0, 0.02), rank) for rank in range(len(of_ranks)) for _ in range(STREAMS)]
    heapq.heapify(waiting)
    while waiting:
        now, rank = waiting[0]
        requests, number = of_ranks[rank], next_of[rank]
        if number == len(requests):
            last = max(last, now)
            heapq.heappop(waiting)
            continue
        next_of[rank] = number + 1
        shard, _, nbytes = requests[(begins[rank] + number) % len(requests)]
        target = shard % system.targets
        ready = max(now + system.latency_s / 2, targets[target]) + system.seek_s + nbytes / system.bandwidth
        targets[target] = ready
        arrived = max(ready, links[rank // HOST_SIZE]) + nbytes / system.link
        links[rank // HOST_SIZE] = arrived
        heapq.heapreplace(waiting, (arrived + system.latency_s / 2, rank))
    return last


def ways_of(parameters: Sequence[Parameter], world_size: int) -> tuple[list[list[Request]], list[list[Request]]]:
    """The requests of all ranks: 2 MiB each, and as they are now."""
    before = [requests_of(parameters, rank, world_size, SMALL_REQUEST) for rank in range(world_size)]
    own = [requests_of(parameters, rank, world_size, LARGE_REQUEST) for rank in range(world_size)]
    hosts = world_size // HOST_SIZE
    of_hosts = [requests_of(parameters, host, hosts, HOST_REQUEST_BYTES) for host in range(hosts)]
    is_small = sum(nbytes for *_, nbytes in own[-1]) < len(own[-1]) * LARGE_REQUEST / WORTH_IT
    if hosts > 1 and is_small and len(of_hosts[0]) * WORTH_IT < len(own[0]) * HOST_SIZE:
        own = [of_hosts[rank // HOST_SIZE][rank % HOST_SIZE :: HOST_SIZE] for rank in range(world_size)]
    return before, own


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[8, 64, 128, 512, 1024, 4096])
    parser.add_argument("--models", nargs="*", default=["deepseek-v3"], choices=[*MODELS])
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder for the sparse checkpoints")
    arguments = parser.parse_args()
    for name in arguments.models:
        folder = make_sparse_checkpoint(arguments.cache / f"sparse-{name}", MODELS[name][0](), name.endswith("-fp8"))
        parameters = parameters_of(plan(folder, world_size=1).load)
        of_one = plan(folder, world_size=512, rank=37).load.cost
        mine = requests_of(parameters, 37, 512, SMALL_REQUEST)
        planned = f"the plan of rank 37 of 512 has {of_one.reads:,} requests, and these are {len(mine):,}"
        print(f"{name}: {planned}\n", flush=True)
        print("| ranks | on | the bytes alone s | each its own, 2 MiB: s, requests | as it is now: s, requests |")
        print("|--:|---|--:|--:|--:|", flush=True)
        for world_size in arguments.ranks:
            before, now = ways_of(parameters, world_size)
            total = sum(nbytes for requests in before for *_, nbytes in requests)
            for kind, system in FILE_SYSTEMS.items():
                alone = max(total / system.targets / system.bandwidth, total / (world_size / HOST_SIZE) / system.link)
                cells = [f"{simulate(way, system):.1f}, {sum(map(len, way)):,}" for way in (before, now)]
                print(f"| {world_size:,} | {kind} | {alone:.1f} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
