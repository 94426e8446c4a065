"""Carries out the reads of a plan with several threads.

Each thread takes the next read in file order. Where the destination is in host memory and wants the bytes as they
come, they are read in place; otherwise they go through the thread's staging buffer. Positional reads and large copies
release the GIL, and while one thread copies another waits for the storage. These threads ask for nothing in advance:
see :mod:`read_ahead`, and why ``POSIX_FADV_WILLNEED`` is not the way there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch

from ..planning.plan import BatchPlan
from ..planning.reads import Read
from ..sources.base import ByteSource
from .huge_pages import HugePages
from .lanes import Lane
from .workers import run_in_threads


__all__ = ["ReadTimes", "execute_reads"]


@dataclass
class ReadTimes:
    """Wall seconds of the reads of a plan, shared out over what its threads did in them."""

    read: float = 0.0
    convert: float = 0.0
    copy: float = 0.0
    staging_bytes: int = 0
    """Size of all staging buffers together."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, read: float, convert: float, copy: float) -> None:
        with self._lock:
            self.read += read
            self.convert += convert
            self.copy += copy

    def add_staging(self, nbytes: int) -> None:
        with self._lock:
            self.staging_bytes += nbytes

    def scale_to(self, wall: float) -> None:
        """Scale thread seconds so that they add up to `wall` seconds."""
        total = self.read + self.convert + self.copy
        if total:
            factor = wall / total
            self.read, self.convert, self.copy = self.read * factor, self.convert * factor, self.copy * factor


def execute_reads(
    plan: BatchPlan,
    destinations: Sequence[torch.Tensor],
    source: ByteSource,
    *,
    threads: int,
    begin: float = 0.0,
    on_bytes: Callable[[int], None] | None = None,
) -> ReadTimes:
    """Fill `destinations` by the reads of `plan`.

    Args:
        destinations: one flat tensor for each target of the plan, of its dtype and at least ``stop - start`` long.
        threads: reader threads; with 1 the calling thread reads.
        begin: which part of the reads to begin with, in [0, 1): ranks of a host that begin at different places do not
            all wait for the same file. Those that read ahead together all begin with 0.
        on_bytes: called with the number of bytes after each read.

    Raises:
        ReadError: a shard could not be read; the other threads have stopped by then.
    """
    times = ReadTimes()
    if not plan.reads:
        return times
    first = int(begin * len(plan.reads))
    in_turn = chain(plan.reads[first:], plan.reads[:first])
    device = next((d.device for d in destinations if d.device.type != "cpu"), torch.device("cpu"))
    nbytes = max(read.length for read in plan.reads)
    writable = [_bytes_of(destination) for destination in destinations]
    pages = HugePages(destinations)

    def work(reads: Iterator[Read]) -> None:
        _work(reads, destinations, writable, source, Lane.to(device, nbytes), pages, times, on_bytes)

    began = time.perf_counter()
    run_in_threads(in_turn, work, threads)
    times.scale_to(time.perf_counter() - began)
    return times


def _work(
    reads: Iterable[Read],
    destinations: Sequence[torch.Tensor],
    writable: Sequence[memoryview | None],
    source: ByteSource,
    lane: Lane,
    pages: HugePages,
    times: ReadTimes,
    on_bytes: Callable[[int], None] | None,
) -> None:
    for read in reads:
        began = time.perf_counter()
        _populate(read, destinations, pages)
        buffers = _in_place(read, destinations, writable)
        if buffers is not None:
            source.read_into(read.shard, read.start, buffers)
            times.add(time.perf_counter() - began, 0.0, 0.0)
        else:
            staging = lane.buffer(read.length)
            source.read_into(read.shard, read.start, [memoryview(staging.numpy())])
            arrived = time.perf_counter()
            converted = 0.0
            for piece in read.pieces:
                before = time.perf_counter()
                lane.copy(
                    staging[piece.start - read.start : piece.stop - read.start], piece, destinations[piece.target]
                )
                if piece.casts:
                    converted += time.perf_counter() - before
            done = time.perf_counter()
            times.add(arrived - began, converted, done - arrived - converted)
        if on_bytes is not None:
            on_bytes(read.length)
    lane.finish()
    times.add_staging(lane.allocated_bytes)


def _populate(read: Read, destinations: Sequence[torch.Tensor], pages: HugePages) -> None:
    for piece in read.pieces:
        destination, box = destinations[piece.target], piece.box
        if destination.device.type == "cpu" and box.numel == box.to_extent:  # in any order, but without holes
            itemsize = destination.element_size()
            pages.populate(destination.data_ptr() + box.to * itemsize, box.numel * itemsize)


def _in_place(
    read: Read, destinations: Sequence[torch.Tensor], writable: Sequence[memoryview | None]
) -> list[memoryview] | None:
    """Where the bytes of `read` go without staging, or None if some piece needs a cast, a scatter or a device copy."""
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


def _bytes_of(destination: torch.Tensor) -> memoryview | None:
    if destination.device.type != "cpu":
        return None
    return memoryview(destination.detach().view(torch.uint8).numpy())
