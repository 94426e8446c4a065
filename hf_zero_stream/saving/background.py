"""The part of a save that goes on in the background: from copies in host memory to the published folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict

from ..ranks.coordinator import BackgroundCoordinator
from ..reports.measures import PhaseClock
from ..reports.save import SavingRank
from .files import Comparison, ShardWriter, sync_all
from .host_copy import HostCopy
from .preparation import Prepared


def write_in_background(
    prepared: Prepared,
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

    def write() -> None:
        with ExitStack() as opened, clock("write"):
            files = [opened.enter_context(closing(writer)) for writer in prepared.files(ShardWriter)]
            for copy, writer in zip(copies, files, strict=True):
                copy.give(writer.put, coordinator.check)
            with clock("sync"):
                sync_all(files)
        if verifies:
            with clock("verify"):
                for copy, comparison in zip(copies, prepared.files(Comparison), strict=True):
                    with closing(comparison):
                        copy.give(comparison.put, coordinator.check)

    try:
        coordinator.agree(_error_of(write))
        with clock("publish"):
            coordinator.agree(_error_of(prepared.publish) if coordinator.is_main else None)
        clock.add("total", time.perf_counter() - began)
        return [SavingRank(**each) for each in coordinator.all_gather(asdict(figures()))]
    except BaseException:
        if coordinator.is_main:
            prepared.publication.abandon()
        raise
    finally:
        coordinator.close()


def _error_of(work: Callable[[], object]) -> Exception | None:
    try:
        work()
    except Exception as error:
        return error
    return None
