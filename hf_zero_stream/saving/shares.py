"""Shares and boxes that ranks hold of a parameter, put together: they must be all of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..checkpoint.nodes import View
from ..errors import SaveError
from ..planning.boxes import Interval, ParameterBox
from .plan import Share


def join(name: str, boxes: Sequence[tuple[ParameterBox, View]], dim: int = 0) -> View:
    """A parameter put together of boxes: it is cut into slabs along dimension `dim`, and each slab along the next.

    `boxes` are in order of their first indices, each with its elements.
    """
    shape = boxes[0][0].shape
    if dim == len(shape):
        return boxes[0][1]
    slabs: dict[Interval, list[tuple[ParameterBox, View]]] = {}
    for box, view in boxes:
        ((begin, end),) = box.intervals[dim]
        slabs.setdefault((begin, end), []).append((box, view))
    position = 0
    for begin, end in slabs:
        if begin != position:
            break
        position = end
    if position != shape[dim]:
        raise SaveError(
            f"{name}: expected that the boxes that ranks hold of it fill its shape {shape} without overlap; along "
            f"dimension {dim} it is cut into (first index, one past the last): {', '.join(map(str, slabs))}. Save "
            "from all ranks of the job, with the same model on each."
        )
    pieces = tuple(join(name, slab, dim + 1) for slab in slabs.values())
    return pieces[0] if len(pieces) == 1 else View.joined(pieces, dim)


def cover(name: str, numel: int, held: Iterable[tuple[int, int, int]]) -> tuple[Share, ...]:
    """Shares that cover a parameter of `numel` elements, with no overlap; `held` are starts, stops, and ranks."""
    shares: list[Share] = []
    position = 0
    for start, stop, rank in sorted(own for own in held if own[0] < own[1]):
        if start > position:
            break
        if stop > position:
            shares.append(Share(rank, position, stop))
            position = stop
    if position < numel:
        raise SaveError(
            f"{name}: expected that the ranks hold all {numel} elements between them; nobody holds number {position}. "
            "Save from all ranks of the job, with the same model on each."
        )
    return tuple(shares)
