"""Writes a save in the background: from a snapshot to the published folder."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from functools import partial

from ..holdings.steps import Steps
from ..ranks.coordinator import BackgroundCoordinator
from ..reports.save import SavingRank
from .files import Comparison, ShardWriter
from .places import Publishing
from .preparation import Finalizer, WritePlan
from .room import Room
from .snapshot import Snapshot
from .write import Work


ALL = "all"
"""The setting by which everything is copied, and the reason that needs no saying."""

SHARE = 8
"""Of what a rank writes, 1/8 may be copied, if no setting says more or less."""


def begun_snapshot(work: Work, plan: WritePlan, writer: ShardWriter, steps: Steps | None, nbytes: int) -> Snapshot:
    """Begin a :class:`Snapshot` that copies so many bytes at most, the usual share if 0; without `steps`, all."""

    def made() -> Snapshot:
        share = plan.plan.bytes_written if steps is None else nbytes or plan.plan.bytes_written // SHARE
        return Snapshot(writer, steps, Room.of_model(work.model, share), verifies=work.verifies)

    snapshot = work.coordinator.run_on_all(made)
    try:
        snapshot.begin(plan, work.coordinator, work.threads)
    except BaseException:
        snapshot.end()
        raise
    return snapshot


def write_in_background(
    work: Work,
    publication: Publishing,
    plan: WritePlan,
    finalizer: Finalizer,
    snapshot: Snapshot,
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
            snapshot.write(coordinator.check)
            with clock("sync"):
                writer.sync()
            digests.update(plan.named(writer.digests))
        if work.verifies:
            with closing(Comparison(plan.paths(publication.temporary))) as comparison, clock("verify"):
                snapshot.verify(comparison, coordinator.check)
        clock.add("held", snapshot.held_seconds)

    try:
        coordinator.agree(_error_of(write))
        publish = partial(finalizer.publish, publication, plan, coordinator.all_gather(digests))
        error: Exception | None = None
        if coordinator.is_main:
            with clock("publish"):
                error = _error_of(publish)
        clock.add("total", time.perf_counter() - began)
        mine = work.figures(plan, copied=snapshot.copied_bytes)
        return [SavingRank(**each) for each in coordinator.all_gather(asdict(mine), error)]
    except BaseException:
        if coordinator.is_main:
            publication.abandon()
        raise
    finally:
        snapshot.end()
        coordinator.close()


def _error_of(work: Callable[[], object]) -> Exception | None:
    try:
        work()
    except Exception as error:
        return error
    return None
