"""Strided boxes: their arithmetic, on plain integers, and those that the elements of a view are copied by.

A *box* is a set of copies ``destination[to + sum(i[d] * to_strides[d])] = buffer[at + sum(i[d] * at_strides[d])]`` for
all ``0 <= i[d] < sizes[d]``. Everything here keeps boxes few. All numbers are elements.

A *region* is a box of copies out of a *leaf*: a tensor of a shard, a parameter that is being saved, values in host
memory, or the result of a function. Copies, casts and concatenations in between are resolved away.

A *parameter box* is the part of a parameter that one rank holds, as indices along each dimension. A DTensor's
placements, and FSDP2's chunk of what they leave, are *cuts*, one after the other. Each cuts what the cuts before it
have left, as ``torch.chunk`` does: into parts of ``ceil(length / parts)``, the last of which may be shorter or empty.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, pairwise, product
from math import prod
from typing import NamedTuple

import torch

from ..checkpoint.nodes import Cat, Computed, Copy, FileTensor, HostTensor, Leaf, Node, Stored, View, row_major_strides


class Box(NamedTuple):
    """Copies from a buffer (`at`) to a destination (`to`)."""

    sizes: tuple[int, ...]
    at: int
    at_strides: tuple[int, ...]
    to: int
    to_strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    @property
    def is_run(self) -> bool:
        """Whether elements that follow each other in the buffer do so in the destination, too, without holes."""
        return not self.sizes or (len(self.sizes) == 1 and self.at_strides[0] == self.to_strides[0] == 1)

    @property
    def at_extent(self) -> int:
        """The number of buffer elements from the first to the last that the box touches; strides are not negative."""
        return 1 + sum((size - 1) * stride for size, stride in zip(self.sizes, self.at_strides, strict=True))

    @property
    def to_extent(self) -> int:
        return 1 + sum((size - 1) * stride for size, stride in zip(self.sizes, self.to_strides, strict=True))

    def outermost_first(self) -> Box:
        """Return the same copies with the dimensions in the order in which they lie in the buffer."""
        if len(self.sizes) < 2:
            return self
        order = sorted(range(len(self.sizes)), key=lambda d: -self.at_strides[d])
        sizes, at_strides, to_strides = (
            tuple(numbers[d] for d in order) for numbers in (self.sizes, self.at_strides, self.to_strides)
        )
        return Box(sizes, self.at, at_strides, self.to, to_strides)

    def narrowed(self, dim: int, begin: int, end: int) -> Box:
        """The part whose index along dimension `dim` is in ``[begin, end)``."""
        sizes = (*self.sizes[:dim], end - begin, *self.sizes[dim + 1 :])
        at = self.at + begin * self.at_strides[dim]
        to = self.to + begin * self.to_strides[dim]
        return Box(sizes, at, self.at_strides, to, self.to_strides)

    def row(self, index: int) -> Box:
        """The part at this index along the first dimension, without that dimension."""
        at = self.at + index * self.at_strides[0]
        to = self.to + index * self.to_strides[0]
        return Box(self.sizes[1:], at, self.at_strides[1:], to, self.to_strides[1:])


class Axis(NamedTuple):
    """A dimension of a box: `size` steps of `step` along dimension `dim` of the buffer (-1: it stays)."""

    size: int
    dim: int
    step: int
    to_stride: int


class CoordinateBox(NamedTuple):
    """A box in the coordinates of a row-major buffer: it begins at `at` and extends along `axes`."""

    at: tuple[int, ...]
    axes: tuple[Axis, ...]
    to: int


def simplify(box: Box) -> Box:
    """Return the same copies in the same order, without dimensions of size 1 and with adjacent ones merged."""
    sizes: list[int] = []
    at_strides: list[int] = []
    to_strides: list[int] = []
    for size, at_stride, to_stride in zip(box.sizes, box.at_strides, box.to_strides, strict=True):
        if size == 1:
            continue
        if sizes and at_strides[-1] == size * at_stride and to_strides[-1] == size * to_stride:
            size *= sizes.pop()
            del at_strides[-1], to_strides[-1]
        sizes.append(size)
        at_strides.append(at_stride)
        to_strides.append(to_stride)
    return Box(tuple(sizes), box.at, tuple(at_strides), box.to, tuple(to_strides))


def flat_range(sizes: tuple[int, ...], strides: tuple[int, ...], offset: int, start: int, stop: int) -> Iterator[Box]:
    """The elements ``[start, stop)`` of a view, counted in row-major order, copied to ``[0, stop - start)``.

    The view addresses ``buffer[offset + sum(index[d] * strides[d])]``.
    """
    numbers = row_major_strides(sizes)
    if 0 == start < stop == prod(sizes):  # as for nearly every tensor that is saved: nothing is clipped
        yield Box(sizes, offset, strides, 0, numbers)
        return
    for box in clipped(Box(sizes, 0, numbers, offset, strides), start, stop):
        yield Box(box.sizes, box.to, box.to_strides, box.at - start, box.at_strides)


def clipped(box: Box, start: int, stop: int) -> Iterator[Box]:
    """The part of `box` whose buffer elements lie in ``[start, stop)``; its strides must not be negative.

    At most ``2 * dims - 1`` boxes, unless dimensions of the buffer overlap.
    """

    def cut(box: Box) -> Iterator[Box]:
        last = box.at_extent - 1
        if box.at >= stop or box.at + last < start:
            return
        if start <= box.at and box.at + last < stop:
            yield box
            return
        # The box does not fit, so it has a dimension here, and a stride: some rows fit, others are cut in turn.
        size, stride = box.sizes[0], box.at_strides[0]
        inner = last - (size - 1) * stride

        def rows_before(position: int) -> int:
            """The number of rows that begin before `position`."""
            return min(size, max(0, -(-(position - box.at) // stride)))

        first_touching, last_touching = rows_before(start - inner), rows_before(stop)
        first = min(rows_before(start), last_touching)
        last_fitting = max(first, rows_before(stop - inner))
        for index in range(first_touching, first):
            yield from cut(box.row(index))
        if first < last_fitting:
            yield box.narrowed(0, first, last_fitting)
        for index in range(last_fitting, last_touching):
            yield from cut(box.row(index))

    if start < stop and all(box.sizes):
        yield from cut(box.outermost_first())


def to_coordinates(box: Box, shape: tuple[int, ...]) -> Iterator[CoordinateBox]:
    """Express `box`, whose buffer is row-major of `shape`, in coordinates, cutting it only where it wraps around."""
    units = row_major_strides(shape)
    index = tuple(box.at // unit % size if size else 0 for size, unit in zip(shape, units, strict=True))
    room = [size - 1 - begin for size, begin in zip(shape, index, strict=True)]  # steps left along each dimension
    axes: list[Axis] = []
    # Outer steps first, so that a dimension which wraps is cut into whole inner boxes.
    box = box.outermost_first()
    for position, (size, stride, to_stride) in enumerate(zip(box.sizes, box.at_strides, box.to_strides, strict=True)):
        if size == 1:
            continue
        if stride == 0:
            axes.append(Axis(size, -1, 0, to_stride))
            continue
        # `units` falls with d: a step is counted along the outermost dimension that measures it in whole units.
        dim = next(d for d, unit in enumerate(units) if shape[d] > 1 and stride % unit == 0)
        step = stride // units[dim]
        if step * (size - 1) > room[dim]:
            for part in _cut(box, position, index[dim], shape[dim], step):
                yield from to_coordinates(part, shape)
            return
        room[dim] -= step * (size - 1)
        axes.append(Axis(size, dim, step, to_stride))
    yield CoordinateBox(index, tuple(axes), box.to)


def _cut(box: Box, position: int, begin: int, length: int, step: int) -> Iterator[Box]:
    """Cut dimension `position` of `box` where it wraps around: it begins at `begin` of a dimension of `length`."""
    size, period = box.sizes[position], length // step
    if begin == length % step == 0 and 1 < period < size:
        # Whole turns become a dimension of their own; what is left over is shorter than a turn.
        cut = size - size % period
        sizes = (*box.sizes[:position], size // period, period, *box.sizes[position + 1 :])
        at_strides, to_strides = (
            (*strides[:position], strides[position] * period, *strides[position:])
            for strides in (box.at_strides, box.to_strides)
        )
        yield Box(sizes, box.at, at_strides, box.to, to_strides)
    else:
        steps_to_end = -(-(length - begin) // step)
        cut = max(1, min(steps_to_end, size - 1))
        yield box.narrowed(position, 0, cut)
    if cut < size:
        yield box.narrowed(position, cut, size)


class Region(NamedTuple):
    """Copies ``box`` of the leaf's buffer to a destination, cast to each of `casts` in turn."""

    leaf: Leaf
    box: Box
    casts: tuple[torch.dtype, ...] = ()


