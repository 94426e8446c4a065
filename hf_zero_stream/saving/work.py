"""What all ways to write a save have in common: its ranks, clock and memory; and how it ends."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, TypeVar

from torch import nn

from ..accelerators import settle
from ..holdings.own_names import parameters
from ..ranks.coordinator import Coordinator
from ..reports.measures import AnonymousMemory, PhaseClock, progress_bar
from ..reports.save import PHASES, SavingRank
from ..settings.config import StreamingConfig
from .preparation import Finalizer, WritePlan
from .write import Put, execute_save


T = TypeVar("T")


class Work:
    """One save of `model`, while it is made.

    Attributes:
        what: is saved, for people to read.
        verifies: what was written is read again.
    """

    def __init__(self, model: nn.Module, what: str, settings: StreamingConfig, coordinator: Coordinator) -> None:
        self.model, self.what, self.settings, self.coordinator = model, what, settings, coordinator
        self.clock, self.memory = PhaseClock(PHASES), AnonymousMemory()
        self.verifies = False

    def settle(self) -> None:
        """Wait until devices have computed what is saved."""
        settle(parameters(self.model))

    def execute(self, phase: str, plan: WritePlan, put: Put, finish: Callable[[], T]) -> list[T]:
        """Carry out the plan, of which `put` takes the bytes, and `finish`; returns what that gives (all ranks)."""
        with ExitStack() as writing:
            writing.enter_context(self.clock(phase))

            def then() -> T:
                writing.close()
                self.memory.sample()
                with self.clock("sync"):
                    return finish()

            return execute_save(plan.plan, plan.parameters, put, self.coordinator, self.threads, then)

    def publish(
        self,
        finalizer: Finalizer,
        publication: Any,
        plan: WritePlan,
        digests: Sequence[Mapping[str, int]] = (),
        **figures: int,
    ) -> list[SavingRank]:
        """Have rank 0 publish what has been written; returns the :meth:`figures` of each rank (all ranks)."""

        def published() -> SavingRank:
            if self.coordinator.is_main:
                with self.clock("publish"):
                    finalizer.publish(publication, plan, digests)
            return self.figures(plan, **figures)

        return self.coordinator.gather_results(published)

    def figures(
        self, plan: WritePlan, *, written: int | None = None, rounds: int | None = None, copied: int = 0
    ) -> SavingRank:
        """What this rank did: bytes `written` and `rounds`, by default those of the plan, and bytes `copied`."""
        return SavingRank(
            rank=self.coordinator.rank,
            seconds=self.clock.seconds,
            bytes_written=plan.plan.bytes_written if written is None else written,
            bytes_copied=copied,
            rounds=len(plan.plan.rounds) if rounds is None else rounds,
            anonymous_growth_peak=self.memory.growth_peak,
        )

    def bar(self, plan: WritePlan, own_bytes: int, doing: str) -> AbstractContextManager[Callable[[int], None]]:
        """The progress bar of all tensors that ranks write, of which this one writes `own_bytes`."""
        whole = sum(shard.size_bytes - len(shard.header) for shard in plan.shards)
        return progress_bar(own_bytes, f"{doing} {self.what}", self.settings.progress, whole)

    @property
    def threads(self) -> int:
        return threads_of(self.coordinator)


def threads_of(coordinator: Coordinator) -> int:
    """This rank's share of the host's cores, at most 8: memory bandwidth bounds writes into the page cache."""
    return max(1, min(8, len(os.sched_getaffinity(0)) // coordinator.topology.sharing_cores))
