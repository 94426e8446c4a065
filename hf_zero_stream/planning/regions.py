"""From a lazy tensor's flat range to regions: which elements of which source go where.

A region is one box of copies out of a *leaf*: a tensor of a shard, a parameter that is being saved, values in host
memory, or the result of a function. Copies, casts and concatenations in between are resolved away here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

import torch

from ..checkpoint.nodes import Cat, Computed, Copy, FileTensor, HostTensor, Node, Stored, View
from .boxes import Axis, Box, Placed, flat_range, place, simplify


__all__ = ["Leaf", "Region", "box_of_view", "regions_of_box", "regions_of_range"]

Leaf = FileTensor | Stored | HostTensor | Computed


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
            for placed in place(box, node.sizes):
                yield from regions_of_box(source.node, box_of_view(source, placed), casts)
        case Cat():
            for placed in place(box, node.sizes):
                for piece, part in _cut_by_piece(node, placed):
                    yield from regions_of_box(piece.node, box_of_view(piece, part), casts)
        case FileTensor() | Stored() | HostTensor() | Computed():
            yield Region(node, box, casts)
        case _:
            raise AssertionError(f"unknown node {node!r}")


def box_of_view(view: View, placed: Placed) -> Box:
    """A box given in the coordinates of `view`, as a box of the buffer that the view looks at."""
    return Box(
        tuple(axis.size for axis in placed.axes),
        view.offset + sum(index * stride for index, stride in zip(placed.at, view.strides, strict=True)),
        tuple(axis.step * view.strides[axis.dim] if axis.dim >= 0 else 0 for axis in placed.axes),
        placed.to,
        tuple(axis.to_stride for axis in placed.axes),
    )


def _cut_by_piece(node: Cat, placed: Placed) -> Iterator[tuple[View, Placed]]:
    """Cut `placed` where it passes from one piece of a concatenation to the next."""
    dim, starts = node.dim, node.starts
    at, to = placed.at, placed.to
    moving = [axis for axis in placed.axes if axis.dim == dim] or [Axis(1, dim, 0, 0)]
    rest = tuple(axis for axis in placed.axes if axis.dim != dim)
    if len(moving) > 1:  # rare: unroll the outer one
        outer, *others = moving
        for number in range(outer.size):
            index = (*at[:dim], at[dim] + number * outer.step, *at[dim + 1 :])
            yield from _cut_by_piece(node, Placed(index, (*rest, *others), to + number * outer.to_stride))
        return
    axis, done = moving[0], 0
    while done < axis.size:
        position = at[dim] + done * axis.step
        number = bisect_right(starts, position) - 1
        room = starts[number + 1] - position
        count = min(axis.size - done, -(-room // axis.step)) if axis.step else axis.size
        inside = (*at[:dim], position - starts[number], *at[dim + 1 :])
        yield node.pieces[number], Placed(inside, (*rest, axis._replace(size=count)), to + done * axis.to_stride)
        done += count