def regions_of_range(view: View, start: int, stop: int, dtype: torch.dtype | None = None) -> Iterator[Region]:
    """Regions for the elements ``[start, stop)`` of `view` in row-major order; destination positions begin at 0.

    `dtype` is the destination's; default: the view's own.
    """
    casts = () if dtype is None or dtype == view.node.dtype else (dtype,)
    for box in flat_range(view.sizes, view.strides, view.offset, start, stop):
        yield from regions_of_box(view.node, box, casts)


def regions_of_box(node: Node, box: Box, casts: tuple[torch.dtype, ...] = ()) -> Iterator[Region]:
    """Regions for `box` of the buffer of `node`."""
    box = simplify(box)
    match node:
        case Copy(source=source):
            if source.node.dtype != node.dtype:
                casts = (node.dtype, *casts)
            # As nearly every copy is. The general way gives the same, in several times as long.
            if source.is_row_major:
                yield from regions_of_box(source.node, box._replace(at=box.at + source.offset), casts)
                return
            for coordinates in to_coordinates(box, node.sizes):
                yield from regions_of_box(source.node, box_of_view(source, coordinates), casts)
        case Cat():
            for coordinates in to_coordinates(box, node.sizes):
                for piece, part in _cut_by_piece(node, coordinates):
                    yield from regions_of_box(piece.node, box_of_view(piece, part), casts)
        case FileTensor() | Stored() | HostTensor() | Computed():
            yield Region(node, box, casts)
        case _:
            raise AssertionError(f"unknown node {node!r}")


