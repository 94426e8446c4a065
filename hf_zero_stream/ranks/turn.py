"""Whose turn it is to use the process group."""

from __future__ import annotations

import threading


class Turn:
    """Held by a thread whose load or save uses the process group; within it, that thread may take it again.

    Another thread may give it back, which a lock of Python's does not allow: a pass of a weight stream goes on, and
    ends, in the thread that asks for the next bucket.
    """

    def __init__(self) -> None:
        self._free = threading.Condition()
        self._owner = self._depth = 0

    def acquire(self, *, blocking: bool) -> bool:
        thread = threading.get_ident()
        with self._free:
            if not self._free.wait_for(lambda: self._owner in (0, thread), None if blocking else 0.0):
                return False
            self._owner, self._depth = thread, self._depth + 1
            return True

    def release(self) -> None:
        with self._free:
            self._depth -= 1
            if not self._depth:
                self._owner = 0
                self._free.notify_all()
