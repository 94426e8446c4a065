"""Carries out the reads of a plan with several threads.

Each takes the next read in file order: in place, where the destination is in host memory and wants the bytes as they
come, or through the thread's staging buffer. Positional reads and large copies release the GIL.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextvars import copy_context
from itertools import chain
from typing import NamedTuple, TypeVar

import torch

from ..accelerators import is_accelerator, near_cores
from ..planning.plan import BatchPlan, Read
from ..sources.base import ByteSource
from ..sources.page_cache import HUGE_PAGE_BYTES, MADV_HUGEPAGE, MADV_NOHUGEPAGE, MADV_POPULATE_WRITE, advise
from .lanes import Lane, lane_for


Item = TypeVar("Item")

TIMERS = ("buffer", "read", "convert", "copy")
"""What a thread does: wait for a free staging buffer, and for the source; copy out with a cast, and without."""


PROGRESS_INTERVAL_S = 0.01
"""Interval at which a thread reports progress: not after each read, because all threads need the GIL for it."""


class Spent(NamedTuple):
    """What it took to carry out reads."""

    seconds: dict[str, float]
    """Wall seconds, divided among "read" (also waiting for buffers), "convert" and "copy"."""
    thread_seconds: dict[str, float]
    """Seconds of all threads together; see :attr:`..reports.load.RankReport.thread_seconds`."""
    staging_bytes: int
    """Size of all staging buffers."""


def execute_reads(
    plan: BatchPlan,
    destinations: Sequence[torch.Tensor],
    source: ByteSource,
    *,
    threads: int,
    begin: float = 0.0,
    on_bytes: Callable[[int], None] | None = None,
    is_fresh: bool = True,
) -> Spent:
    """Fill `destinations` by the reads of `plan`; each thread tells `on_bytes` how many bytes came, every 10 ms.

    There is one flat destination for each target of the plan, of its dtype and at least ``stop - start`` long. `begin`
    is where in the reads to begin, in [0, 1): ranks of a host that begin at different places do not all wait for the
    same file. Without `is_fresh` the destinations have been written to before: nothing populates them.
    """
    if not plan.reads:
        return Spent({}, {}, 0)
    first = int(begin * len(plan.reads))
    executor = _ReadExecutor(plan, destinations, source, on_bytes, is_fresh)
    began = time.perf_counter()
    device = next((each.device for each in destinations if is_accelerator(each.device)), None)
    cores = frozenset[int]() if device is None else near_cores(device)
    run_in_threads(chain(plan.reads[first:], plan.reads[:first]), executor.work, threads, cores)
    executor.pages.leave()
    wall = time.perf_counter() - began
    total = {timer: sum(seconds[timer] for seconds, _ in executor.by_thread) for timer in TIMERS}
    factor = wall / (sum(total.values()) or 1.0)
    phases = {"read": total["buffer"] + total["read"], "convert": total["convert"], "copy": total["copy"]}
    return Spent(
        {phase: factor * value for phase, value in phases.items()},
        {"buffer": total["buffer"], "read": total["read"], "submit": total["convert"] + total["copy"]},
        sum(nbytes for _, nbytes in executor.by_thread),
    )


class _ReadExecutor:
    """Carries out reads in several threads, each with a lane of its own."""

    def __init__(
        self,
        plan: BatchPlan,
        destinations: Sequence[torch.Tensor],
        source: ByteSource,
        on_bytes: Callable[[int], None] | None,
        is_fresh: bool,
    ) -> None:
        self._destinations, self._source, self._on_bytes = destinations, source, on_bytes
        self._new_lane = lane_for(destinations, max(read.length for read in plan.reads))
        self._writable = [
            memoryview(d.detach().view(torch.uint8).numpy()) if d.device.type == "cpu" else None for d in destinations
        ]
        self.pages = HugePages(destinations if is_fresh else ())
        self.by_thread: list[tuple[dict[str, float], int]] = []
        """Seconds by `TIMERS`, and bytes of staging buffers, of each thread that has ended."""

    def work(self, reads: Iterator[Read]) -> None:
        """Carry out `reads` in this thread, and report progress."""
        seconds = dict.fromkeys(TIMERS, 0.0)
        nbytes, reported_at = 0, time.perf_counter()
        with self._new_lane() as lane:
            for read in reads:
                self._carry_out(read, lane, seconds)
                nbytes += read.length
                if self._on_bytes is not None and time.perf_counter() > reported_at + PROGRESS_INTERVAL_S:
                    self._on_bytes(nbytes)
                    nbytes, reported_at = 0, time.perf_counter()
        if self._on_bytes is not None:
            self._on_bytes(nbytes)
        self.by_thread.append((seconds, lane.allocated_bytes))

    def _carry_out(self, read: Read, lane: Lane, seconds: dict[str, float]) -> None:
        began = time.perf_counter()
        for piece in read.pieces if self.pages.are_wanted else ():
            if piece.box.numel == piece.box.to_extent:  # without holes
                destination = self._destinations[piece.target]
                itemsize = destination.element_size()
                self.pages.populate(destination, piece.box.to * itemsize, piece.box.numel * itemsize)
        buffers = _buffers_in_place(read, self._writable)
        if buffers is not None:
            self._source.read_into(read.shard, read.start, buffers)
            seconds["read"] += time.perf_counter() - began
            return
        staging = lane.buffer(read.length)
        filling = time.perf_counter()
        seconds["buffer"] += filling - began
        self._source.read_into(read.shard, read.start, [memoryview(staging.numpy())])
        before = time.perf_counter()
        seconds["read"] += before - filling
        lane.copy(read, staging, self._destinations)
        has_casts = any(piece.casts for piece in read.pieces)
        seconds["convert" if has_casts else "copy"] += time.perf_counter() - before


def _buffers_in_place(read: Read, writable: Sequence[memoryview | None]) -> list[memoryview] | None:
    """The buffers that take `read` without staging; None if a piece needs a cast, a scatter or a device copy."""
    buffers: list[memoryview] = []
    position = read.start
    for piece in read.pieces:
        target = writable[piece.target]
        if target is None or not piece.is_run or piece.start < position:
            return None
        if piece.start > position:
            buffers.append(memoryview(bytearray(piece.start - position)))  # cheaper to read than to skip
        begin = piece.box.to * piece.dtype.itemsize
        buffers.append(target[begin : begin + piece.stop - piece.start])
        position = piece.stop
    return buffers


SMALL_PAGES_BYTES_PER_SECOND = 2e9
"""Rate at which a thread touches fresh memory in pages of 4 KiB; with huge pages at hand, over 1e10."""

CREDIT_SECONDS = 0.03
"""Time that huge pages may take beyond that of small ones before they are given up."""


class HugePages:
    """Populates destinations in huge pages, just before they are written to, while that is faster than in small ones.

    Most of a load from the page cache is the kernel's work for fresh memory: reading 1.7 GB takes 0.75 s into pages of
    4 KiB and 0.25 s into huge ones. What was populated just before is still in the processor's cache when it is
    written to, and while one thread populates another may wait for the disk.

    But where a virtual machine gives its free memory back to its host, the host must first find memory for each huge
    page, and then the same load took 5 s. So pages are timed: what fast pieces gain pays for slow ones, and once
    `CREDIT_SECONDS` are lost, huge pages are not asked for any more. Several threads share the credit, inexactly.

    All of it is advice (``madvise(2)``): before Linux 5.14 or on another system nothing changes.
    """

    def __init__(self, destinations: Sequence[torch.Tensor]) -> None:
        """`destinations` are contiguous; those on devices, and small ones, are left alone."""
        large = [d for d in destinations if d.device.type == "cpu" and d.nbytes >= 2 * HUGE_PAGE_BYTES]
        self._large = large if sys.platform == "linux" else []
        self._credit = CREDIT_SECONDS if self._large else 0.0
        self._advise_all(MADV_HUGEPAGE)

    @property
    def are_wanted(self) -> bool:
        return self._credit > 0

    def populate(self, destination: torch.Tensor, first: int, nbytes: int) -> None:
        """Populate `nbytes` bytes of `destination` from its byte `first` on."""
        if self._credit <= 0 or destination.device.type != "cpu":
            return
        before = time.thread_time()  # time in which other threads run is not the pages'
        advise(destination.data_ptr() + first, nbytes, MADV_POPULATE_WRITE)
        gained = nbytes / SMALL_PAGES_BYTES_PER_SECOND - (time.thread_time() - before)
        self._credit = min(CREDIT_SECONDS, self._credit + gained)
        if self._credit <= 0:
            self._advise_all(MADV_NOHUGEPAGE)

    def leave(self) -> None:
        """Have the system make huge pages later, in the background, of what is full now: training goes on in it."""
        if self._large and not self.are_wanted:
            self._advise_all(MADV_HUGEPAGE)

    def _advise_all(self, advice: int) -> None:
        for destination in self._large:
            advise(destination.data_ptr(), destination.nbytes, advice)


def run_in_threads(
    items: Iterable[Item], work: Callable[[Iterator[Item]], None], threads: int, cores: Collection[int] = ()
) -> None:
    """Run ``work(iterator)`` in `threads` threads, one of them the caller's; each item comes out of one iterator.

    If `cores` are given, the others run on these alone; where the caller's runs stays up to the system.

    Once one has failed, the other iterators end, and the first error is raised. No thread runs on when this returns or
    raises, also on Ctrl-C. All have the caller's context variables and grad mode, which torch keeps for each thread.
    """
    pending, lock, failed = iter(items), threading.Lock(), threading.Event()
    errors: list[BaseException] = []
    with_grad, caller = torch.is_grad_enabled(), threading.current_thread()

    def next_items() -> Iterator[Item]:
        while not failed.is_set():
            with lock:
                try:
                    item = next(pending)
                except StopIteration:
                    return
            yield item

    def run(end: threading.Event) -> None:
        try:
            if cores and threading.current_thread() is not caller:
                os.sched_setaffinity(0, cores)  # 0: this thread
            with torch.set_grad_enabled(with_grad):
                work(next_items())
        except BaseException as error:
            errors.append(error)
            failed.set()
        finally:
            end.set()

    begun: list[tuple[threading.Thread, threading.Event]] = []
    try:
        for number in range(1, threads):
            end = threading.Event()
            in_context = copy_context().run
            helper = threading.Thread(target=in_context, args=(run, end), name=f"hf_zero_stream-{number}")
            begun.append((helper, end))
            helper.start()
        run(threading.Event())  # nobody waits for the calling thread
        _wait(begun)
    except BaseException:  # Ctrl-C while starting or waiting, or no more threads to be had
        failed.set()
        _wait(begun)
        raise
    if errors:
        raise errors[0]


def _wait(begun: Iterable[tuple[threading.Thread, threading.Event]]) -> None:
    """Wait until all threads that were started have ended.

    ``join()`` alone, once interrupted by Ctrl-C, takes a thread for ended that runs on (CPython #89437).
    """
    for thread, end in begun:
        while not end.wait(0.1 if thread.ident is None else None):
            if thread.ident is None:
                break
        if end.is_set():
            thread.join()
