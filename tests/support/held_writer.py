"""A thread of a save in the background that is held before each of its files."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hf_zero_stream.saving.snapshot import Snapshot


class HeldWriter:
    """Holds the writers of snapshots of this process at the first piece of each file."""

    def __init__(self) -> None:
        self.reached = 0
        """The files that the present save has come to."""
        self._passes: float = 0
        self._has_ended = False
        self._changed = threading.Condition()

    def hold_at(self, file: int) -> None:
        """Have the next save write `file` files, and be held at the one that follows."""
        self.reached, self._passes, self._has_ended = 0, file, False

    def let_go(self) -> None:
        with self._changed:
            self._passes = float("inf")
            self._changed.notify_all()

    def wait_until_held(self) -> bool:
        """Wait until it is held, or until this rank has written all; whether it is held."""
        with self._changed:
            self._changed.wait_for(lambda: self.reached > self._passes or self._has_ended)
            return self.reached > self._passes

    def _end(self) -> None:
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def _pass(self) -> None:
        with self._changed:
            self.reached += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.reached <= self._passes)


@contextmanager
def held_writer() -> Iterator[HeldWriter]:
    """Inside, every snapshot's thread is held as the writer says."""
    held, original, seen = HeldWriter(), Snapshot._next, set[Any]()

    def held_next(self: Snapshot) -> Any:
        unit = original(self)
        if unit is not None:
            places = unit.segments or unit.copies
            shard = places[0].shard if unit.segments else places[0][0]  # type: ignore[union-attr]
            if (id(self), shard) not in seen:
                seen.add((id(self), shard))
                held._pass()
                unit = original(self)  # others may have taken it
        if unit is None:
            held._end()
        return unit

    Snapshot._next = held_next  # type: ignore[method-assign]
    try:
        yield held
    finally:
        held.let_go()
        Snapshot._next = original  # type: ignore[method-assign]
