"""Carries out the reads of a plan with several threads.

Each thread takes the next read in file order. Where the destination is in host memory and wants the bytes as they
come, they are read in place; otherwise they go through the thread's staging buffer. Positional reads and large copies
release the GIL, and while one thread copies another waits for the storage. These threads ask for nothing in advance:
see :mod:`read_ahead`, and why ``POSIX_FADV_WILLNEED`` is not the way there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import torch

from ..planning.plan import BatchPlan
from ..planning.reads import Read
from ..sources.base import ByteSource
from .huge_pages import HugePages
from .lanes import lane_class
from .workers import run_in_threads


__all__ = ["ReadTimes", "execute_reads"]


class ReadTimes(NamedTuple):
    """Wall seconds of the reads of a plan, shared out over what its threads did in them.

    Attributes:
        read: waiting for the source.
        convert: copies out of staging buffers that cast.
        copy: other copies out of them.
        staging_bytes: size of all staging buffers together.
    """

    read: float
    convert: float
    copy: float
    staging_bytes: int


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
    if not plan.reads:
        return ReadTimes(0.0, 0.0, 0.0, 0)
    first = int(begin * len(plan.reads))
    device = next((d.device for d in destinations if d.device.type != "cpu"), torch.device("cpu"))
    nbytes = max(read.length for read in plan.reads)
    writable = [_bytes_of(destination) for destination in destinations]
    pages = HugePages(destinations)
    by_thread: list[ReadTimes] = []

    def work(reads: Iterator[Read]) -> None:
        lane = lane_class(device)(device, nbytes)
        reading = converting = copying = 0.0
        for read in reads:
            began = time.perf_counter()
            _populate(read, destinations, pages)
            buffers = _in_place(read, writable)
            if buffers is not None:
                source.read_into(read.shard, read.start, buffers)
                reading += time.perf_counter() - began
            else:
                staging = lane.buffer(read.length)
                source.read_into(read.shard, read.start, [memoryview(staging.numpy())])
                before = time.perf_counter()
                reading += before - began
                for piece in read.pieces:
                    part = staging[piece.start - read.start : piece.stop - read.start]
                    lane.copy(part, piece, destinations[piece.target])
                    done = time.perf_counter()
                    if piece.casts:
                        converting += done - before
                    else:
                        copying += done - before
                    before = done
            if on_bytes is not None:
                on_bytes(read.length)
        lane.finish()
        by_thread.append(ReadTimes(reading, converting, copying, lane.allocated_bytes))

    began = time.perf_counter()
    run_in_threads(chain(plan.reads[first:], plan.reads[:first]), work, threads)
    wall = time.perf_counter() - began
    read, convert, copy, staging_bytes = map(sum, zip(*by_thread, strict=True))
    factor = wall / ((read + convert + copy) or 1.0)
    return ReadTimes(factor * read, factor * convert, factor * copy, staging_bytes)


def _populate(read: Read, destinations: Sequence[torch.Tensor], pages: HugePages) -> None:
    for piece in read.pieces:
        destination, box = destinations[piece.target], piece.box
        if destination.device.type == "cpu" and box.numel == box.to_extent:  # in any order, but without holes
            itemsize = destination.element_size()
            pages.populate(destination.data_ptr() + box.to * itemsize, box.numel * itemsize)


def _in_place(read: Read, writable: Sequence[memoryview | None]) -> list[memoryview] | None:
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
