"""Carries out the reads of a plan with several threads.

Each takes the next read in file order: in place, where the destination is in host memory and wants the bytes as they
come, or through the thread's staging buffer. Positional reads and large copies release the GIL.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import torch

from ..planning.plan import BatchPlan, Read
from ..sources.base import ByteSource
from .huge_pages import HugePages
from .lanes import Lane, lane_for, settle
from .workers import run_in_threads


PHASES = ("read", "convert", "copy")
"""What threads do: wait for the source, copy out of staging buffers with a cast, and without."""


def execute_reads(
    plan: BatchPlan,
    destinations: Sequence[torch.Tensor],
    source: ByteSource,
    *,
    threads: int,
    begin: float = 0.0,
    on_bytes: Callable[[int], None] | None = None,
) -> tuple[dict[str, float], int]:
    """Fill `destinations` by the reads of `plan`, and call `on_bytes` with the number of bytes after each.

    Returns the wall seconds that it took, divided among `PHASES`, and the size of all staging buffers.

    There is one flat destination for each target of the plan, of its dtype and at least ``stop - start`` long. `begin`
    is where in the reads to begin, in [0, 1): ranks of a host that begin at different places do not all wait for the
    same file.
    """
    if not plan.reads:
        return {}, 0
    first = int(begin * len(plan.reads))
    new_lane = lane_for(destinations, max(read.length for read in plan.reads))
    writable = [
        memoryview(d.detach().view(torch.uint8).numpy()) if d.device.type == "cpu" else None for d in destinations
    ]
    pages = HugePages(destinations)
    settle(destinations)
    by_thread: list[tuple[dict[str, float], int]] = []

    def work(reads: Iterator[Read]) -> None:
        seconds = dict.fromkeys(PHASES, 0.0)
        with new_lane() as lane:
            for read in reads:
                carry_out(read, lane, seconds)
                if on_bytes is not None:
                    on_bytes(read.length)
        by_thread.append((seconds, lane.allocated_bytes))

    def carry_out(read: Read, lane: Lane, seconds: dict[str, float]) -> None:
        began = time.perf_counter()
        for piece in read.pieces:
            if piece.box.numel == piece.box.to_extent:  # without holes
                destination = destinations[piece.target]
                itemsize = destination.element_size()
                pages.populate(destination, piece.box.to * itemsize, piece.box.numel * itemsize)
        buffers = _in_place(read, writable)
        if buffers is not None:
            source.read_into(read.shard, read.start, buffers)
            seconds["read"] += time.perf_counter() - began
            return
        staging = lane.buffer(read.length)
        source.read_into(read.shard, read.start, [memoryview(staging.numpy())])
        before = time.perf_counter()
        seconds["read"] += before - began
        for piece in read.pieces:
            part = staging[piece.start - read.start : piece.stop - read.start]
            lane.copy(part, piece, destinations[piece.target])
            done = time.perf_counter()
            seconds["convert" if piece.casts else "copy"] += done - before
            before = done

    began = time.perf_counter()
    run_in_threads(chain(plan.reads[first:], plan.reads[:first]), work, threads)
    wall = time.perf_counter() - began
    total = {phase: sum(seconds[phase] for seconds, _ in by_thread) for phase in PHASES}
    factor = wall / (sum(total.values()) or 1.0)
    return {phase: factor * value for phase, value in total.items()}, sum(size for _, size in by_thread)


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
