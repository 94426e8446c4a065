"""The part of a parameter that one rank holds, as indices along each dimension, and how torch cuts dimensions.

A DTensor's placements, and FSDP2's chunk of what they leave, are *cuts*, one after the other. Each cuts what the cuts
before it have left, as ``torch.chunk`` does: into parts of ``ceil(length / parts)``, the last of which may be shorter
or empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, pairwise, product
from math import prod
from typing import NamedTuple

from ..checkpoint.nodes import row_major_strides


Interval = tuple[int, int]
"""Indices along one dimension: the first, and one past the last."""


class Cut(NamedTuple):
    """Part number `part` of the `parts` of dimension `dim`.

    The dimension is first cut into `groups`, and the part of each taken (``_StridedShard``'s ``split_factor``): of a
    fused weight, each rank gets a part of each of the weights in it.
    """

    dim: int
    parts: int
    part: int
    groups: int = 1


class ParameterBox(NamedTuple):
    """The elements of a parameter of `shape` whose index along each dimension is in one of its `intervals`.

    They come in the order of the box's own indices; ``(0, 0)`` stands where there are none.
    """

    shape: tuple[int, ...]
    intervals: tuple[tuple[Interval, ...], ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> ParameterBox:
        return cls(tuple(shape), tuple(((0, size),) for size in shape))

    @classmethod
    def of_cuts(cls, shape: Sequence[int], cuts: Iterable[Cut]) -> ParameterBox:
        """What is left of a parameter of this shape after all `cuts`."""
        left = list(cls.whole(shape).intervals)
        for dim, parts, part, groups in cuts:
            chunks = (_chunk(_chunk(left[dim], groups, group), parts, part) for group in range(groups))
            joined: list[Interval] = []
            for start, stop in chain.from_iterable(chunks):
                if joined and joined[-1][1] == start:
                    start, _ = joined.pop()
                joined.append((start, stop))
            left[dim] = tuple(joined) or ((0, 0),)
        return cls(tuple(shape), tuple(left))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The box's own shape."""
        return tuple(sum(stop - start for start, stop in intervals) for intervals in self.intervals)

    @property
    def is_whole(self) -> bool:
        return self.sizes == self.shape

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    def blocks(self) -> Iterator[tuple[ParameterBox, ParameterBox]]:
        """Boxes of one interval along each dimension that make up this one; each also as a part of this box."""
        lengths = ([stop - start for start, stop in each] for each in self.intervals)
        inner = [[*pairwise(accumulate(each, initial=0))] for each in lengths]
        for block, within in zip(product(*self.intervals), product(*inner), strict=True):
            yield (
                ParameterBox(self.shape, tuple((each,) for each in block)),
                ParameterBox(self.sizes, tuple((each,) for each in within)),
            )

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """The elements ``[start, stop)`` of the box, as (first flat element of the whole parameter, count)."""
        if self.is_whole:
            yield start, stop - start
            return
        # Dimensions behind the last one that is cut are whole: their elements lie side by side.
        cut = max(dim for dim, (size, whole) in enumerate(zip(self.sizes, self.shape, strict=True)) if size != whole)
        sizes, strides = self.sizes, row_major_strides(self.shape)
        while start < stop:
            number, first = divmod(start, strides[cut])
            count = stop - start
            for dim in range(cut, -1, -1):
                number, index = divmod(number, sizes[dim])
                position, end = _located(self.intervals[dim], index)
                if dim == cut:
                    count = min(count, (end - position) * strides[dim] - first)
                first += position * strides[dim]
            yield first, count
            start += count


def _located(intervals: Iterable[Interval], index: int) -> Interval:
    """What remains, from entry number `index` of `intervals` on, of the interval that this entry is in."""
    for start, stop in intervals:
        if index < stop - start:
            return start + index, stop
        index -= stop - start
    raise IndexError(index)


def _chunk(intervals: Sequence[Interval], parts: int, index: int) -> tuple[Interval, ...]:
    """Chunk `index` of `parts` of the indices in `intervals`, laid end to end."""
    length = -(-sum(stop - start for start, stop in intervals) // parts)
    first, last = index * length, (index + 1) * length
    chunk: list[Interval] = []
    position = 0
    for start, stop in intervals:
        begin, end = max(start, start + first - position), min(stop, start + last - position)
        if begin < end:
            chunk.append((begin, end))
        position += stop - start
    return tuple(chunk)
