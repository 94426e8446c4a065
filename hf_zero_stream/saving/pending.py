"""Saves that go on in the background: at most one at a time, which every later save and load waits for."""

from __future__ import annotations

import threading
from collections.abc import Callable

from transformers.utils import logging

from ..reports.save import SaveReport


logger = logging.get_logger(__name__)


class PendingSave:
    """A save that goes on in the background, on this rank.

    The next save or load of a training waits for it, and raises its error, if nobody has called :meth:`wait`; so does
    the end of the interpreter, which only logs the error.
    """

    def __init__(self, work: Callable[[], SaveReport], secure: Callable[[], object] = lambda: None) -> None:
        self._report: SaveReport | None = None
        self._error: BaseException | None = None
        self._is_told = False  # whether somebody has heard of the error
        self._secure = secure
        self._after: list[Callable[[], object]] = []
        self._lock = threading.Lock()
        # No daemon: the interpreter waits for it before it ends.
        self._thread = threading.Thread(target=self._run, args=(work,), name="hf_zero_stream-save")

    @classmethod
    def finished(cls, report: SaveReport) -> PendingSave:
        """A save that was not made in the background after all."""
        made = cls(lambda: report)
        made._run(lambda: report)
        return made

    @property
    def done(self) -> bool:
        """Whether it has come to its end, a good one or not."""
        return not self._thread.is_alive()

    def wait(self) -> SaveReport:
        """Wait until all is on the disk under its final name; returns what every rank did, the same on all of them.

        Raises:
            SaveError: a file cannot be written on some rank. The state that was there before still is.
            PeerError: a rank has died.
        """
        if not self.done:
            self._thread.join()
        self._is_told = True
        if self._error is not None:
            raise self._error
        assert self._report is not None
        return self._report

    def take_values(self) -> None:
        """Return when nothing is read from the memory of the training any more.

        Steps of optimizers of torch do so themselves. Call it before anything else that changes parameters or the
        optimizer's state in place: averaged weights that are swapped in, adapters that are merged, edits by hand. What
        is not written yet is copied where there is room (`snapshot_bytes`), and else written first.
        """
        self._secure()

    def start(self) -> None:
        """Begin; no other may be under way."""
        global _current
        self._thread.start()
        _current = self

    def then(self, work: Callable[[], object]) -> None:
        """Do `work` when the save has succeeded, as its last part: in the background, or at once if it has."""
        with self._lock:
            if self._report is None:
                self._after.append(work)
                return
        work()

    def _run(self, work: Callable[[], SaveReport]) -> None:
        try:
            report = work()
            while self._after:
                self._after.pop(0)()
            with self._lock:
                self._report = report
            for each in self._after:  # what came in between
                each()
        except BaseException as error:
            self._error = error
            logger.error(f"A save in the background has failed; what was there before still is: {error}")


_current: PendingSave | None = None


def finish_pending(*, raises: bool = True) -> None:
    """Wait for the save that is under way, if there is one; raise its error, unless it was raised already."""
    global _current
    pending = _current
    if pending is None or pending._thread is threading.current_thread():
        return
    pending._thread.join()
    if raises:
        _current = None
        if not pending._is_told:
            pending.wait()


def after_pending(work: Callable[[], object]) -> None:
    """Do `work` now, or as the last part of the save that is under way; not at all if that fails, or has failed."""
    if _current is None:
        work()
    else:
        _current.then(work)
