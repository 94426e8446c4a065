"""Walks all ways in which the steps of several writers to one place can follow each other, with failures in between.

A writer is a function that calls :meth:`Turn.step` before each thing that it does to the place. It runs in a thread
that waits there until it is its turn. A way that leads to a state that was seen before is not followed further; a
state is what is in the place, and for each writer in which line of which function it stands, with the plain values of
their variables, and what it remembers beside. A writer that hangs is one whose turn does not come for long.
"""

from __future__ import annotations

import errno
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, is_dataclass
from typing import Any


class CrashedError(BaseException):
    """The process of a writer has been killed; nothing of it does anything any more."""


GO, CRASH, FAIL, LOSE = "go", "crash", "fail", "lose the answer of"
"""What a writer is told at a step: do it, die, it fails, or it is done and looks as if it had failed."""


@dataclass
class Turn:
    """One writer: the steps that it has done, where it stands, and the end of it."""

    number: int
    done: list[str] = field(default_factory=list)
    stands_in: tuple[Any, ...] = ()
    remembers: Callable[[], Any] = lambda: None
    at: str = ""
    outcome: Any = None
    is_over: bool = False
    is_dead: bool = False
    _go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    _stands: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    _order: str = GO

    def step(self, what: str) -> bool:
        """Wait for the turn to do `what`; an OSError if it fails then. Returns whether it seems to fail afterwards."""
        if self.is_dead:
            raise CrashedError
        self.at, self.stands_in = what, _frames()
        self._stands.release()
        self._go.acquire()
        order, self._order = self._order, GO
        if order == CRASH:
            self.is_dead = True
            raise CrashedError
        self.done.append(what if order == GO else f"{order} {what}")
        if order == FAIL:
            raise OSError(errno.EIO, "Input/output error", what)
        return order == LOSE

    def wait(self, what: str) -> None:
        """Wait for somebody else: a step that leaves no trace, and cannot fail."""
        self.at = f"waits: {what}"
        if self.is_dead:
            raise CrashedError
        self._stands.release()
        self._go.acquire()
        if self._order == CRASH:
            self.is_dead = True
            raise CrashedError

    def move(self, order: str) -> None:
        """Let it do its next step, and come to the one after."""
        self._order = order
        self._go.release()
        self._stands.acquire()

    def start(self, work: Callable[[Turn], Any]) -> None:
        def run() -> None:
            try:
                self.outcome = work(self)
            except CrashedError:
                self.outcome = "crashed"
            except BaseException as error:
                self.outcome = error
            self.is_over = True
            self._stands.release()

        threading.Thread(target=run, daemon=True).start()
        self._stands.acquire()


def walk(
    place: Callable[[], Any],
    state_of: Callable[[Any], Any],
    writers: Sequence[Callable[[Any, Turn], Any]],
    check: Callable[[Any, Sequence[Turn], Sequence[tuple[int, str]]], None],
    *,
    failures: int,
    kinds: Sequence[str],
) -> int:
    """Take all ways from an empty `place` to where each writer has ended, and `check` there; returns how many states.

    Args:
        place: makes a new one, a context.
        state_of: all that is in it, to be compared.
        writers: functions of the place and of their turn.
        check: gets the place, the writers, and the way.
        failures: of these `kinds`, at most so many on one way.
    """
    seen = set[Any]()
    pending: list[tuple[tuple[int, str], ...]] = [()]
    while pending:
        way = pending.pop()
        with place() as it:
            turns = [Turn(number) for number in range(len(writers))]
            try:
                for turn, writer in zip(turns, writers, strict=True):
                    turn.start(lambda turn, writer=writer: writer(it, turn))  # type: ignore[misc]
                for number, order in way:
                    turns[number].move(order)
                while (state := _state(state_of(it), turns, way)) not in seen:
                    seen.add(state)
                    going = [turn for turn in turns if not turn.is_over]
                    if not going:
                        check(it, turns, way)
                        break
                    orders = [GO, *(kinds if _failed(way) < failures else ())]
                    steps = [(turn.number, order) for turn in going for order in _possible(turn, orders)]
                    pending.extend((*way, step) for step in steps[1:])
                    number, order = steps[0]  # this one is followed at once
                    turns[number].move(order)
                    way = (*way, steps[0])
            finally:
                for turn in turns:
                    while not turn.is_over:
                        with suppress(CrashedError):
                            turn.move(CRASH)
    return len(seen)


def _failed(way: Sequence[tuple[int, str]]) -> int:
    return sum(order != GO for _, order in way)


def _state(place: Any, turns: Sequence[Turn], way: Sequence[tuple[int, str]]) -> Any:
    stand = [(turn.stands_in, turn.remembers(), turn.at, turn.is_over, turn.outcome) for turn in turns]
    return place, str(stand), _failed(way)


def _is_plain(it: Any) -> bool:
    """Whether a variable is a value, which is the same each time that a way is taken."""
    if isinstance(it, type):
        return False
    if is_dataclass(it):
        return bool(getattr(type(it), "__dataclass_params__").frozen)  # noqa: B009 - no part of its type
    return it is None or isinstance(it, str | bytes | int | tuple | list | dict)


def _frames() -> tuple[Any, ...]:
    """The functions of the package that this thread is in: their names, lines and plain variables."""
    found = []
    frame = sys._getframe(2)
    while frame is not None:
        if "hf_zero_stream" in frame.f_code.co_filename:
            plain = [(name, repr(it)) for name, it in frame.f_locals.items() if _is_plain(it)]
            found.append((frame.f_code.co_name, frame.f_lineno, tuple(plain)))
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(found)


def _possible(turn: Turn, orders: Sequence[str]) -> Iterator[str]:
    for order in orders:
        if order in (GO, CRASH) or not turn.at.startswith("waits: "):
            yield order
