"""Fills destinations from a checkpoint's files, batch by batch, as the settings ask for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..checkpoint.nodes import Leaf
from ..destinations.base import Batch, Item
from ..planning.plan import LoadPlan, plan_batch
from ..registry import tool
from ..reports.closing import what_is_loaded
from ..reports.load import PHASES, Verification
from ..reports.measures import AnonymousMemory, PhaseClock, progress_bar
from .execute import execute_reads
from .opened import OpenCheckpoint


class Reader:
    """Fills destinations from an open checkpoint; samples `memory` where it may be at its peak.

    `clock` is added to, if there is one. `doing` is what the progress bar is named.
    """

    def __init__(
        self, checkpoint: OpenCheckpoint, clock: PhaseClock | None, memory: AnonymousMemory, doing: str = ""
    ) -> None:
        self._checkpoint, self._clock, self._memory = checkpoint, clock or PhaseClock(PHASES), memory
        self._doing = doing or f"Streaming {what_is_loaded()}"
        self.verification = Verification(how=checkpoint.config.verify)
        self.staging_bytes = 0
        """Most bytes of staging buffers that there were at one time."""
        self.thread_seconds: dict[str, float] = {}
        """See :attr:`..reports.load.RankReport.thread_seconds`."""

    def plan(self, batches: Sequence[Batch]) -> tuple[LoadPlan, Sequence[Sequence[Leaf]]]:
        """Plan how this rank fills `batches`; returns also the leaves of each, which placements refer to by number."""
        checkpoint, coordinator = self._checkpoint, self._checkpoint.coordinator
        how = {"request_bytes": checkpoint.request_bytes, "seek_bytes": checkpoint.seek_bytes}
        planned = [plan_batch(((item.target, item.view) for item in batch.items), **how) for batch in batches]
        plans, leaves = tuple(plan for plan, _ in planned), [leaves for _, leaves in planned]
        return LoadPlan(coordinator.rank, coordinator.world_size, checkpoint.shards, plans), leaves

    def fill(
        self, batches: Sequence[Batch], plan: LoadPlan, leaves: Sequence[Sequence[Leaf]], of_all_ranks: int
    ) -> None:
        """Fill the memory of `batches`, one after the other, by the `plan` and `leaves` that :meth:`plan` returned.

        `of_all_ranks`: the bytes that all ranks read, which the progress bar counts.
        Called inside :meth:`Coordinator.reporting`, which brings an error to the agreement that the others come to.
        """
        checkpoint, coordinator = self._checkpoint, self._checkpoint.coordinator
        verifier: Any = None
        if checkpoint.config.compares_values:  # with the files again
            verifier = tool("verify", "verify", f"verify={checkpoint.config.verify!r}")(checkpoint)
        with checkpoint.reading():
            for items, memory in self._fill(batches, plan, leaves, verifier, of_all_ranks):
                if verifier is not None:
                    verifier.verify(items, memory)
            completes = {name: tensor for batch in batches for name, tensor in batch.completes.items()}
            if verifier is not None and completes and checkpoint.config.verify == "full":
                parts = {name: part for name, part in verifier.parts.items() if name in completes}
                verifier.verify_whole(completes, coordinator.all_gather(parts))
            if checkpoint.config.verify != "off":
                checkpoint.source.check_unchanged()
        if verifier is not None:
            self.verification = verifier.result

    def _fill(
        self,
        batches: Sequence[Batch],
        plan: LoadPlan,
        leaves: Sequence[Sequence[Leaf]],
        verifier: Any,
        of_all_ranks: int,
    ) -> list[tuple[Sequence[Item], Sequence[torch.Tensor]]]:
        """Fill all batches, verify those that are temporary, and return the items of the others, with their memory."""
        checkpoint, coordinator = self._checkpoint, self._checkpoint.coordinator
        bytes_read = plan.cost.bytes_read
        checkpoint.expect(bytes_read)
        if plan.batches and checkpoint.hints.grows_requests:
            from .host_part import bring_in  # for network file systems

            with self._clock("read"):
                bring_in(checkpoint, batches[0], plan.batches[0])
        # Only a pass through the files in their order can be read ahead: one batch, or one before smaller ones.
        is_one_pass = bool(plan.batches) and 2 * plan.batches[0].cost.bytes_read >= bytes_read
        begin, note_progress = checkpoint.begin_pass(bytes_read if is_one_pass else 0)
        kept: list[tuple[Sequence[Item], Sequence[torch.Tensor]]] = []
        with progress_bar(bytes_read, self._doing, checkpoint.config.progress, of_all_ranks) as advance:

            def on_bytes(nbytes: int) -> None:
                advance(nbytes)
                note_progress()
                coordinator.check()  # stop reading once another rank has died

            threads = checkpoint.threads()
            end_exchange: Callable[[], None] | None = None  # of the batch before, while this one is read
            for batch, of_batch, sources in zip(batches, plan.batches, leaves, strict=True):
                if end_exchange is not None and not batch.is_collective:
                    end_exchange()
                    end_exchange = None
                batch.begin()
                memory = [item.memory() for item in batch.items]
                spent = execute_reads(
                    of_batch, memory, checkpoint.source, threads=threads, begin=begin, on_bytes=on_bytes
                )
                self.staging_bytes = max(self.staging_bytes, spent.staging_bytes)
                for timer, seconds in spent.thread_seconds.items():
                    self.thread_seconds[timer] = self.thread_seconds.get(timer, 0.0) + seconds
                for phase, seconds in spent.seconds.items():
                    self._clock.add(phase, seconds)
                self._memory.sample()
                if of_batch.placements:
                    with self._clock("convert"):
                        checkpoint.evaluator(threads, on_bytes).place(of_batch, sources, memory)
                self._memory.sample()
                if not batch.is_temporary:
                    kept.append((batch.items, memory))
                elif verifier is not None:
                    verifier.verify(batch.items, memory)
                del memory  # a batch that ends frees it
                if batch.is_collective:
                    with self._clock("wait"):
                        if end_exchange is not None:
                            end_exchange()
                        coordinator.agree()  # no rank may wait in a collective for one that gave up
                end_exchange = batch.finish()
            if end_exchange is not None:
                with self._clock("wait"):
                    end_exchange()
        return kept
