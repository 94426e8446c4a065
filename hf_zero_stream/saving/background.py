"""Writes a save in the background: from a snapshot, or from copies in host memory, to the published folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from functools import partial
from itertools import accumulate
from typing import Protocol

from torch import nn

from ..holdings.steps import Steps
from ..ranks.coordinator import BackgroundCoordinator, Coordinator
from ..reports.measures import PhaseClock
from ..reports.save import SavingRank
from .files import Comparison, ShardWriter, sync_all
from .host_copy import HostCopy, HostMemory, Room
from .preparation import Finalizer, WritePlan, digests_of
from .publication import Publication
from .snapshot import Snapshot
from .write import SaveTask, execute_saves


ALL = "all"
"""The setting by which everything is copied, and the reason that needs no saying."""

SHARE = 8
"""Of what a rank writes, 1/8 may be copied, if no setting says more or less."""


class Taken(Protocol):
    """What a rank is going to write, taken at the call; given to each plan's writer, and again to be compared.

    Attributes:
        copied_bytes: how many bytes were copied in host memory.
        held_seconds: how long steps of the optimizer were held.
    """

    copied_bytes: int
    held_seconds: float

    def write(self, check: Callable[[], None]) -> None: ...
    def verify(self, comparisons: Sequence[Comparison], check: Callable[[], None]) -> None: ...
    def secure(self) -> None: ...
    def end(self) -> None: ...


class WholeCopy:
    """Copies of everything: a :class:`Taken`."""

    held_seconds = 0.0

    def __init__(
        self,
        model: nn.Module,
        plans: Sequence[WritePlan],
        writers: Sequence[ShardWriter],
        coordinator: Coordinator,
        threads: int,
    ) -> None:
        """Copy (all ranks)."""
        sizes = [each.plan.bytes_written for each in plans]
        self.copied_bytes, self._writers = sum(sizes), writers
        memory = coordinator.run_on_all(partial(HostMemory.of_model, model, self.copied_bytes))
        self._copies = [HostCopy(memory, stop - size) for stop, size in zip(accumulate(sizes), sizes, strict=True)]
        pairs = zip(plans, self._copies, strict=True)
        tasks = [SaveTask(each.plan, each.parameters, copy.put) for each, copy in pairs]

        def wait() -> None:
            for copy in self._copies:
                copy.wait()

        execute_saves(tasks, coordinator, threads, wait)

    def write(self, check: Callable[[], None]) -> None:
        for copy, writer in zip(self._copies, self._writers, strict=True):
            copy.give(writer.put, check)

    def verify(self, comparisons: Sequence[Comparison], check: Callable[[], None]) -> None:
        for copy, comparison in zip(self._copies, comparisons, strict=True):
            copy.give(comparison.put, check)

    def secure(self) -> None:
        """Nothing is read from memory of the training."""

    def end(self) -> None:
        self._copies = []


def begun_snapshot(
    model: nn.Module,
    plans: Sequence[WritePlan],
    writers: Sequence[ShardWriter],
    coordinator: Coordinator,
    steps: Steps,
    snapshot_bytes: int,
    *,
    verifies: bool,
) -> Snapshot:
    """Begin a :class:`Snapshot` (all ranks)."""

    def made() -> Snapshot:
        nbytes = snapshot_bytes or sum(each.plan.bytes_written for each in plans) // SHARE
        return Snapshot(plans, writers, steps, Room.of_model(model, nbytes), verifies=verifies)

    snapshot = coordinator.run_on_all(made)
    try:
        snapshot.begin(coordinator)
    except BaseException:
        snapshot.end()
        raise
    return snapshot


def write_in_background(
    publication: Publication,
    plans: Sequence[WritePlan],
    finalizer: Finalizer,
    taken: Taken,
    writers: Sequence[ShardWriter],
    coordinator: BackgroundCoordinator,
    clock: PhaseClock,
    figures: Callable[[], SavingRank],
    *,
    verifies: bool,
) -> list[SavingRank]:
    """Write, wait for the other ranks, and publish; returns what each rank did, which `figures` says of this one.

    No tensor of the training is changed, and no collective made.
    """
    began = time.perf_counter()
    digests: dict[str, int] = {}

    def write() -> None:
        with ExitStack() as opened, clock("write"):
            for writer in writers:
                opened.enter_context(closing(writer))
            taken.write(coordinator.check)
            with clock("sync"):
                sync_all(writers)
            digests.update(digests_of(plans, writers))
        if verifies:
            with ExitStack() as opened, clock("verify"):
                paths = [each.paths(publication.temporary) for each in plans]
                taken.verify([opened.enter_context(closing(Comparison(each))) for each in paths], coordinator.check)
        clock.add("held", taken.held_seconds)

    try:
        coordinator.agree(_error_of(write))
        publish = partial(finalizer.publish, publication, plans, coordinator.all_gather(digests))
        with clock("publish"):
            coordinator.agree(_error_of(publish) if coordinator.is_main else None)
        clock.add("total", time.perf_counter() - began)
        return [SavingRank(**each) for each in coordinator.all_gather(asdict(figures()))]
    except BaseException:
        if coordinator.is_main:
            publication.abandon()
        raise
    finally:
        taken.end()
        coordinator.close()


def _error_of(work: Callable[[], object]) -> Exception | None:
    try:
        work()
    except Exception as error:
        return error
    return None
