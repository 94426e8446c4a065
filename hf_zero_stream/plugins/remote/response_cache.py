"""Servers' responses within one call, such as a ``from_pretrained``: each thing is asked for once, many at a time.

Requests to a server mostly wait. What a call is going to need is asked for ahead, by threads, and is there when the
call comes to it. The cache is forgotten with the call: objects may change.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from ...plugin_api import set_in_context
from .urls import RequestFailed


T = TypeVar("T")

AT_ONCE = 64
"""Requests under way ahead of their use: each is short, and of these the latency counts."""

_FINAL_STATUS = (403, 404)
"""A server that answers this is not asked again: whether an optional file exists is asked more than once."""

Key = tuple[str, str]
"""What is asked for, and of which object."""


class ResponseCache:
    """Responses by key; used by many threads. Once closed, it passes every question on and remembers nothing."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="hf_zero_stream-ask")
        self._found: dict[Key, Future[Any]] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    @staticmethod
    def current() -> ResponseCache | None:
        """Return the cache of the call that the running code is in (:func:`cached_responses`); None outside one."""
        return _current.get()

    def prefetch(self, key: Key, ask: Callable[[], Any]) -> None:
        """Have a thread call `ask`, unless that was done before. Its error is raised by :meth:`get`."""
        with self._lock:
            if not self._is_closed and key not in self._found:
                self._found[key] = self._threads.submit(ask)

    def get(self, key: Key, ask: Callable[[], T]) -> T:
        """The answer, which `ask` gives if nobody has asked yet; raises what `ask` raises."""
        with self._lock:
            if self._is_closed:
                future, is_asked = Future[Any](), False
            else:
                is_asked = key in self._found
                future = self._found.setdefault(key, Future())
        if not is_asked:
            try:
                future.set_result(ask())
            except BaseException as error:
                future.set_exception(error)
        try:
            return future.result()
        except BaseException as error:
            if not isinstance(error, RequestFailed) or error.status not in _FINAL_STATUS:
                with self._lock:
                    if self._found.get(key) is future:
                        del self._found[key]
            raise

    def close(self) -> None:
        """Forget everything, and ask for nothing more; requests that are under way end by themselves."""
        with self._lock:
            self._is_closed = True
            self._found.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)


@contextmanager
def cached_responses() -> Iterator[ResponseCache]:
    """A call inside which each thing is asked for once. A call inside another one shares its cache."""
    around = _current.get()
    if around is not None:
        yield around
        return
    with closing(ResponseCache()) as cache, set_in_context(_current, cache):
        yield cache


_current: ContextVar[ResponseCache | None] = ContextVar("hf_zero_stream_answers", default=None)