def box_of_view(view: View, coordinates: CoordinateBox) -> Box:
    """A box given in the coordinates of `view`, as a box of the buffer that the view looks at."""
    return Box(
        tuple(axis.size for axis in coordinates.axes),
        view.offset + sum(index * stride for index, stride in zip(coordinates.at, view.strides, strict=True)),
        tuple(axis.step * view.strides[axis.dim] if axis.dim >= 0 else 0 for axis in coordinates.axes),
        coordinates.to,
        tuple(axis.to_stride for axis in coordinates.axes),
    )


def _cut_by_piece(node: Cat, coordinates: CoordinateBox) -> Iterator[tuple[View, CoordinateBox]]:
    """Cut the box `coordinates` where it passes from one piece of a concatenation to the next."""
    dim, starts = node.dim, node.starts
    at, to = coordinates.at, coordinates.to
    moving = [number for number, axis in enumerate(coordinates.axes) if axis.dim == dim]
    axes = coordinates.axes if moving else (*coordinates.axes, Axis(1, dim, 0, 0))
    first = moving[0] if moving else len(axes) - 1
    # The axes stay in their order, in which those of a contiguous part can be merged again.
    before, axis, after = axes[:first], axes[first], axes[first + 1 :]
    if len(moving) > 1:  # rare: unroll the outer one
        for number in range(axis.size):
            index = (*at[:dim], at[dim] + number * axis.step, *at[dim + 1 :])
            yield from _cut_by_piece(node, CoordinateBox(index, (*before, *after), to + number * axis.to_stride))
        return
    done = 0
    while done < axis.size:
        position = at[dim] + done * axis.step
        number = bisect_right(starts, position) - 1
        room = starts[number + 1] - position
        count = min(axis.size - done, -(-room // axis.step)) if axis.step else axis.size
        inside = (*at[:dim], position - starts[number], *at[dim + 1 :])
        cut = (*before, axis._replace(size=count), *after)
        yield node.pieces[number], CoordinateBox(inside, cut, to + done * axis.to_stride)
        done += count


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
        return cls(tuple(shape), tuple([((0, size),) for size in shape]))

    @classmethod
    def of_cuts(cls, shape: Sequence[int], cuts: Iterable[Cut]) -> ParameterBox:
        """The box that all `cuts`, one after the other, leave of a parameter of this shape."""
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
                position, end = _rest_of_interval(self.intervals[dim], index)
                if dim == cut:
                    count = min(count, (end - position) * strides[dim] - first)
                first += position * strides[dim]
            yield first, count
            start += count


def _rest_of_interval(intervals: Iterable[Interval], index: int) -> Interval:
    """The rest, from entry number `index` of `intervals` on, of the interval that this entry is in."""
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
