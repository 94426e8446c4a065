"""Regions of shards turned into reads: which byte ranges to ask for, in file order.

A strided region is a set of runs with holes between them: a hole costs its bytes if it is read through and a seek if
it is skipped. Large runs are split so that threads can share them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch

from ..checkpoint.nodes import FileTensor
from .boxes import Box
from .regions import Region


__all__ = ["Piece", "Read", "merge_pieces", "pieces_of_region"]


class Piece(NamedTuple):
    """One copy out of bytes ``[start, stop)`` of shard number `shard`, holes included, to target number `target`.

    Attributes:
        box: elements relative to `start` -> elements of the target.
        dtype: of the elements in the file.
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
        return self.box.numel * self.dtype.itemsize

    @property
    def is_run(self) -> bool:
        """Whether bytes can go to the destination as they come: contiguous at both ends and no cast."""
        return self.box.is_run and not self.casts


class Read(NamedTuple):
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
    for part in _parts(box.outermost_first(), limit, seek_bytes // itemsize):
        start = leaf.entry.start + part.at * itemsize
        stop = start + part.at_extent * itemsize
        yield Piece(leaf.entry.shard, start, stop, target, part._replace(at=0), leaf.dtype, region.casts)


def _parts(box: Box, limit: int, hole: int) -> Iterator[Box]:
    """Cut `box` (dimensions in falling order of `at_strides`) along its outermost dimension where it must be cut."""
    if not box.sizes:
        yield box
        return
    size, stride = box.sizes[0], box.at_strides[0]
    row_extent = box.row(0).at_extent
    count = size if stride == 0 else 1 + (limit - row_extent) // stride
    if count <= 1 or row_extent > limit or _largest_hole(box) > hole:
        for index in range(size):
            yield from _parts(box.row(index), limit, hole)
    else:
        for begin in range(0, size, count):
            yield box.narrowed(0, begin, min(size, begin + count))


def _largest_hole(box: Box) -> int:
    """Elements between two neighbours along one dimension of `box`, at most; cheaper to skip if there are many."""
    rest, largest = box, 0
    while rest.sizes:
        stride, rest = rest.at_strides[0], rest.row(0)
        largest = max(largest, stride - rest.at_extent)
    return largest


def merge_pieces(pieces: Iterable[Piece], request_bytes: int, seek_bytes: int) -> Iterator[Read]:
    """Group pieces into reads in file order: neighbours join while the read stays within `request_bytes`.

    Holes between pieces are read through if they are at most `seek_bytes` long, smallest first, while all of them
    together stay under 1/200 of the payload: small tensors must not make a rank read its neighbours' parts.
    """
    ordered = sorted(pieces, key=lambda piece: (piece.shard, piece.start, piece.stop))
    hole = _affordable_hole(ordered, seek_bytes)
    group: list[Piece] = []
    shard = start = stop = 0
    for piece in ordered:
        fits = max(stop, piece.stop) - start <= request_bytes
        if group and (piece.shard != shard or piece.start - stop > hole or not fits):
            yield Read(shard, start, stop, tuple(group))
            group = []
        if not group:
            shard, start, stop = piece.shard, piece.start, piece.stop
        stop = max(stop, piece.stop)
        group.append(piece)
    if group:
        yield Read(shard, start, stop, tuple(group))


def _affordable_hole(ordered: Sequence[Piece], seek_bytes: int) -> int:
    holes: list[int] = []
    shard, stop = -1, 0
    for piece in ordered:
        if piece.shard != shard:
            shard, stop = piece.shard, piece.start
        if 0 < piece.start - stop <= seek_bytes:
            holes.append(piece.start - stop)
        stop = max(stop, piece.stop)
    budget = sum(piece.payload_bytes for piece in ordered) // 200
    affordable = 0
    for size, alike in groupby(sorted(holes)):
        budget -= sum(alike)
        if budget < 0:
            break
        affordable = size
    return affordable
