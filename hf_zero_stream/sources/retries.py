"""Trying again what failed for a reason that may pass; the source says which reasons these are."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import tenacity


__all__ = ["Retries"]

T = TypeVar("T")

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0


class Retries:
    """Tries each call again up to `limit` times, after 0.1 s, 0.2 s, 0.4 s and so on; threads may share it.

    `count` is how many calls were tried again so far.
    """

    def __init__(self, limit: int = 0) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self.count = 0

    def call(self, function: Callable[[], T], is_transient: Callable[[BaseException], bool]) -> T:
        """What `function` returns in the end, or its last error; only transient errors are tried again."""
        try:
            return function()  # without tenacity, which takes 40 us: every read comes through here
        except BaseException as error:
            if not is_transient(error):
                raise
            failures = [error]

        def try_on() -> T:
            if failures:
                raise failures.pop()
            return function()

        return tenacity.Retrying(
            retry=tenacity.retry_if_exception(is_transient),
            stop=tenacity.stop_after_attempt(self._limit + 1),
            wait=tenacity.wait_exponential(multiplier=FIRST_PAUSE_S, max=LONGEST_PAUSE_S),
            before_sleep=self._note,
            reraise=True,
        )(try_on)

    def _note(self, state: tenacity.RetryCallState) -> None:
        with self._lock:
            self.count += 1
