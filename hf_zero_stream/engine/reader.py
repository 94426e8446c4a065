"""Filling destinations from a checkpoint's files, batch by batch, in the way that the settings ask for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from ..config import StreamingConfig
from ..destinations.base import Batch, Item
from ..planning.plan import BatchPlan, LoadPlan, plan_batch
from ..planning.regions import Leaf
from ..ranks.coordinator import Coordinator
from ..reports.load import PhaseClock, Verification
from ..reports.memory import AnonymousMemory
from ..reports.progress import progress_bar
from .execute import execute_reads
from .lookup import Lookup
from .opened import OpenCheckpoint
from .verification import Verifier


__all__ = ["Reader"]


class Reader:
    """Fills destinations from an open checkpoint.

    Args:
        checkpoint: the open files.
        config: our settings.
        coordinator: the ranks that load together.
        clock: what the phases took.
        memory: sampled where it may be at its peak.
    """

    def __init__(
        self,
        checkpoint: OpenCheckpoint,
        config: StreamingConfig,
        coordinator: Coordinator,
        clock: PhaseClock,
        memory: AnonymousMemory,
    ) -> None:
        self.staging_bytes = 0
        """Most bytes of staging buffers that there were at one time."""
        self._checkpoint = checkpoint
        self._config = config
        self._coordinator = coordinator
        self._clock = clock
        self._memory = memory
        self._verifier: Verifier | None = None

    @property
    def verification(self) -> Verification:
        """What was verified."""
        return self._verifier.result if self._verifier else Verification(how=self._config.verify)

    def plan(self, batches: Sequence[Batch]) -> tuple[LoadPlan, list[Sequence[Leaf]]]:
        """How this rank is going to fill `batches`; for each, the sources that its placements refer to by number."""
        plans: list[BatchPlan] = []
        leaves: list[Sequence[Leaf]] = []
        for batch in batches:
            plan, of_batch = plan_batch(
                ((item.target, item.view) for item in batch.items),
                request_bytes=self._checkpoint.request_bytes,
                seek_bytes=self._config.seek_bytes,
            )
            plans.append(plan)
            leaves.append(of_batch)
        rank, world_size = self._coordinator.rank, self._coordinator.world_size
        return LoadPlan(rank, world_size, self._checkpoint.shards, tuple(plans)), leaves

    def fill(self, batches: Sequence[Batch], plan: LoadPlan, leaves: Sequence[Sequence[Leaf]]) -> None:
        """Fill the memory of `batches`, one after the other, as `plan` says.

        Args:
            plan: what :meth:`plan` returned for them, with `leaves`.

        Raises:
            ReadError, CheckpointError: a shard could not be read, or changed meanwhile.
            LoadError: what was placed is not what the files hold.
            PeerError: another rank died.
        """
        if self._config.verify in ("sample", "full"):
            self._verifier = Verifier(self._config.verify, self._coordinator.rank, self._checkpoint.threads())
        with self._checkpoint.reading():
            self._fill(batches, plan, leaves)

    def _fill(self, batches: Sequence[Batch], plan: LoadPlan, leaves: Sequence[Sequence[Leaf]]) -> None:
        threads = self._checkpoint.threads()
        bytes_read = plan.cost.bytes_read
        self._checkpoint.expect(bytes_read if len(batches) == 1 else 0)
        kept: list[tuple[Sequence[Item], Sequence[torch.Tensor]]] = []
        with progress_bar(bytes_read, "Streaming weights", self._config.progress) as bar:

            def on_bytes(nbytes: int) -> None:
                bar.update(nbytes)
                self._checkpoint.note_progress()
                self._coordinator.check()  # no need to read on for ranks that are not there any more

            for batch, of_batch, sources in zip(batches, plan.batches, leaves, strict=True):
                error: BaseException | None = None
                try:
                    memory = self._carry_out(batch, of_batch, sources, threads, on_bytes)
                    if batch.is_temporary:
                        self._verify(batch.items, memory)
                    else:
                        kept.append((batch.items, memory))
                    del memory  # a batch that ends frees it
                except BaseException as caught:
                    error = caught
                    if not batch.is_collective:
                        raise
                if batch.is_collective:
                    self._coordinator.agree(error)  # nobody may wait in a collective for a rank that gave up
                batch.finish()
        self._verify_kept(kept, {name: tensor for batch in batches for name, tensor in batch.completes.items()})
        if self._config.verify != "off":
            self._checkpoint.source.check_unchanged()

    def _verify(self, items: Sequence[Item], memory: Sequence[torch.Tensor]) -> None:
        if self._verifier is not None:
            source = self._checkpoint.source
            lookup = Lookup(source, self._checkpoint.evaluator.materialise)
            self._verifier.verify(items, memory, lookup, lambda: source.bytes_read, self._coordinator.check)

    def _verify_kept(
        self, kept: Sequence[tuple[Sequence[Item], Sequence[torch.Tensor]]], completes: Mapping[str, torch.Tensor]
    ) -> None:
        error: BaseException | None = None
        try:
            for items, memory in kept:
                self._verify(items, memory)
        except BaseException as caught:
            error = caught
            if not completes:
                raise
        if completes and self._config.verify == "full":
            assert self._verifier is not None
            mine = {name: part for name, part in self._verifier.parts.items() if name in completes}
            self._verifier.verify_whole(completes, self._coordinator.all_gather(mine, error))
        elif error is not None:
            raise error

    def _carry_out(
        self,
        batch: Batch,
        plan: BatchPlan,
        leaves: Sequence[Leaf],
        threads: int,
        on_bytes: Callable[[int], None],
    ) -> list[torch.Tensor]:
        """Begin `batch` and fill the memory of its items, which is returned."""
        batch.begin()
        memory = [item.memory() for item in batch.items]
        times = execute_reads(
            plan,
            memory,
            self._checkpoint.source,
            threads=threads,
            begin=self._checkpoint.first_read,
            on_bytes=on_bytes,
        )
        self.staging_bytes = max(self.staging_bytes, times.staging_bytes)
        self._clock.add("read", times.read)
        self._clock.add("convert", times.convert)
        self._clock.add("copy", times.copy)
        self._memory.sample()
        with self._clock("convert"):
            self._checkpoint.evaluator.place(plan, leaves, memory, threads, on_bytes)
        self._memory.sample()
        return memory
