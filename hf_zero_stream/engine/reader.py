"""Filling destinations from a checkpoint's files, batch by batch, in the way that the settings ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ..checkpoint.nodes import View
from ..config import StreamingConfig
from ..planning.plan import LoadPlan, Target, make_plan
from ..ranks.coordinator import Coordinator
from ..reports.load import PhaseClock, Verification
from ..reports.memory import AnonymousMemory
from ..reports.progress import progress_bar
from .execute import execute_reads
from .lookup import Lookup
from .opened import OpenCheckpoint
from .verification import Verifier


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
        is_lent: the destinations hold the values only until the batch is settled.
        completes: whole tensors, flat, that this rank has once all batches are settled, by the parameter's name.
    """

    items: Sequence[Item]
    begin: Callable[[], Sequence[torch.Tensor]]
    settle: Callable[[], None] = _nothing
    is_collective: bool = False
    is_lent: bool = False
    completes: Mapping[str, torch.Tensor] = field(default_factory=dict)


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

    def plan(self, items: Iterable[Item]) -> LoadPlan:
        """How this rank would fill the targets of `items`."""
        return make_plan(
            items,
            self._checkpoint.shards,
            rank=self._coordinator.rank,
            world_size=self._coordinator.world_size,
            request_bytes=self._checkpoint.request_bytes,
            seek_bytes=self._config.seek_bytes,
        )

    def fill(self, batches: Sequence[Batch], plan: LoadPlan) -> None:
        """Fill the destinations of `batches`, one batch after the other.

        Args:
            plan: the plan of all of their items together.

        Raises:
            ReadError, CheckpointError: a shard could not be read, or changed meanwhile.
            LoadError: what was placed is not what the files hold.
            PeerError: another rank died.
        """
        if self._config.verify in ("sample", "full"):
            self._verifier = Verifier(self._config.verify, self._coordinator.rank, self._checkpoint.threads())
        with self._checkpoint.reading():
            self._fill(batches, plan)

    def _fill(self, batches: Sequence[Batch], plan: LoadPlan) -> None:
        threads = self._checkpoint.threads()
        self._checkpoint.expect(plan.cost.bytes_read if len(batches) == 1 else 0)
        kept: list[tuple[Sequence[Item], Sequence[torch.Tensor]]] = []
        with progress_bar(plan.cost.bytes_read, "Streaming weights", self._config.progress) as bar:

            def on_bytes(nbytes: int) -> None:
                bar.update(nbytes)
                self._checkpoint.note_progress()
                self._coordinator.check()  # no need to read on for ranks that are not there any more

            for batch in batches:
                error: BaseException | None = None
                try:
                    of_batch = plan if len(batches) == 1 else self.plan(batch.items)
                    destinations = batch.begin()
                    self._carry_out(of_batch, destinations, threads, on_bytes)
                    if batch.is_lent:
                        self._verify(batch.items, destinations)
                    else:
                        kept.append((batch.items, destinations))
                except BaseException as caught:
                    error = caught
                    if not batch.is_collective:
                        raise
                if batch.is_collective:
                    self._coordinator.agree(error)  # nobody may wait in a collective for a rank that gave up
                batch.settle()
        self._verify_kept(kept, {name: tensor for batch in batches for name, tensor in batch.completes.items()})
        if self._config.verify != "off":
            self._checkpoint.source.check_unchanged()

    def _verify(self, items: Sequence[Item], destinations: Sequence[torch.Tensor]) -> None:
        if self._verifier is not None:
            source = self._checkpoint.source
            lookup = Lookup(source, self._checkpoint.evaluator.materialise)
            self._verifier.verify(items, destinations, lookup, lambda: source.bytes_read, self._coordinator.check)

    def _verify_kept(
        self, kept: Sequence[tuple[Sequence[Item], Sequence[torch.Tensor]]], completes: Mapping[str, torch.Tensor]
    ) -> None:
        error: BaseException | None = None
        try:
            for items, destinations in kept:
                self._verify(items, destinations)
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
        self, plan: LoadPlan, destinations: Sequence[torch.Tensor], threads: int, on_bytes: Callable[[int], None]
    ) -> None:
        times = execute_reads(
            plan,
            destinations,
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
            self._checkpoint.evaluator.place(plan, destinations, threads, on_bytes)
        self._memory.sample()
