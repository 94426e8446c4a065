"""Filling destinations from a checkpoint's files, batch by batch, in the way that the settings ask for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .checkpoint.index import Shard
from .checkpoint.nodes import View
from .checkpoint.source import ShardFiles
from .checkpoint.storage import is_on_network
from .config import StreamingConfig
from .coordination import Coordinator
from .engine.compute import Evaluator
from .engine.execute import execute_reads
from .engine.lanes import buffers_per_lane
from .engine.relay import RelayedFiles, serve
from .engine.streams import choose_request_bytes, choose_threads
from .memory import AnonymousMemory, total_memory_bytes
from .partition import zero3
from .planning.plan import LoadPlan, Target, make_plan
from .progress import progress_bar
from .report import PhaseClock


__all__ = ["Batch", "Item", "Reader"]

Item = tuple[Target, View]
"""What to fill, and from what."""


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Batch:
    """Targets that have memory at the same time.

    Attributes:
        items: what to fill, and from what.
        begin: gives one flat destination for each item; called when the batches before are settled.
        settle: called when the destinations are full, for instance to move them on.
        is_collective: all ranks must settle together, and have the same batches.
    """

    items: Sequence[Item]
    begin: Callable[[], Sequence[torch.Tensor]]
    settle: Callable[[], None] = _nothing
    is_collective: bool = False


class Reader:
    """The open files of one load, and how this rank reads them.

    Args:
        config: our settings.
        coordinator: the ranks that load together.
        clock: what the phases took.
        memory: sampled where it may be at its peak.
    """

    def __init__(
        self, config: StreamingConfig, coordinator: Coordinator, clock: PhaseClock, memory: AnonymousMemory
    ) -> None:
        self.staging_bytes = 0
        """Most bytes of staging buffers that there were at one time."""
        self.shards: tuple[Shard, ...] = ()
        self._config = config
        self._coordinator = coordinator
        self._clock = clock
        self._memory = memory
        self._on_network = False
        self._request_bytes = 0
        self._use_files(ShardFiles(()))

    def close(self) -> None:
        """Release file handles."""
        self._files.close()

    @property
    def bytes_read(self) -> int:
        """Bytes read so far, holes that were read through included."""
        return self._files.bytes_read

    @property
    def reads(self) -> int:
        """Positional reads so far."""
        return self._files.reads

    def use(self, shards: tuple[Shard, ...]) -> None:
        """Read from `shards` from now on."""
        self.shards = shards
        # The hub's cache is made of links, and its files may lie elsewhere.
        folders = {os.path.dirname(os.path.realpath(shard.path)) for shard in shards}
        self._on_network = any(map(is_on_network, folders))
        self._request_bytes = choose_request_bytes(
            self._config.request_bytes, self._config.staging_bytes, self._on_network
        )
        # What does not fit into memory would only push its own beginning out of the page cache, and all else first.
        fits = sum(shard.size_bytes for shard in shards) < total_memory_bytes()
        self._use_files(ShardFiles(shards, direct_io=self._config.direct_io, keep_cached=fits))

    def _use_files(self, files: ShardFiles) -> None:
        self._files = files
        self._evaluator = Evaluator(
            files,
            self.shards,
            request_bytes=self._request_bytes,
            seek_bytes=self._config.seek_bytes,
            staging_bytes=self._config.staging_bytes,
        )

    def materialise(self, view: View) -> torch.Tensor:
        """The values of `view`, read now, in a new host tensor."""
        return self._evaluator.materialise(view)

    def plan(self, items: Iterable[Item]) -> LoadPlan:
        """How this rank would fill the targets of `items`."""
        return make_plan(
            items,
            self.shards,
            rank=self._coordinator.rank,
            world_size=self._coordinator.world_size,
            request_bytes=self._request_bytes,
            seek_bytes=self._config.seek_bytes,
        )

    def fill(self, batches: Sequence[Batch], plan: LoadPlan) -> None:
        """Fill the destinations of `batches`, one batch after the other.

        Args:
            plan: the plan of all of their items together.

        Raises:
            ReadError, CheckpointError: a shard could not be read.
        """
        if self._config.read_from == "all" or self._coordinator.is_alone or not self.shards:
            self._fill(batches, plan)
            return
        group = dist.new_group(backend="gloo")
        try:
            self._fill_relayed(batches, plan, group)
        finally:
            dist.destroy_process_group(group)

    def _fill_relayed(self, batches: Sequence[Batch], plan: LoadPlan, group: dist.ProcessGroup) -> None:
        """The reader answers the others first, then reads for itself."""
        on_each_host = self._config.read_from == "local_rank0"
        number = zero3.local_rank() if on_each_host else self._coordinator.rank
        ranks = zero3.ranks_on_this_host() if on_each_host else self._coordinator.world_size
        if number == 0:
            serve(self._files, ranks - 1, group, self._config.chunk_bytes)
            self._fill(batches, plan)
            return
        relayed = RelayedFiles(self.shards, self._coordinator.rank - number, group, self._config.chunk_bytes)
        self._use_files(relayed)
        try:
            self._fill(batches, plan)
        finally:
            relayed.finish()

    def _fill(self, batches: Sequence[Batch], plan: LoadPlan) -> None:
        threads = choose_threads(
            self._config.reader_threads,
            self._config.staging_bytes // (self._request_bytes * buffers_per_lane(zero3.local_device())),
            zero3.ranks_on_this_host(),
            self._on_network,
            self._config.direct_io,
        )
        with progress_bar(plan.cost.bytes_read, "Streaming weights", self._config.progress) as bar:
            for batch in batches:
                error: BaseException | None = None
                try:
                    of_batch = plan if len(batches) == 1 else self.plan(batch.items)
                    self._carry_out(of_batch, batch.begin(), threads, bar.update)
                except BaseException as caught:
                    error = caught
                    if not batch.is_collective:
                        raise
                if batch.is_collective:
                    self._coordinator.agree(error)  # nobody may wait in a collective for a rank that gave up
                batch.settle()

    def _carry_out(
        self, plan: LoadPlan, destinations: Sequence[torch.Tensor], threads: int, on_bytes: Callable[[int], None]
    ) -> None:
        times = execute_reads(
            plan,
            destinations,
            self._files,
            threads=threads,
            begin=zero3.local_rank() / zero3.ranks_on_this_host(),
            on_bytes=on_bytes,
        )
        self.staging_bytes = max(self.staging_bytes, times.staging_bytes)
        self._clock.add("read", times.read)
        self._clock.add("convert", times.convert)
        self._clock.add("copy", times.copy)
        self._memory.sample()
        with self._clock("convert"):
            self._evaluator.place(plan, destinations, threads, on_bytes)
        self._memory.sample()
