"""Arithmetic of strided boxes, on plain integers.

A *box* is a set of copies ``destination[to + sum(i[d] * to_strides[d])] = buffer[at + sum(i[d] * at_strides[d])]`` for
all ``0 <= i[d] < sizes[d]``. Everything here keeps boxes few: a flat range of a strided view becomes at most
``2 * dims - 1`` boxes, and a box over a row-major buffer is expressed in that buffer's coordinates with as few cuts
as the shapes allow. All numbers are elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

from ..checkpoint.nodes import row_major_strides


__all__ = ["Axis", "Box", "Placed", "extent", "flat_range", "place", "simplify", "within"]


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
        """Elements of the buffer from the first to the last that the box touches."""
        return extent(self.sizes, self.at_strides)

    @property
    def to_extent(self) -> int:
        """The same of the destination."""
        return extent(self.sizes, self.to_strides)


class Axis(NamedTuple):
    """One dimension of a placed box: `size` steps of `step` along dimension `dim` of the buffer (-1: it stays)."""

    size: int
    dim: int
    step: int
    to_stride: int


class Placed(NamedTuple):
    """A box in the coordinates of a row-major buffer: it begins at `at` and extends along `axes`."""

    at: tuple[int, ...]
    axes: tuple[Axis, ...]
    to: int


def simplify(box: Box) -> Box:
    """The same copies in the same order with no dimension of size 1 and adjacent dimensions merged."""
    sizes: list[int] = []
    at_strides: list[int] = []
    to_strides: list[int] = []
    for size, at_stride, to_stride in zip(box.sizes, box.at_strides, box.to_strides, strict=True):
        if size == 1:
            continue
        if sizes and at_strides[-1] == size * at_stride and to_strides[-1] == size * to_stride:
            sizes[-1] *= size
            at_strides[-1], to_strides[-1] = at_stride, to_stride
        else:
            sizes.append(size)
            at_strides.append(at_stride)
            to_strides.append(to_stride)
    return Box(tuple(sizes), box.at, tuple(at_strides), box.to, tuple(to_strides))


def flat_range(
    sizes: Sequence[int], strides: Sequence[int], offset: int, start: int, stop: int, to: int = 0
) -> Iterator[Box]:
    """The elements ``[start, stop)`` of a view, counted in row-major order, copied to ``[to, to + stop - start)``.

    The view addresses ``buffer[offset + sum(index[d] * strides[d])]``.
    """
    if start >= stop:
        return
    if not sizes:
        yield Box((), offset, (), to, ())
        return
    inner = prod(sizes[1:])
    first, head = divmod(start, inner)
    last, tail = divmod(stop, inner)

    def row(index: int, begin: int, end: int, position: int) -> Iterator[Box]:
        return flat_range(sizes[1:], strides[1:], offset + index * strides[0], begin, end, position)

    if first == last:
        yield from row(first, head, tail, to)
        return
    if head:
        yield from row(first, head, inner, to)
        to += inner - head
        first += 1
    if first < last:
        rows = tuple(sizes[1:])
        inner_strides = row_major_strides(rows)
        yield Box((last - first, *rows), offset + first * strides[0], tuple(strides), to, (inner, *inner_strides))
        to += (last - first) * inner
    if tail:
        yield from row(last, 0, tail, to)


def within(box: Box, start: int, stop: int) -> Iterator[Box]:
    """The part of `box` whose buffer elements lie in ``[start, stop)``; its strides must not be negative.

    At most ``2 * dims - 1`` boxes, unless dimensions of the buffer overlap.
    """
    order = sorted(range(len(box.sizes)), key=lambda d: -box.at_strides[d])
    sizes, at_strides, to_strides = (
        tuple(numbers[d] for d in order) for numbers in (box.sizes, box.at_strides, box.to_strides)
    )
    extents = [0] * (len(sizes) + 1)  # from the first element to the last, from this dimension inwards
    for d in reversed(range(len(sizes))):
        extents[d] = extents[d + 1] + (sizes[d] - 1) * at_strides[d]

    def cut(dim: int, at: int, to: int) -> Iterator[Box]:
        if at >= stop or at + extents[dim] < start:
            return
        if start <= at and at + extents[dim] < stop:
            yield Box(sizes[dim:], at, at_strides[dim:], to, to_strides[dim:])
            return
        # The box does not fit, so it has a dimension here, and a stride: some rows fit, others are cut in turn.
        size, stride, inner = sizes[dim], at_strides[dim], extents[dim + 1]
        if stride == 0:
            for row in range(size):
                yield from cut(dim + 1, at, to + row * to_strides[dim])
            return
        first = min(size, max(0, -(-(start - at) // stride)))
        last = max(first, min(size, (stop - 1 - inner - at) // stride + 1))
        touching = max(0, (start - at - inner + stride - 1) // stride), min(size, (stop - 1 - at) // stride + 1)
        for row in range(touching[0], min(first, touching[1])):
            yield from cut(dim + 1, at + row * stride, to + row * to_strides[dim])
        if first < last:
            rows = (last - first, *sizes[dim + 1 :])
            yield Box(rows, at + first * stride, at_strides[dim:], to + first * to_strides[dim], to_strides[dim:])
        for row in range(max(last, touching[0]), touching[1]):
            yield from cut(dim + 1, at + row * stride, to + row * to_strides[dim])

    if all(sizes):
        yield from cut(0, box.at, box.to)


def place(box: Box, shape: Sequence[int]) -> Iterator[Placed]:
    """Express `box`, whose buffer is row-major of `shape`, in coordinates, cutting it only where it wraps around."""
    units = row_major_strides(tuple(shape))
    index = _coordinates(box.at, shape, units)
    room = [size - 1 - begin for size, begin in zip(shape, index, strict=True)]  # steps left along each dimension
    axes: list[Axis] = []
    dimensions = list(zip(box.sizes, box.at_strides, box.to_strides, strict=True))
    # Outer steps first, so that a dimension which wraps is cut into whole inner boxes.
    for position in sorted(range(len(dimensions)), key=lambda d: -dimensions[d][1]):
        size, stride, to_stride = dimensions[position]
        if size == 1:
            continue
        if stride == 0:
            axes.append(Axis(size, -1, 0, to_stride))
            continue
        # `units` falls with d: a step is counted along the outermost dimension that measures it in whole units.
        dim = next(d for d, unit in enumerate(units) if shape[d] > 1 and stride % unit == 0)
        step = stride // units[dim]
        if step * (size - 1) > room[dim]:
            yield from _cut(box, position, shape, index[dim], shape[dim], step)
            return
        room[dim] -= step * (size - 1)
        axes.append(Axis(size, dim, step, to_stride))
    yield Placed(tuple(index), tuple(axes), box.to)


def _cut(box: Box, position: int, shape: Sequence[int], begin: int, length: int, step: int) -> Iterator[Placed]:
    """Cut dimension `position` of `box`, which runs past the end of a dimension of `length`, where it wraps around."""
    size = box.sizes[position]
    if begin % step == 0 and length % step == 0 and size > (period := length // step) and period > 1:
        head = (period - begin // step) % period
        if head == 0:
            # Whole turns become a dimension of their own; what is left over is shorter than a turn.
            turns, rest = divmod(size, period)
            stride, to_stride = box.at_strides[position], box.to_strides[position]
            split = Box(
                (*box.sizes[:position], turns, period, *box.sizes[position + 1 :]),
                box.at,
                (*box.at_strides[:position], stride * period, stride, *box.at_strides[position + 1 :]),
                box.to,
                (*box.to_strides[:position], to_stride * period, to_stride, *box.to_strides[position + 1 :]),
            )
            yield from place(split, shape)
            if rest:
                yield from place(_part(box, position, size - rest, size), shape)
            return
    else:
        head = -(-(length - begin) // step)  # steps until it wraps
    head = max(1, min(head, size - 1))
    yield from place(_part(box, position, 0, head), shape)
    yield from place(_part(box, position, head, size), shape)


def _part(box: Box, position: int, begin: int, end: int) -> Box:
    """`box` with dimension `position` narrowed to ``[begin, end)``."""
    sizes = (*box.sizes[:position], end - begin, *box.sizes[position + 1 :])
    at = box.at + begin * box.at_strides[position]
    to = box.to + begin * box.to_strides[position]
    return Box(sizes, at, box.at_strides, to, box.to_strides)


def extent(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last of a view with these sizes and strides, which must not be negative."""
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))


def _coordinates(position: int, shape: Sequence[int], units: Sequence[int]) -> list[int]:
    return [position // unit % size if size else 0 for size, unit in zip(shape, units, strict=True)]
