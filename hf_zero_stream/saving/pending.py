"""Saves that go on in the background, and what waits for a whole one: nothing goes before its successor is whole.

At most one save is under way, and every later save and load waits for it. A training has its place in here by its
model, and its saves are told apart by its id and its steps. That one is whole is noted on every rank, after all have
agreed; what fails, or was made by others, is never noted.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import nn
from transformers.utils import logging

from ..errors import HfZeroStreamError, PlaceTakenError, SaveError
from ..holdings.own_names import fixed_names
from ..ranks.coordinator import expected_at, meeting
from ..ranks.rendezvous import SAVE, MeetingKind
from ..reports.measures import collector_paused
from ..reports.save import SaveReport
from ..seams.wrappers import unwrapped
from ..settings.scope import set_in_context
from ..sources.base import is_url


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


@contextmanager
def operation(kind: MeetingKind, *, folder: Any = None, is_part: bool = False) -> Iterator[BaseException | None]:
    """Around each save, load or resume of a model, from its call on.

    Before it, the save that is under way comes to its end, which may be an error of it; what is given is the error of
    one to another place than this one, to `folder`. Inside, the modules of models stay as they are, the collector of
    garbage waits, and ranks that have come to a meeting of this `kind` hear of what fails before it. If this is a part
    of what ranks have met for already, they wait in that.
    """
    place = str(folder).rstrip("/") if is_url(folder) else folder and Path(folder)
    with nullcontext() if is_part else expected_at(kind):
        failed = finish_pending(elsewhere=place)
        with fixed_names(), collector_paused():
            yield failed


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


def save_under_way() -> PendingSave | None:
    """The save that was begun last, unless it has been waited for since; the same on all ranks."""
    return _current


def after_pending(work: Callable[[], object]) -> None:
    """Do `work` now, or as the last part of the save that is under way; not at all if that fails, or has failed."""
    if _current is None:
        work()
    else:
        _current.then(work)


class _Waiting(NamedTuple):
    training: str
    steps: int
    work: Callable[[], object]
    or_weights: bool


@dataclass(eq=False)
class _Saves:
    """What is known of one model: the steps of the newest whole state of each training, and what waits."""

    states: dict[str, int] = field(default_factory=dict)
    waiting: list[_Waiting] = field(default_factory=list)


_of_models: WeakKeyDictionary[nn.Module, _Saves] = WeakKeyDictionary()
_lock = threading.Lock()


def when_whole(
    model: nn.Module, training: str, steps: int, work: Callable[[], object], *, or_weights: bool = False
) -> bool:
    """Do `work` once a state of the `training` of this id, of so many `steps` or more, is whole on a shared disk.

    `or_weights`: the training has come to its end, so that weights that are saved from now on are its result, too.
    Returns whether it is done already.
    """
    with _lock:
        _of_models.setdefault(model, _Saves()).waiting.append(waiting := _Waiting(training, steps, work, or_weights))
    return waiting in _do_what_is_due(model)


def note_state(model: nn.Module, training: str, steps: int, saved: object) -> None:
    """Note a state when it is whole: at once, or, if what was `saved` is pending, as the last part of that."""

    def note() -> None:
        with _lock:
            states = _of_models.setdefault(model, _Saves()).states
            states[training] = max(steps, states.get(training, -1))
        _do_what_is_due(model)

    if (later := _later.get()) is not None:
        later.append(note)
    else:
        _after(saved, note)


_later: ContextVar[list[Callable[[], object]] | None] = ContextVar("hf_zero_stream_notes_for_later", default=None)


@contextmanager
def notes_for_later() -> Iterator[Callable[[object], None]]:
    """Inside, states are not noted: they are when what this gives is called with what was saved.

    For callers that have something to do yet before a state is what a resume finds.
    """
    notes: list[Callable[[], object]] = []

    def note(saved: object) -> None:
        for each in notes:
            _after(saved, each)

    with set_in_context(_later, notes):
        yield note


def _after(saved: object, work: Callable[[], object]) -> None:
    if isinstance(saved, PendingSave):
        saved.then(work)
    else:
        work()


def note_weights(model: nn.Module) -> None:
    """Note that weights of `model` are whole that were saved just now (all ranks)."""
    _do_what_is_due(model, has_weights=True)


def noting_weights(save_model: Callable[..., Any]) -> Callable[..., Any]:
    """Have what replaces ``Trainer.save_model`` note the weights; of some models rank 0 alone saves them."""

    @functools.wraps(save_model)
    def save(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        saves = _of_models.get(model := unwrapped(self.model))
        if saves is None or not any(each.or_weights for each in saves.waiting):
            return save_model(original, self, *args, **kwargs)
        with expected_at(SAVE):
            result = save_model(original, self, *args, **kwargs)
        with meeting(SAVE) as coordinator:
            coordinator.agree()
        note_weights(model)
        return result

    return save


def _do_what_is_due(model: nn.Module, *, has_weights: bool = False) -> list[_Waiting]:
    with _lock:
        saves = _of_models.setdefault(model, _Saves())
        is_due = partial(_is_due, saves.states, has_weights)
        due = [each for each in saves.waiting if is_due(each)]
        saves.waiting = [each for each in saves.waiting if not is_due(each)]
    for each in due:
        each.work()
    return due


def _is_due(states: dict[str, int], has_weights: bool, waiting: _Waiting) -> bool:
    return states.get(waiting.training, -1) >= waiting.steps or (has_weights and waiting.or_weights)
