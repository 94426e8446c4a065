"""Regions of shards turned into reads: which byte ranges to ask for, in file order.

A contiguous region is one run of bytes. A strided one (a transposed layout at a partition's edge) is a set of runs
with holes between them: a hole costs its bytes if it is read through and a seek if it is skipped, so runs are merged
across holes of at most `seek_bytes`. Large runs are split so that threads can share them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import NamedTuple

import torch

from ..checkpoint.nodes import FileTensor
from .boxes import Box, extent
from .regions import Region


__all__ = ["Piece", "Read", "merge_pieces", "pieces_of_region"]


class Piece(NamedTuple):
    """One copy out of a byte range of a shard.

    Attributes:
        shard: position of the shard in the checkpoint's index.
        start: file position of the first byte that the piece covers.
        stop: one past the last byte that it covers; equal to ``start + payload`` where it has no holes.
        target: position of the destination in the plan's targets.
        box: elements relative to `start` -> elements of the destination.
        dtype: dtype of the elements in the file.
        casts: dtypes to cast to, in turn.
    """

    shard: int
    start: int
    stop: int
    target: int
    box: Box
    dtype: torch.dtype
    casts: tuple[torch.dtype, ...]

    @property
    def payload_bytes(self) -> int:
        return prod(self.box.sizes) * self.dtype.itemsize

    @property
    def is_run(self) -> bool:
        """Whether bytes can go to the destination as they come: contiguous at both ends and no cast."""
        return self.box.is_run and not self.casts


@dataclass(frozen=True, slots=True)
class Read:
    """One byte range ``[start, stop)`` of a shard and the pieces that are copied out of it."""

    shard: int
    start: int
    stop: int
    pieces: tuple[Piece, ...]

    @property
    def length(self) -> int:
        return self.stop - self.start


def pieces_of_region(region: Region, target: int, request_bytes: int, seek_bytes: int) -> Iterator[Piece]:
    """Cut a region of a shard into pieces of at most `request_bytes` without holes larger than `seek_bytes`.

    A single element is never cut, so `request_bytes` must be at least one element's size.
    """
    leaf, box = region.leaf, region.box
    assert isinstance(leaf, FileTensor)
    itemsize = leaf.dtype.itemsize
    limit = max(1, request_bytes // itemsize)
    if box.at_strides == box.to_strides == (1,):
        # A run, as nearly every region is: the general way gives the same and takes several times as long.
        first = leaf.entry.start + box.at * itemsize
        for begin in range(0, box.sizes[0], limit):
            count = min(limit, box.sizes[0] - begin)
            start, to = first + begin * itemsize, box.to + begin
            run = Box((count,), 0, (1,), to, (1,))
            yield Piece(leaf.entry.shard, start, start + count * itemsize, target, run, leaf.dtype, region.casts)
        return
    order = sorted(range(len(box.sizes)), key=lambda d: -box.at_strides[d])
    box = Box(
        tuple(box.sizes[d] for d in order),
        box.at,
        tuple(box.at_strides[d] for d in order),
        box.to,
        tuple(box.to_strides[d] for d in order),
    )
    for part in _parts(box, limit, seek_bytes // itemsize):
        start = leaf.entry.start + part.at * itemsize
        stop = start + part.at_extent * itemsize
        yield Piece(leaf.entry.shard, start, stop, target, part._replace(at=0), leaf.dtype, region.casts)


def _parts(box: Box, limit: int, hole: int) -> Iterator[Box]:
    """Cut `box` (dimensions in falling order of `at_strides`) along its outermost dimension where it must be cut."""
    if not box.sizes:
        yield box
        return
    inner = extent(box.sizes[1:], box.at_strides[1:])
    size, stride = box.sizes[0], box.at_strides[0]
    if stride - inner > hole or inner > limit:
        count = 1  # row by row: the hole behind each row is dearer than a seek, or a row alone is too long
    elif stride == 0:
        count = size
    else:
        count = min(size, max(1, 1 + (limit - inner) // stride))
    for begin in range(0, size, count):
        end = min(size, begin + count)
        at, to = box.at + begin * stride, box.to + begin * box.to_strides[0]
        if count == 1:
            yield from _parts(Box(box.sizes[1:], at, box.at_strides[1:], to, box.to_strides[1:]), limit, hole)
        else:
            rows = Box((end - begin, *box.sizes[1:]), at, box.at_strides, to, box.to_strides)
            yield from _gapless(rows, limit, hole)


def _gapless(box: Box, limit: int, hole: int) -> Iterator[Box]:
    """`box`, unless one of its inner dimensions has holes dearer than a seek: then row by row."""
    for d in range(1, len(box.sizes)):
        inner = extent(box.sizes[d + 1 :], box.at_strides[d + 1 :])
        if box.at_strides[d] - inner > hole:
            for k in range(box.sizes[0]):
                row = Box(
                    box.sizes[1:],
                    box.at + k * box.at_strides[0],
                    box.at_strides[1:],
                    box.to + k * box.to_strides[0],
                    box.to_strides[1:],
                )
                yield from _parts(row, limit, hole)
            return
    yield box


def merge_pieces(pieces: Iterable[Piece], request_bytes: int, seek_bytes: int) -> Iterator[Read]:
    """Group pieces into reads in file order: neighbours join while the read stays within `request_bytes`.

    Holes between pieces are read through if they are at most `seek_bytes` long, smallest first, while all of them
    together stay under 1/200 of the payload: small tensors must not make a rank read its neighbours' parts.
    """
    ordered = sorted(pieces, key=lambda piece: (piece.shard, piece.start, piece.stop))
    hole = _affordable_hole(ordered, seek_bytes)
    group: list[Piece] = []
    stop = 0
    for piece in ordered:
        if group:
            first = group[0]
            fits = max(stop, piece.stop) - first.start <= request_bytes
            if piece.shard != first.shard or piece.start - stop > hole or not fits:
                yield Read(first.shard, first.start, stop, tuple(group))
                group = []
        stop = max(stop, piece.stop) if group else piece.stop
        group.append(piece)
    if group:
        yield Read(group[0].shard, group[0].start, stop, tuple(group))


def _affordable_hole(ordered: Sequence[Piece], seek_bytes: int) -> int:
    holes: list[int] = []
    shard, stop = -1, 0
    for piece in ordered:
        if piece.shard == shard and 0 < piece.start - stop <= seek_bytes:
            holes.append(piece.start - stop)
        stop = max(stop, piece.stop) if piece.shard == shard else piece.stop
        shard = piece.shard
    budget = sum(piece.payload_bytes for piece in ordered) // 200
    affordable = 0
    for size, same in groupby(sorted(holes)):
        budget -= size * sum(1 for _ in same)
        if budget < 0:
            break
        affordable = size
    return affordable
