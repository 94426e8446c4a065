"""Fills destinations from a checkpoint's files, batch by batch, as the settings ask for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

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
from .opened import OpenCheckpoint
from .verification import Verifier


__all__ = ["Reader"]

Filled = tuple[Sequence[Item], Sequence[torch.Tensor]]
"""The items of a batch, and their memory."""


@dataclass(eq=False)
class Reader:
    """Fills destinations from an open checkpoint; adds to `clock`; samples `memory` where it may be at its peak."""

    checkpoint: OpenCheckpoint
    config: StreamingConfig
    coordinator: Coordinator
    clock: PhaseClock
    memory: AnonymousMemory
    staging_bytes: int = 0
    """Most bytes of staging buffers that there were at one time."""

    def __post_init__(self) -> None:
        self.verification = Verification(how=self.config.verify)

    def plan(self, batches: Sequence[Batch]) -> tuple[LoadPlan, Sequence[Sequence[Leaf]]]:
        """How this rank is going to fill `batches`; for each, the sources that its placements refer to by number."""
        planned = [
            plan_batch(
                ((item.target, item.view) for item in batch.items),
                request_bytes=self.checkpoint.request_bytes,
                seek_bytes=self.config.seek_bytes,
            )
            for batch in batches
        ]
        plans, leaves = tuple(plan for plan, _ in planned), [leaves for _, leaves in planned]
        return LoadPlan(self.coordinator.rank, self.coordinator.world_size, self.checkpoint.shards, plans), leaves

    def fill(self, batches: Sequence[Batch], plan: LoadPlan, leaves: Sequence[Sequence[Leaf]]) -> None:
        """Fill the memory of `batches`, one after the other, by the `plan` and `leaves` that :meth:`plan` returned."""
        verifier = Verifier(
            self.config.verify,
            self.coordinator.rank,
            self.checkpoint.threads(),
            self.checkpoint.source,
            self.checkpoint.evaluator().materialise,
            self.coordinator.check,
        )
        with self.checkpoint.reading():
            kept = self._fill(batches, plan, leaves, verifier)
            completes = {name: tensor for batch in batches for name, tensor in batch.completes.items()}
            self._verify_kept(kept, completes, verifier)
            if self.config.verify != "off":
                self.checkpoint.source.check_unchanged()
        self.verification = verifier.result

    def _fill(
        self, batches: Sequence[Batch], plan: LoadPlan, leaves: Sequence[Sequence[Leaf]], verifier: Verifier
    ) -> list[Filled]:
        """Fill all batches, verify those that are temporary, and return the others."""
        threads, bytes_read = self.checkpoint.threads(), plan.cost.bytes_read
        self.checkpoint.expect(bytes_read if len(batches) == 1 else 0)
        kept: list[Filled] = []
        with progress_bar(bytes_read, "Streaming weights", self.config.progress) as bar:

            def on_bytes(nbytes: int) -> None:
                bar.update(nbytes)
                self.checkpoint.note_progress()
                self.coordinator.check()  # stop reading once another rank has died

            evaluator = self.checkpoint.evaluator(threads, on_bytes)
            for batch, of_batch, sources in zip(batches, plan.batches, leaves, strict=True):
                error: BaseException | None = None
                try:
                    batch.begin()
                    memory = [item.memory() for item in batch.items]
                    self._read(of_batch, memory, threads, on_bytes)
                    with self.clock("convert"):
                        evaluator.place(of_batch, sources, memory)
                    self.memory.sample()
                    if batch.is_temporary:
                        verifier.verify(batch.items, memory)
                    else:
                        kept.append((batch.items, memory))
                    del memory  # a batch that ends frees it
                except BaseException as caught:
                    error = caught
                    if not batch.is_collective:
                        raise
                if batch.is_collective:
                    self.coordinator.agree(error)  # no rank may wait in a collective for one that gave up
                batch.finish()
        return kept

    def _read(
        self, plan: BatchPlan, memory: Sequence[torch.Tensor], threads: int, on_bytes: Callable[[int], None]
    ) -> None:
        begin, source = self.checkpoint.first_read, self.checkpoint.source
        times = execute_reads(plan, memory, source, threads=threads, begin=begin, on_bytes=on_bytes)
        self.staging_bytes = max(self.staging_bytes, times.staging_bytes)
        self.clock.add("read", times.read)
        self.clock.add("convert", times.convert)
        self.clock.add("copy", times.copy)
        self.memory.sample()

    def _verify_kept(self, kept: Sequence[Filled], completes: Mapping[str, torch.Tensor], verifier: Verifier) -> None:
        error: BaseException | None = None
        try:
            for items, memory in kept:
                verifier.verify(items, memory)
        except BaseException as caught:
            error = caught
            if not completes:
                raise
        if completes and self.config.verify == "full":
            mine = {name: part for name, part in verifier.parts.items() if name in completes}
            verifier.verify_whole(completes, self.coordinator.all_gather(mine, error))
        elif error is not None:
            raise error
