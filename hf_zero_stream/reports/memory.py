"""How much memory a piece of work adds to this process, and keeping the garbage collector out of it."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self

import psutil


SAMPLE_SECONDS = 0.01


class GrowthPeak:
    """A context in which a daemon thread samples the bytes that `measure` returns. It may be entered again."""

    def __init__(self, measure: Callable[[], int]) -> None:
        self._measure = measure
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._ended.set()
        self._entry_bytes = self._peak_bytes = 0

    @property
    def growth_peak(self) -> int:
        """The highest sample so far, in bytes over the value at entry; still readable after the context."""
        return self._peak_bytes - self._entry_bytes

    def sample(self) -> int:
        """Sample now, so that a short peak is not missed; returns the growth since entry, 0 outside the context."""
        if self._ended.is_set():
            return 0
        now_bytes = self._measure()
        with self._lock:
            self._peak_bytes = max(self._peak_bytes, now_bytes)
        return now_bytes - self._entry_bytes

    def __enter__(self) -> Self:
        self._entry_bytes = self._peak_bytes = self._measure()
        self._ended.clear()
        self._thread = threading.Thread(target=self._run, name="hf_zero_stream-memory", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.sample()
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(SAMPLE_SECONDS):
            self.sample()


class AnonymousMemory(GrowthPeak):
    """The growth of this process's anonymous memory: heap, staging buffers, partitions on the CPU.

    It is what cannot be dropped and read again from a file: neither mapped files nor the page cache. Linux counts it
    per core and adds up late, so a value can be off by some hundred KiB. On other systems every value is 0.
    """

    def __init__(self) -> None:
        process = psutil.Process()

        def anonymous_bytes() -> int:
            memory = process.memory_info()
            # On Linux "shared" is what is not anonymous: mapped files and shared memory.
            return memory.rss - memory.shared if psutil.LINUX else 0

        super().__init__(anonymous_bytes)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Stop the cyclic garbage collector inside: planning makes hundreds of thousands of objects.

    As a decorator it also covers the end of the function, when they are freed. What is alive when the collector goes
    on may have it look at every object of the process, which takes tenths of a second.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
