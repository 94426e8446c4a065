"""Saves that go on in the background: at most one at a time, which every later save and load waits for."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

from transformers.utils import logging

from ..errors import HfZeroStreamError, PlaceTakenError, SaveError
from ..reports.save import SaveReport


logger = logging.get_logger(__name__)


class PendingSave:
    """A save that goes on in the background, on this rank.

    The next save or load of a training waits for it, and raises its error, if nobody has called :meth:`wait`; so does
    the end of the interpreter, which only logs the error. For saves to another place see :func:`finish_pending`.
    """

    def __init__(
        self, work: Callable[[], SaveReport], secure: Callable[[], object] = lambda: None, place: Path | str = ""
    ) -> None:
        self.place = place
        self._process = os.getpid()
        self._report: SaveReport | None = None
        self._error: BaseException | None = None
        self._is_told = False  # whether somebody has heard of the error
        self._secure = secure
        self._after: list[Callable[[], object]] = []
        self._if_failed: list[Callable[[], object]] = []
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
        return self._report is not None or self._error is not None

    def wait(self) -> SaveReport:
        """Wait until all is on the disk under its final name; returns what every rank did, the same on all of them.

        Raises:
            SaveError: a file cannot be written on some rank. The state that was there before still is. Or this process
                was forked from the one that saves.
            PeerError: a rank has died.
        """
        if not self.done and self._process != os.getpid():
            raise SaveError(
                f"{self.place}: this save goes on in process {self._process}, from which this one (process "
                f"{os.getpid()}) was forked without the thread that writes. Wait for it there."
            )
        if self._thread.ident is not None:
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
                self._after += [work] if self._error is None else []
                return
        work()

    def otherwise(self, work: Callable[[], object]) -> None:
        """Do `work` when the save has failed, and still had its place: in the background, or at once if it has."""
        with self._lock:
            if self._error is None:
                self._if_failed.append(work)
                return
        if not isinstance(self._error, PlaceTakenError):
            work()

    def _run(self, work: Callable[[], SaveReport]) -> None:
        try:
            report = work()
            while self._after:
                self._after.pop(0)()
            with self._lock:
                self._report = report
            while self._after:  # what came in between
                self._after.pop(0)()
        except BaseException as error:
            with self._lock:
                self._error = _without_frames(error)
            self._after.clear()
            while self._if_failed:
                self.otherwise(self._if_failed.pop(0))
            logger.error(f"A save in the background has failed; what was there before still is. {self.place}: {error}")


_current: PendingSave | None = None


def finish_pending(*, raises: bool = True, elsewhere: Path | str | None = None) -> BaseException | None:
    """Wait for the save that is under way, if there is one; raise its error, unless it was raised already.

    A save that is about to be made `elsewhere`, at a place that has not failed, is not to be stopped by it: its caller
    gets the error, which is logged.
    """
    global _current
    pending = _current
    if pending is None or pending._thread is threading.current_thread():
        return None
    pending._thread.join()
    if not raises:
        return None
    _current, error = None, pending._error
    if error is None or pending._is_told:
        return None
    if elsewhere is None or elsewhere == pending.place:
        pending.wait()
    logger.error(f"The save before this one, to {elsewhere}, has failed; this one is made. {pending.place}: {error}")
    return error


def _forget_in_child() -> None:
    """In a forked process: the save, and the thread that makes it, are its parent's."""
    global _current
    _current = None


os.register_at_fork(after_in_child=_forget_in_child)


def _without_frames(error: BaseException) -> BaseException:
    """An error of ours, which says all, without the functions that it came from: these have what is trained."""
    each: BaseException | None = error if isinstance(error, HfZeroStreamError) else None
    while each is not None:
        each.__traceback__ = None
        each = each.__cause__ or each.__context__
    return error


def after_pending(work: Callable[[], object]) -> None:
    """Do `work` now, or as the last part of the save that is under way; not at all if that fails, or has failed."""
    if _current is None:
        work()
    else:
        _current.then(work)
