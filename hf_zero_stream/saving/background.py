"""Writes a save in the background: from copies in host memory to the published folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from functools import partial

from ..ranks.coordinator import BackgroundCoordinator
from ..reports.measures import PhaseClock
from ..reports.save import SavingRank
from .files import Comparison, Publication, ShardWriter, sync_all
from .host_copy import HostCopy
from .preparation import Finalizer, WritePlan, digests_of


def write_in_background(
    publication: Publication,
    plans: Sequence[WritePlan],
    finalizer: Finalizer,
    copies: Sequence[HostCopy],
    coordinator: BackgroundCoordinator,
    clock: PhaseClock,
    figures: Callable[[], SavingRank],
    *,
    verifies: bool,
) -> list[SavingRank]:
    """Write, wait for the other ranks, and publish; returns what each rank did, which `figures` says of this one.

    No tensor of the training is touched, and no collective made.
    """
    began = time.perf_counter()
    paths = [each.paths(publication.temporary) for each in plans]
    digests: dict[str, int] = {}

    def write() -> None:
        with ExitStack() as opened, clock("write"):
            has_digests = finalizer.needs_digests
            writers = [opened.enter_context(closing(ShardWriter(each, has_digests=has_digests))) for each in paths]
            for copy, writer in zip(copies, writers, strict=True):
                copy.give(writer.put, coordinator.check)
            with clock("sync"):
                sync_all(writers)
            digests.update(digests_of(plans, writers))
        if verifies:
            with clock("verify"):
                for copy, each in zip(copies, paths, strict=True):
                    with closing(Comparison(each)) as comparison:
                        copy.give(comparison.put, coordinator.check)

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
        coordinator.close()


def _error_of(work: Callable[[], object]) -> Exception | None:
    try:
        work()
    except Exception as error:
        return error
    return None
