"""Writes a save in the background: from a snapshot, or from copies in host memory, to the published folder."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from functools import partial
from typing import Protocol

from ..holdings.steps import Steps
from ..ranks.coordinator import BackgroundCoordinator
from ..reports.save import SavingRank
from .files import Comparison, ShardWriter
from .host_copy import HostCopy, HostMemory, Room
from .places import Publishing
from .preparation import Finalizer, WritePlan
from .snapshot import Snapshot
from .write import Work, execute_save


ALL = "all"
"""The setting by which everything is copied, and the reason that needs no saying."""

SHARE = 8
"""Of what a rank writes, 1/8 may be copied, if no setting says more or less."""


class Taken(Protocol):
    """What a rank is going to write, taken at the call; given to a writer, and again to be compared.

    Attributes:
        copied_bytes: how many bytes were copied in host memory.
        held_seconds: how long steps of the optimizer were held.
    """

    copied_bytes: int
    held_seconds: float

    def write(self, check: Callable[[], None]) -> None: ...
    def verify(self, comparison: Comparison, check: Callable[[], None]) -> None: ...
    def secure(self) -> None: ...
    def end(self) -> None: ...


class WholeCopy:
    """Copies of everything: a :class:`Taken`."""

    held_seconds = 0.0

    def __init__(self, work: Work, plan: WritePlan, writer: ShardWriter) -> None:
        """Copy (all ranks)."""
        self.copied_bytes, self._writer = plan.plan.bytes_written, writer
        memory = work.coordinator.run_on_all(partial(HostMemory.of_model, work.model, self.copied_bytes))
        self._copy: HostCopy | None = HostCopy(memory)
        execute_save(plan.plan, plan.parameters, self._copy.put, work.coordinator, work.threads, self._copy.wait)

    def write(self, check: Callable[[], None]) -> None:
        assert self._copy is not None
        self._copy.give(self._writer.put, check)

    def verify(self, comparison: Comparison, check: Callable[[], None]) -> None:
        assert self._copy is not None
        self._copy.give(comparison.put, check)

    def secure(self) -> None:
        """Nothing is read from memory of the training."""

    def end(self) -> None:
        self._copy = None


def begun_snapshot(work: Work, plan: WritePlan, writer: ShardWriter, steps: Steps, snapshot_bytes: int) -> Snapshot:
    """Begin a :class:`Snapshot` (all ranks)."""

    def made() -> Snapshot:
        nbytes = snapshot_bytes or plan.plan.bytes_written // SHARE
        return Snapshot(writer, steps, Room.of_model(work.model, nbytes), verifies=work.verifies)

    snapshot = work.coordinator.run_on_all(made)
    try:
        snapshot.begin(plan, work.coordinator)
    except BaseException:
        snapshot.end()
        raise
    return snapshot


def write_in_background(
    work: Work,
    publication: Publishing,
    plan: WritePlan,
    finalizer: Finalizer,
    taken: Taken,
    writer: ShardWriter,
    coordinator: BackgroundCoordinator,
) -> list[SavingRank]:
    """Write, wait for the other ranks, and publish; returns what each rank did.

    No tensor of the training is changed, and no collective made.
    """
    began, clock = time.perf_counter(), work.clock
    digests: dict[str, int] = {}

    def write() -> None:
        with closing(writer), clock("write"):
            taken.write(coordinator.check)
            with clock("sync"):
                writer.sync()
            digests.update(plan.named(writer.digests))
        if work.verifies:
            with closing(Comparison(plan.paths(publication.temporary))) as comparison, clock("verify"):
                taken.verify(comparison, coordinator.check)
        clock.add("held", taken.held_seconds)

    try:
        coordinator.agree(_error_of(write))
        publish = partial(finalizer.publish, publication, plan, coordinator.all_gather(digests))
        error: Exception | None = None
        if coordinator.is_main:
            with clock("publish"):
                error = _error_of(publish)
        clock.add("total", time.perf_counter() - began)
        mine = work.figures(plan, copied=taken.copied_bytes)
        return [SavingRank(**each) for each in coordinator.all_gather(asdict(mine), error)]
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
