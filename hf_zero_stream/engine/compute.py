"""Values that are not plain bytes of a shard: results of functions, and tensors in host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from fractions import Fraction
from math import ceil, floor, prod

import torch

from ..accelerators import is_accelerator, settle
from ..checkpoint.nodes import Blockwise, HostTensor, Leaf, Opaque, Pointwise, View
from ..planning.boxes import Axis, Placed, box_of_view, place
from ..planning.plan import BatchPlan, Placement, Target, materialise_reason, plan_batch
from ..sources.base import ByteSource
from .execute import execute_reads, run_in_threads
from .lanes import copy_cast


PIECE_BYTES = 2**20
"""Size of the pieces that a function's result is computed in: so small that they stay in the processor's cache."""

BUFFERS_PER_PIECE = 8
"""Memory in use while a piece is computed, in pieces: slices of inputs, intermediate values in fp32."""


@dataclass(eq=False)
class Evaluator:
    """Computes values from the shards of a checkpoint.

    `threads` threads work on functions that can be computed piece by piece, in `staging_bytes` of memory. Those that
    need whole inputs are computed one at a time, and each frees its inputs before the next begins.
    """

    source: ByteSource
    _: KW_ONLY
    request_bytes: int
    seek_bytes: int
    staging_bytes: int
    threads: int = 1
    on_bytes: Callable[[int], None] | None = None

    def __post_init__(self) -> None:
        self._piece_bytes = min(PIECE_BYTES, self.staging_bytes // self.threads // BUFFERS_PER_PIECE)
        self._last_result: tuple[Opaque, torch.Tensor] | None = None

    def materialise(self, view: View) -> torch.Tensor:
        """The values of `view`, in a new contiguous host tensor of its sizes."""
        target = Target.whole("", view.node.dtype, view.numel)
        plan, leaves = plan_batch([(target, view)], request_bytes=self.request_bytes, seek_bytes=self.seek_bytes)
        values = torch.empty(view.numel, dtype=view.node.dtype)
        execute_reads(plan, [values], self.source, threads=1, on_bytes=self.on_bytes)
        for placement in plan.placements:
            self._place(leaves[placement.leaf], placement, values)
        return values.view(view.sizes)

    def place(self, plan: BatchPlan, leaves: Sequence[Leaf], destinations: Sequence[torch.Tensor]) -> None:
        """Carry out the placements of `plan`, which refer to `leaves` by number, in flat `destinations` by target."""
        if not plan.placements:
            return
        settle(destinations)  # threads have streams of their own
        shared: list[tuple[Pointwise | Blockwise, Placement]] = []
        for placement in plan.placements:
            leaf = leaves[placement.leaf]
            if isinstance(leaf, (Pointwise, Blockwise)) and not materialise_reason(leaf):
                shared.append((leaf, placement))
            else:
                self._place(leaf, placement, destinations[placement.target])
        self._last_result = None

        def work(parts: Iterator[tuple[Pointwise | Blockwise, Placement, Placed]]) -> None:
            for leaf, placement, part in parts:
                self._place_part(leaf, placement, part, destinations[placement.target])
            settle(destinations)

        if shared:
            parts = ((leaf, placement, part) for leaf, placement in shared for part in self._parts(leaf, placement))
            run_in_threads(parts, work, self.threads)
        settle(destinations)

    def _place(self, leaf: Leaf, placement: Placement, destination: torch.Tensor) -> None:
        match leaf:
            case Pointwise() | Blockwise():
                for part in self._parts(leaf, placement):
                    self._place_part(leaf, placement, part, destination)
                return
            case HostTensor():
                buffer = leaf.tensor
            case Opaque():
                buffer = self._opaque(leaf)
            case _:
                raise TypeError(f"a {type(leaf).__name__} has no values to place")
        box = placement.box
        values = buffer[box.at :].as_strided(box.sizes, box.at_strides)
        copy_cast(destination[box.to :].as_strided(box.sizes, box.to_strides), values, placement.casts)

    def _place_part(
        self, leaf: Pointwise | Blockwise, placement: Placement, part: Placed, destination: torch.Tensor
    ) -> None:
        values = self._elementwise(leaf, part) if isinstance(leaf, Pointwise) else self._blockwise(leaf, part)
        if is_accelerator(destination.device) and not is_accelerator(values.device):
            values = values.pin_memory()  # else the thread waits for the copy
        sizes, strides = [axis.size for axis in part.axes], [axis.to_stride for axis in part.axes]
        copy_cast(destination[part.to :].as_strided(sizes, strides), values, placement.casts)

    def _parts(self, leaf: Pointwise | Blockwise, placement: Placement) -> Iterator[Placed]:
        """Cut what is to be placed into pieces that the thread has memory to compute, as far as blocks allow."""
        limit = max(1, self._piece_bytes // leaf.dtype.itemsize)
        for placed in place(placement.box, leaf.sizes):
            yield from _bounded(placed, leaf, limit)

    def _elementwise(self, node: Pointwise, placed: Placed) -> torch.Tensor:
        def value_of(view: View) -> torch.Tensor:
            if view.sizes:
                box = box_of_view(view, placed)
                view = View(view.node, box.sizes, box.at_strides, box.at)
            return self.materialise(view)

        return node.result(value_of)

    def _blockwise(self, node: Blockwise, placed: Placed) -> torch.Tensor:
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
        computed = View(node, tuple(values.shape), values.stride(), values.storage_offset())
        inside = box_of_view(computed, placed._replace(at=origin))
        return values.as_strided(inside.sizes, inside.at_strides, inside.at)

    def _opaque(self, node: Opaque) -> torch.Tensor:
        """All values of `node`, flat; kept until another one is computed, because placements come one by one."""
        if self._last_result is None or self._last_result[0] is not node:
            self._last_result = None  # free the memory of the last one before computing
            result = node.result(self.materialise)
            if node.output is not None:
                result = result[node.output]
            self._last_result = (node, result.contiguous().view(-1))
        return self._last_result[1]


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
    """For each dimension of `node`, how far apart its neighbours are in the inputs; a last entry stands for none."""
    strides = [0] * (len(node.sizes) + 1)
    for number, view in enumerate(node.inputs()):
        part = node.parts[number] if isinstance(node, Blockwise) else {dim: (dim, 1) for dim in range(len(view.sizes))}
        for of_result, (dim, _) in part.items():
            strides[of_result] = max(strides[of_result], view.strides[dim])
    return strides
