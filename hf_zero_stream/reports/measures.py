"""Clocks, memory samples and progress bars for loads and saves; and a context without the garbage collector."""

from __future__ import annotations

import gc
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self, TextIO

import psutil
import torch.distributed as dist
from huggingface_hub.utils import are_progress_bars_disabled
from tqdm.auto import tqdm

from ..settings.config import announced_local_rank


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

    Such memory cannot be dropped and read again from a file, as mapped files and the page cache can. Linux counts it
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


LOG_SECONDS = 10
"""Least time between two lines of a bar in a log file."""


class _LogLines:
    """A text stream that writes each state of a bar as a line of its own, in place of the one before."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> None:
        if state := text.strip("\r\n "):
            self._file.write(f"{state}\n")

    def flush(self) -> None:
        self._file.flush()


def _log_options() -> dict[str, Any]:
    """Options of tqdm for a stderr that is neither a terminal nor a notebook's: few lines, no carriage returns."""
    in_notebook = any(base.__module__ == "tqdm.notebook" for base in tqdm.__mro__)
    if in_notebook or sys.stderr.isatty():
        return {}
    return {"file": _LogLines(sys.stderr), "mininterval": LOG_SECONDS, "ascii": True, "ncols": 80}


_trainer_is_quiet = False
"""Whether the newest ``TrainingArguments`` have `disable_tqdm`."""


def follow_trainer(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """``TrainingArguments.__post_init__``, which settles `disable_tqdm`."""
    global _trainer_is_quiet
    original(self, *args, **kwargs)
    _trainer_is_quiet = bool(self.disable_tqdm)


def _has_rank_0_elsewhere() -> bool:
    return dist.is_available() and dist.is_initialized() and int(dist.get_rank()) > 0


@contextmanager
def progress_bar(
    own_bytes: int, description: str, enabled: bool, of_all_ranks: int
) -> Iterator[Callable[[int], None]]:
    """Show a bar inside, and close it at the end, also after an error; yields a function to advance it, thread-safe.

    The bar counts the bytes of all ranks: they go on at about the pace of this rank, which advances it by its
    `own_bytes` in all. Without any there is no bar.

    In a log file the bar is a line at the beginning, one every ten seconds, and one at the end, all by rank 0: nodes
    often share the file. Elsewhere the local main process of each node shows it (as the launcher numbers them). It is
    shown only if `enabled` is true, and not if the bars of huggingface_hub, transformers or the Trainer are disabled,
    or transformers' verbosity is above WARNING.
    """
    # transformers.utils.logging.disable_progress_bar() disables huggingface_hub's bars too, and its verbosity is the
    # level of its logger: so transformers, which takes seconds to import, is not asked.
    quiet = are_progress_bars_disabled() or logging.getLogger("transformers").getEffectiveLevel() > logging.WARNING
    quiet = quiet or _trainer_is_quiet
    in_log = _log_options()
    is_here = announced_local_rank() == 0 and not (in_log and _has_rank_0_elsewhere())
    hidden = quiet or not (enabled and own_bytes and is_here)
    lock, done = threading.Lock(), 0
    with tqdm(
        total=of_all_ranks,
        desc=description,
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        disable=hidden,
        **in_log,
    ) as bar:

        def advance(nbytes: int) -> None:
            nonlocal done
            with lock:  # tqdm's counter is a plain `+=`, which loses updates when threads meet
                done += nbytes
                if not hidden:
                    bar.update(of_all_ranks * done // own_bytes - bar.n)

        yield advance


class PhaseClock:
    """Adds up the wall-clock seconds of each phase of a load or of a save: ``with clock("plan"): ...``.

    Any thread may enter a phase, and many times. Phases may nest or overlap: each is timed alone.
    """

    def __init__(self, phases: Sequence[str]) -> None:
        self._seconds = dict.fromkeys(phases, 0.0)
        self._began = time.perf_counter()
        self._is_total = False
        self._lock = threading.Lock()

    @property
    def seconds(self) -> dict[str, float]:
        """Those of the phases that have ended, and of a total that goes on, until now."""
        with self._lock:
            going_on = {"total": self._seconds["total"] + time.perf_counter() - self._began} if self._is_total else {}
            return self._seconds | going_on

    def add(self, phase: str, seconds: float) -> None:
        """Add `seconds` to a phase; raises ValueError if the clock has no such phase."""
        if phase not in self._seconds:
            raise ValueError(f"phase: expected one of {', '.join(self._seconds)}; got {phase!r}")
        with self._lock:
            self._seconds[phase] += seconds

    def add_rest(self, phase: str) -> None:
        """Add to a phase the time since the total began that no other has counted; none may be going on."""
        self.add(phase, max(0.0, time.perf_counter() - self._began - sum(self._seconds.values())))

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Add the duration of the context to a phase, also if it ends with an error."""
        self.add(phase, 0.0)  # raises before anything is done if there is no such phase
        start = time.perf_counter()
        if phase == "total":
            self._began, self._is_total = start, True
        try:
            yield
        finally:
            if phase == "total":
                self._is_total = False
            self.add(phase, time.perf_counter() - start)
