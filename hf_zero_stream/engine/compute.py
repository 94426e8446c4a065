"""Values that are not plain bytes of a shard: results of functions, and tensors in host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from math import ceil, floor, prod
from typing import Any

import torch
from torch.utils._pytree import tree_map

from ..checkpoint.nodes import Blockwise, Computed, HostTensor, Node, Opaque, Pointwise, View
from ..planning.boxes import Axis, Placed, place
from ..planning.plan import BatchPlan, Placement, Target, materialise_reason, plan_batch
from ..planning.regions import Leaf, Region, box_of_view
from ..sources.base import ByteSource
from .execute import execute_reads
from .workers import run_in_threads


__all__ = ["Evaluator"]


PIECE_BYTES = 2**20
"""Size in bytes of the pieces that a function's result is computed in: so small that they stay in the cache."""

BUFFERS_PER_PIECE = 8
"""How many times a piece's size is in use while it is computed: slices of inputs, values in fp32 on the way."""


class Evaluator:
    """Computes values from the shards of a checkpoint.

    Args:
        source: where the shards are read.
        request_bytes: largest single read.
        seek_bytes: a hole of at most this many bytes is read through.
        staging_bytes: bound of the memory that all threads use for pieces.
    """

    def __init__(
        self,
        source: ByteSource,
        *,
        request_bytes: int,
        seek_bytes: int,
        staging_bytes: int,
    ) -> None:
        self._source = source
        self._request_bytes = request_bytes
        self._seek_bytes = seek_bytes
        self._staging_bytes = staging_bytes
        self._on_bytes: Callable[[int], None] | None = None
        self._last: tuple[Node, torch.Tensor] | None = None

    def materialise(self, view: View) -> torch.Tensor:
        """The values of `view`, in a new contiguous host tensor of its sizes."""
        target = Target.whole("", view.node.dtype, view.numel)
        plan, leaves = plan_batch([(target, view)], request_bytes=self._request_bytes, seek_bytes=self._seek_bytes)
        values = torch.empty(view.numel, dtype=view.node.dtype)
        execute_reads(plan, [values], self._source, threads=1, on_bytes=self._on_bytes)
        for placement in plan.placements:
            self._place(_region(placement, leaves), values)
        return values.view(view.sizes)

    def place(
        self,
        plan: BatchPlan,
        leaves: Sequence[Leaf],
        destinations: Sequence[torch.Tensor],
        threads: int = 1,
        on_bytes: Callable[[int], None] | None = None,
    ) -> None:
        """Carry out the placements of `plan`.

        Args:
            leaves: the sources that they refer to by number.
            destinations: one flat tensor for each target of the plan, as for :func:`.execute.execute_reads`.
            threads: how many work on functions that can be computed piece by piece; those that need whole inputs are
                computed one at a time, and their inputs live only for their results.
            on_bytes: called with the number of bytes after each read.
        """
        self._on_bytes = on_bytes
        in_pieces: list[tuple[Region, torch.Tensor]] = []
        for placement in plan.placements:
            region, destination = _region(placement, leaves), destinations[placement.target]
            if isinstance(region.leaf, Computed) and not materialise_reason(region.leaf):
                in_pieces.append((region, destination))
            else:
                self._place(region, destination)
        self._last = None

        def pieces() -> Iterator[tuple[Region, Placed, torch.Tensor]]:
            for region, destination in in_pieces:
                for part in _parts(region, self._staging_bytes // threads):
                    yield region, part, destination

        def work(shared: Iterator[tuple[Region, Placed, torch.Tensor]]) -> None:
            for region, part, destination in shared:
                self._compute(region, part, destination)

        if in_pieces:
            run_in_threads(pieces(), work, threads)
        self._on_bytes = None

    def _compute(self, region: Region, part: Placed, destination: torch.Tensor) -> None:
        leaf = region.leaf
        values = self._elementwise(leaf, part) if isinstance(leaf, Pointwise) else self._blockwise(leaf, part)
        self._write(values, part.axes, part.to, region, destination)

    def _place(self, region: Region, destination: torch.Tensor) -> None:
        leaf, box = region.leaf, region.box
        if isinstance(leaf, (Pointwise, Blockwise)):
            for part in _parts(region, self._staging_bytes):
                self._compute(region, part, destination)
            return
        buffer = leaf.tensor if isinstance(leaf, HostTensor) else self._opaque(leaf)
        values = buffer[box.at :].as_strided(box.sizes, box.at_strides)
        axes = tuple(
            Axis(size, 0, stride, to_stride)
            for size, stride, to_stride in zip(box.sizes, box.at_strides, box.to_strides, strict=True)
        )
        self._write(values, axes, box.to, region, destination)

    def _write(
        self, values: torch.Tensor, axes: tuple[Axis, ...], to: int, region: Region, destination: torch.Tensor
    ) -> None:
        for dtype in region.casts[:-1]:
            values = values.to(dtype)
        sizes, strides = [axis.size for axis in axes], [axis.to_stride for axis in axes]
        destination[to:].as_strided(sizes, strides).copy_(values)

    def _elementwise(self, node: Any, placed: Placed) -> torch.Tensor:
        def value_of(argument: Any) -> Any:
            if not isinstance(argument, View):
                return argument
            if not argument.sizes:
                return self.materialise(argument)
            box = box_of_view(argument, placed)
            return self.materialise(View(argument.node, box.sizes, box.at_strides, box.at))

        args, kwargs = tree_map(value_of, (node.args, dict(node.kwargs)))
        return node.function(*args, **kwargs)

    def _blockwise(self, node: Any, placed: Placed) -> torch.Tensor:
        """The values of `placed`, computed from the blocks that it touches."""
        last = list(placed.at)
        for axis in placed.axes:
            if axis.dim >= 0:
                last[axis.dim] += axis.step * (axis.size - 1)
        begin = tuple(at // block * block for at, block in zip(placed.at, node.blocks, strict=True))
        end = [(at // block + 1) * block for at, block in zip(last, node.blocks, strict=True)]

        def slice_of(view: View, part: Mapping[int, tuple[int, Fraction | int]]) -> torch.Tensor:
            sizes, offset = list(view.sizes), view.offset
            for of_result, (dim, ratio) in part.items():
                first = floor(begin[of_result] * ratio)
                sizes[dim] = min(ceil(end[of_result] * ratio), view.sizes[dim]) - first
                offset += first * view.strides[dim]
            return self.materialise(View(view.node, tuple(sizes), view.strides, offset))

        values = node.function(begin, *map(slice_of, node.args, node.parts))
        origin = tuple(at - first for at, first in zip(placed.at, begin, strict=True))
        inside = box_of_view(
            View(node, tuple(values.shape), values.stride(), values.storage_offset()), Placed(origin, placed.axes, 0)
        )
        return values.as_strided(inside.sizes, inside.at_strides, inside.at)

    def _opaque(self, node: Node) -> torch.Tensor:
        assert isinstance(node, Opaque)
        if self._last is None or self._last[0] is not node:
            self._last = None  # free the one before first

            def value_of(argument: Any) -> Any:
                return self.materialise(argument) if isinstance(argument, View) else argument

            args, kwargs = tree_map(value_of, (node.args, dict(node.kwargs)))
            result = node.function(*args, **kwargs)
            if node.output is not None:
                result = result[node.output]
            self._last = (node, result.contiguous().view(-1))
        return self._last[1]


def _region(placement: Placement, leaves: Sequence[Leaf]) -> Region:
    return Region(leaves[placement.leaf], placement.box, placement.casts)


def _parts(region: Region, staging_bytes: int) -> Iterator[Placed]:
    """A function's region in pieces whose computation takes at most `staging_bytes`, as far as its blocks allow."""
    leaf = region.leaf
    assert isinstance(leaf, (Pointwise, Blockwise))
    limit = min(PIECE_BYTES, staging_bytes // BUFFERS_PER_PIECE) // leaf.dtype.itemsize
    for placed in place(region.box, leaf.sizes):
        yield from _bounded(placed, leaf, max(1, limit))


def _bounded(placed: Placed, node: Pointwise | Blockwise, limit: int) -> Iterator[Placed]:
    """Cut `placed` where blocks end into parts of at most `limit` elements, or of one block."""
    blocks = node.blocks if isinstance(node, Blockwise) else (1,) * len(node.sizes)
    strides = _source_strides(node)

    def in_blocks(axis: Axis) -> int:
        return axis.size if axis.dim < 0 else -(-axis.size * axis.step // blocks[axis.dim])

    cuttable = [position for position, axis in enumerate(placed.axes) if in_blocks(axis) > 1]
    if prod(axis.size for axis in placed.axes) <= limit or not cuttable:
        yield placed
        return
    # Along the dimension that is outermost in the shard, so that each part's bytes lie close together there.
    position = max(cuttable, key=lambda position: strides[placed.axes[position].dim])
    axis = placed.axes[position]
    half = axis.size // 2
    if axis.dim >= 0 and axis.step == 1:
        block, at = blocks[axis.dim], placed.at[axis.dim]
        half = max(block - at % block, (at + half) // block * block - at)
    for begin, size in ((0, half), (half, axis.size - half)):
        index = list(placed.at)
        if axis.dim >= 0:
            index[axis.dim] += begin * axis.step
        axes = (*placed.axes[:position], axis._replace(size=size), *placed.axes[position + 1 :])
        yield from _bounded(Placed(tuple(index), axes, placed.to + begin * axis.to_stride), node, limit)


def _source_strides(node: Pointwise | Blockwise) -> list[int]:
    """How far apart in its inputs the neighbours along each dimension of `node` are; one entry more for none."""
    strides = [0] * (len(node.sizes) + 1)
    for number, view in enumerate(node.inputs()):
        part = node.parts[number] if isinstance(node, Blockwise) else {dim: (dim, 1) for dim in range(len(view.sizes))}
        for of_result, (dim, _) in part.items():
            strides[of_result] = max(strides[of_result], view.strides[dim])
    return strides
