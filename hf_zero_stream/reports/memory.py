"""How much anonymous memory a piece of work adds to this process, and keeping the garbage collector out of it."""

from __future__ import annotations

import gc
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType


__all__ = ["AnonymousMemory", "collector_paused", "total_memory_bytes"]

_STATUS = "/proc/self/status"
_RSS_ANON = re.compile(rb"^RssAnon:\s*(\d+) kB$", re.MULTILINE)


class AnonymousMemory:
    """A context in which the growth of this process's anonymous memory is watched.

    Anonymous memory is what cannot be dropped and read again from a file: heap, staging buffers, partitions on the
    CPU. Mapped files and the page cache are not in it. A daemon thread samples it; the thread ends with the context.

    Linux counts it per core and adds up late, so a value can be off by some hundred KiB. Where /proc/self/status does
    not give `RssAnon` (systems other than Linux), every value is 0 and no thread is started.

    Args:
        interval_seconds: time between two samples.
    """

    def __init__(self, interval_seconds: float = 0.01) -> None:
        self._interval_seconds = interval_seconds
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._file: int | None = None
        self._thread: threading.Thread | None = None
        self._entry_bytes = 0
        self._peak_bytes = 0

    @property
    def growth_peak(self) -> int:
        """The highest sample so far, in bytes over the value at entry; still readable after the context."""
        return self._peak_bytes - self._entry_bytes

    def sample(self) -> int:
        """Takes a sample now, so that a short peak at a known point is not missed.

        Returns:
            The growth since entry, in bytes; negative if memory has shrunk, 0 outside the context.
        """
        # The lock keeps __exit__ from closing the file under a reader of it.
        with self._lock:
            if self._file is None:
                return 0
            now_bytes = _read_anonymous_bytes(self._file) or 0
            self._peak_bytes = max(self._peak_bytes, now_bytes)
            return now_bytes - self._entry_bytes

    def __enter__(self) -> AnonymousMemory:
        self._entry_bytes = self._peak_bytes = 0
        try:
            file = os.open(_STATUS, os.O_RDONLY)
        except OSError:
            return self
        entry_bytes = _read_anonymous_bytes(file)
        if entry_bytes is None:
            os.close(file)
            return self
        self._file = file
        self._entry_bytes = self._peak_bytes = entry_bytes
        self._stop.clear()
        self._thread = threading.Thread(target=self._run, name="hf_zero_stream-memory", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._thread is None or self._file is None:
            return
        self.sample()
        self._stop.set()
        self._thread.join()
        self._thread = None
        with self._lock:
            os.close(self._file)
            self._file = None

    def _run(self) -> None:
        while not self._stop.wait(self._interval_seconds):
            self.sample()


def _read_anonymous_bytes(file: int) -> int | None:
    # The kernel writes the file anew for every read at offset 0, so it need not be opened again.
    match = _RSS_ANON.search(os.pread(file, 2**16, 0))
    return None if match is None else int(match[1]) * 1024


def total_memory_bytes() -> int:
    """Memory of this host, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@contextmanager
def collector_paused() -> Iterator[None]:
    """Python's cyclic garbage collector does not run inside, unless it was off already.

    Planning makes hundreds of thousands of small objects, all of which live on: each full collection would visit them
    and everything that torch and transformers hold, for nothing.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
