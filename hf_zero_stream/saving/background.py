"""The part of a save that goes on in the background: from copies in host memory to the published folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field

from ..ranks.background import BackgroundMeeting
from ..reports.measures import PhaseClock
from ..reports.save import SavingRank
from .files import Comparison, ShardWriter, sync_all
from .host_copy import HostCopy
from .preparation import Planned, Prepared


@dataclass
class BackgroundSave:
    """What one rank does in the background; no tensor of the training is touched, and no collective made."""

    prepared: Prepared
    copies: Sequence[HostCopy]
    meeting: BackgroundMeeting
    clock: PhaseClock
    verifies: bool
    _began: float = field(default_factory=time.perf_counter)

    def run(self, figures: Callable[[Sequence[Planned]], SavingRank]) -> tuple[Sequence[Planned], list[SavingRank]]:
        """Write, wait for the other ranks, and publish; returns what each rank did."""
        meeting, prepared = self.meeting, self.prepared
        try:
            meeting.agree(_error_of(self._write))
            with self.clock("publish"):
                meeting.agree(_error_of(prepared.publish) if meeting.is_main else None)
            self.clock.add("total", time.perf_counter() - self._began)
            gathered = meeting.gather(asdict(figures(prepared.planned)))
            ranks = [SavingRank(**each) for each in meeting.broadcast(gathered)]
        except BaseException:
            if meeting.is_main:
                prepared.publication.abandon()
            raise
        finally:
            meeting.close()
        return prepared.planned, ranks

    def _write(self) -> None:
        with ExitStack() as opened, self.clock("write"):
            files = [opened.enter_context(closing(writer)) for writer in self.prepared.files(ShardWriter)]
            for copy, writer in zip(self.copies, files, strict=True):
                copy.give(writer.put, self.meeting.check)
            with self.clock("sync"):
                sync_all(files)
        if self.verifies:
            with self.clock("verify"):
                for copy, comparison in zip(self.copies, self.prepared.files(Comparison), strict=True):
                    with closing(comparison):
                        copy.give(comparison.put, self.meeting.check)


def _error_of(work: Callable[[], object]) -> Exception | None:
    try:
        work()
    except Exception as error:
        return error
    return None
