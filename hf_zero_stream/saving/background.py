"""What a save in the background takes of a training at its call, and what a thread of each rank then does with it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial

from ..ranks.background import BackgroundCoordinator
from ..ranks.coordinator import Coordinator
from ..reports.save import SavingRank
from .files import Comparison, ShardWriter
from .preparation import WritePlan
from .snapshot import Copies, begun_snapshot
from .write import Work


class Staged(ABC):
    """What a rank has taken at the call, in which all ranks took part, of what a thread can go on with alone.

    Attributes:
        exchanges: threads exchange more than a few values: they need a process group of their own.
        names: of the shards below the place.
        secure: returns when nothing is read any more from the memory of the training. It keeps nothing alive.
    """

    exchanges = False

    def __init__(self, work: Work, plan: WritePlan, names: Sequence[str]) -> None:
        self._work, self.plan, self.names = work, plan, names
        self.secure: Callable[[], object] = lambda: None

    @abstractmethod
    def finish(self, coordinator: BackgroundCoordinator) -> None:
        """Write all, and publish it when all ranks have (all ranks, each in its thread)."""

    @abstractmethod
    def figures(self) -> SavingRank:
        """What this rank did."""

    def abandon(self) -> None:
        """Remove what this rank has written, after an error, unless it has begun to be visible."""

    def end(self) -> None:
        """Keep nothing alive."""


class StagedFiles(Staged):
    """A :class:`.snapshot.Snapshot` of the training, that goes into files.

    Args:
        writer: of the files; closed in any case.
        compared: gives what compares them.
        publish: what is done when all ranks have written (all ranks, each in its thread).
    """

    def __init__(
        self,
        work: Work,
        plan: WritePlan,
        copies: Copies,
        writer: ShardWriter,
        compared: Callable[[], Comparison],
        publish: Callable[[Coordinator], object],
    ) -> None:
        super().__init__(work, plan, plan.names)
        self._writer, self._compared, self._publish = writer, compared, publish
        with ExitStack() as opened:
            opened.enter_context(closing(writer))
            self._snapshot = begun_snapshot(work, plan, writer, copies)
            opened.pop_all()
        self.secure = self._snapshot.secure

    def finish(self, coordinator: BackgroundCoordinator) -> None:
        coordinator.run_on_all(partial(self._write, coordinator.check))
        self._publish(coordinator)

    def _write(self, check: Callable[[], None]) -> None:
        clock, snapshot = self._work.clock, self._snapshot
        with closing(self._writer), clock("write"):
            snapshot.write(check)
            with clock("sync"):
                self._writer.sync()
        if self._work.verifies:
            with closing(self._compared()) as comparison, clock("verify"):
                snapshot.verify(comparison, check)
        clock.add("held", snapshot.held_seconds)

    def figures(self) -> SavingRank:
        return self._work.figures(self.plan, copied=self._snapshot.copied_bytes)

    def end(self) -> None:
        self._snapshot.end()
