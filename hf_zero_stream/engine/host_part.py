"""A host's part of a checkpoint, brought into the page cache at once, before its ranks read what is theirs.

ZeRO-3 gives each of N ranks 1/N of every parameter, be it a norm of 14 bytes: of 1,489 requests of a rank of 1,024 for
DeepSeek-V3, 849 carry 28 of 1,250 MiB. On the disks of a parallel file system these seeks take longer than the bytes.
Ranks of one host are neighbours, as a rule, so their parts of a parameter are one run of the file. Each plans that of
all of them, and brings its turns of it into the page cache, in requests of 8 MiB; then each reads its own from there.

Only where it pays, and where the page cache keeps it: a FUSE file system may drop a file's pages at each open.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..destinations.base import Batch
from ..planning.plan import BatchPlan, Read, plan_batch
from ..sources.by_path import FilesByPath
from ..sources.page_cache import keeps_cached, populate
from .execute import run_in_threads
from .opened import OpenCheckpoint


HOST_REQUEST_BYTES = 8 * 2**20

WORTH_IT = 2
"""It takes so many times fewer requests, or each rank reads its own alone."""


def bring_in(checkpoint: OpenCheckpoint, batch: Batch, plan: BatchPlan) -> int:
    """Bring this rank's turns of what its host reads of `batch` into the page cache; returns how many bytes.

    `plan` is this rank's own. Errors are left to the reads that follow.
    """
    topology = checkpoint.coordinator.topology
    own = _reads_of_host(checkpoint, batch, plan)[topology.position :: len(topology.ranks_of_host)]
    windows = [(checkpoint.shards[read.shard].path, read.start, read.length) for read in own]
    if not (windows and populate(*windows[0]) and keeps_cached(*windows[0])):
        return 0
    done = [own[0].length]

    def work(pending: Iterator[tuple[str, int, int]]) -> None:
        for window in pending:
            if not populate(*window):
                return
            done.append(window[-1])
            checkpoint.coordinator.check()

    run_in_threads(windows[1:], work, checkpoint.threads())
    return sum(done)


def _reads_of_host(checkpoint: OpenCheckpoint, batch: Batch, plan: BatchPlan) -> Sequence[Read]:
    """What the ranks of this host read together, if it is worth while; else nothing."""
    coordinator = checkpoint.coordinator
    ranks = coordinator.topology.ranks_of_host
    are_neighbours = ranks == [*range(ranks[0], ranks[0] + len(ranks))]
    is_on_disk = checkpoint.hints.grows_requests and isinstance(checkpoint.source, FilesByPath)
    are_small = plan.cost.bytes_read < plan.cost.reads * checkpoint.request_bytes / WORTH_IT
    if not (is_on_disk and are_neighbours and are_small and 1 < len(ranks) < coordinator.world_size):
        return ()
    together = (
        (item.target.of_neighbours(coordinator.rank, ranks, item.view.numel), item.view) for item in batch.items
    )
    of_host, _ = plan_batch(together, request_bytes=HOST_REQUEST_BYTES, seek_bytes=checkpoint.seek_bytes)
    is_worth_it = of_host.cost.reads * WORTH_IT < plan.cost.reads * len(ranks)
    return of_host.reads if is_worth_it and checkpoint.fits_in_cache(of_host.cost.bytes_read) else ()
