"""Values that are not plain bytes of a shard: results of functions, and tensors in host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from fractions import Fraction
from functools import reduce
from itertools import chain
from math import ceil, floor, lcm, prod

import torch

from ..accelerators import is_accelerator, settle
from ..checkpoint.nodes import Blockwise, HostTensor, Leaf, Node, Opaque, Pointwise, Stored, View, row_major_strides
from ..planning.boxes import Axis, Box, CoordinateBox, box_of_view, regions_of_box, to_coordinates
from ..planning.plan import BatchPlan, Placement, Target, materialise_reason, plan_batch
from ..sources.base import ByteSource
from .execute import execute_reads, run_in_threads
from .lanes import copy_cast


PIECE_BYTES = 2**20
"""Size of the pieces that a function's result is computed in: so small that they stay in the processor's cache."""

BUFFERS_PER_PIECE = 8
"""Memory in use while a piece is computed, in pieces: slices of inputs, intermediate values in fp32."""


Part = tuple[torch.Tensor, Sequence[int], int]
"""Values, and where they go in flat memory: the strides there, and the first element."""


class Evaluator:
    """Computes what functions give from the values of their inputs, part by part."""

    def materialise(self, view: View) -> torch.Tensor:
        """The values of `view`, of its sizes."""
        raise NotImplementedError

    def of_box(self, leaf: Leaf, box: Box, limit: int) -> Iterator[Part]:
        """The values of `box` of the buffer of a `leaf`, computed for about `limit` elements at a time."""
        if isinstance(leaf, (Pointwise, Blockwise)):
            yield from (self.of_part(leaf, part) for part in self.cut(leaf, box, limit))
        else:
            yield self.flat(leaf)[box.at :].as_strided(box.sizes, box.at_strides), box.to_strides, box.to

    def cut(self, leaf: Pointwise | Blockwise, box: Box, limit: int) -> Iterator[CoordinateBox]:
        """Cut `box` of the buffer of `leaf` into parts of at most `limit` elements, as far as blocks allow."""
        for placed in to_coordinates(box, leaf.sizes):
            yield from _bounded(placed, leaf, self.blocks_of(leaf), limit)

    def blocks_of(self, leaf: Pointwise | Blockwise) -> tuple[int, ...]:
        """Along each dimension of `leaf`, parts end at multiples of it."""
        return leaf.blocks if isinstance(leaf, Blockwise) else (1,) * len(leaf.sizes)

    def of_part(self, node: Pointwise | Blockwise, part: CoordinateBox) -> Part:
        values = self._pointwise(node, part) if isinstance(node, Pointwise) else self._blockwise(node, part)
        return values, [axis.to_stride for axis in part.axes], part.to

    def flat(self, leaf: Leaf) -> torch.Tensor:
        """All values of a `leaf` that is not computed in parts, flat."""
        match leaf:
            case HostTensor():
                return leaf.tensor
            case Opaque():
                result = leaf.result(self.materialise)
                result = result if leaf.output is None else result[leaf.output]
                return result.contiguous().view(-1)
            case _:
                raise TypeError(f"a {type(leaf).__name__} has no values to place")

    def _pointwise(self, node: Pointwise, part: CoordinateBox) -> torch.Tensor:
        def value_of(view: View) -> torch.Tensor:
            if view.sizes:
                box = box_of_view(view, part)
                view = View(view.node, box.sizes, box.at_strides, box.at)
            return self.materialise(view)

        return node.result(value_of)

    def _blockwise(self, node: Blockwise, part: CoordinateBox) -> torch.Tensor:
        """Computed from the blocks that `part` touches."""
        last = list(part.at)
        for axis in part.axes:
            if axis.dim >= 0:
                last[axis.dim] += axis.step * (axis.size - 1)
        begin = tuple(at // block * block for at, block in zip(part.at, node.blocks, strict=True))
        end = [(at // block + 1) * block for at, block in zip(last, node.blocks, strict=True)]

        def slice_of(view: View, of_input: Mapping[int, tuple[int, Fraction | int]]) -> torch.Tensor:
            sizes, offset = list(view.sizes), view.offset
            for of_result, (dim, ratio) in of_input.items():
                first = floor(begin[of_result] * ratio)
                sizes[dim] = min(ceil(end[of_result] * ratio), view.sizes[dim]) - first
                offset += first * view.strides[dim]
            values = self.materialise(View(view.node, tuple(sizes), view.strides, offset))
            # Functions look at bytes as elements of other dtypes: strides count also where there is one index.
            return values.reshape(-1).view(sizes)

        values = node.function(begin, *map(slice_of, node.args, node.parts))
        origin = tuple(at - first for at, first in zip(part.at, begin, strict=True))
        computed = View(node, tuple(values.shape), values.stride(), values.storage_offset())
        inside = box_of_view(computed, part._replace(at=origin))
        return values.as_strided(inside.sizes, inside.at_strides, inside.at)


@dataclass(eq=False)
class MemoryEvaluator(Evaluator):
    """Computes values from tensors in memory.

    `stored` gives those of a node, flat, on `device`; or another node that it comes from. Of functions' results about
    `limit` elements are computed at a time.
    """

    stored: Callable[[Stored], torch.Tensor | Node]
    device: torch.device = torch.device("cpu")
    limit: int = PIECE_BYTES

    def materialise(self, view: View) -> torch.Tensor:
        if isinstance(view.node, Stored) and isinstance(found := self.stored(view.node), torch.Tensor):
            return found[view.offset :].as_strided(view.sizes, view.strides)
        sizes = tuple(size if stride else min(size, 1) for size, stride in zip(view.sizes, view.strides, strict=True))
        if sizes != view.sizes:  # what is repeated is computed once
            return self.materialise(View(view.node, sizes, view.strides, view.offset)).expand(view.sizes)
        parts = self._parts(view)
        first = next(parts, None)
        if first is not None and first[0].numel() == view.numel:  # which need not be copied
            values, strides, _ = first
            return values.permute(sorted(range(values.dim()), key=lambda dim: -strides[dim])).reshape(view.sizes)
        result = torch.empty(view.numel, dtype=view.node.dtype, device=self.device)
        for part in chain([] if first is None else [first], parts):
            _copy(part, result, (view.node.dtype,))
        return result.view(view.sizes)

    def fill(self, destination: torch.Tensor, view: View, casts: Sequence[torch.dtype]) -> None:
        """Write the values of `view`, cast to each of `casts` in turn, to flat memory."""
        for part in self._parts(view):
            _copy(part, destination, casts)

    def _parts(self, view: View) -> Iterator[Part]:
        if not view.numel:
            return
        box = Box(view.sizes, view.offset, view.strides, 0, row_major_strides(view.sizes))
        for leaf, box, casts in regions_of_box(view.node, box):
            for values, strides, to in self.of_box(leaf, box, self.limit):
                yield reduce(torch.Tensor.to, casts, values), strides, to

    def of_box(self, leaf: Leaf, box: Box, limit: int) -> Iterator[Part]:
        if not isinstance(leaf, Stored):
            yield from super().of_box(leaf, box, limit)
        elif isinstance(found := self.stored(leaf), torch.Tensor):
            yield found[box.at :].as_strided(box.sizes, box.at_strides), box.to_strides, box.to
        else:
            for inner in regions_of_box(found, box):
                yield from self.of_box(inner.leaf, inner.box, limit)

    def flat(self, leaf: Leaf) -> torch.Tensor:
        return super().flat(leaf).to(self.device)

    def blocks_of(self, leaf: Pointwise | Blockwise) -> tuple[int, ...]:
        """No two parts compute with the same element of an input, such as a scale of many values."""
        blocks = super().blocks_of(leaf)
        for part in leaf.parts if isinstance(leaf, Blockwise) else ():
            blocks = tuple(
                lcm(block, Fraction(part.get(dim, (0, 1))[1]).denominator) for dim, block in enumerate(blocks)
            )
        return blocks


@dataclass(eq=False)
class ShardEvaluator(Evaluator):
    """Computes values from the shards of a checkpoint, in host memory.

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

        def work(parts: Iterator[tuple[Pointwise | Blockwise, Placement, CoordinateBox]]) -> None:
            for leaf, placement, part in parts:
                destination = destinations[placement.target]
                _copy(_pinned(self.of_part(leaf, part), destination), destination, placement.casts)
            settle(destinations)

        if shared:
            parts = (
                (leaf, placement, part)
                for leaf, placement in shared
                for part in self.cut(leaf, placement.box, self._limit(leaf))
            )
            run_in_threads(parts, work, self.threads)
        settle(destinations)

    def _limit(self, leaf: Leaf) -> int:
        """Elements that a thread has memory to compute."""
        return max(1, self._piece_bytes // leaf.dtype.itemsize)

    def _place(self, leaf: Leaf, placement: Placement, destination: torch.Tensor) -> None:
        is_computed = isinstance(leaf, (Pointwise, Blockwise))
        for part in self.of_box(leaf, placement.box, self._limit(leaf)):
            _copy(_pinned(part, destination) if is_computed else part, destination, placement.casts)

    def flat(self, leaf: Leaf) -> torch.Tensor:
        """Those of a function are kept until another one is computed, because placements come one by one."""
        if not isinstance(leaf, Opaque):
            return super().flat(leaf)
        if self._last_result is None or self._last_result[0] is not leaf:
            self._last_result = None  # free the memory of the last one before computing
            self._last_result = (leaf, super().flat(leaf))
        return self._last_result[1]


def _pinned(part: Part, destination: torch.Tensor) -> Part:
    """What was computed on the host, where a thread need not wait until it has been copied to an accelerator."""
    values, strides, to = part
    is_far = is_accelerator(destination.device) and not is_accelerator(values.device)
    return (values.pin_memory() if is_far else values), strides, to


def _copy(part: Part, destination: torch.Tensor, casts: Sequence[torch.dtype]) -> None:
    values, strides, to = part
    copy_cast(destination[to:].as_strided(values.shape, strides), values, casts)


def _bounded(
    placed: CoordinateBox, node: Pointwise | Blockwise, blocks: Sequence[int], limit: int
) -> Iterator[CoordinateBox]:
    """Cut `placed` where blocks end into parts of at most `limit` elements, or of one block."""
    strides = _source_strides(node)

    def in_blocks(axis: Axis) -> int:
        return axis.size if axis.dim < 0 else min(axis.size, -(-axis.size * axis.step // blocks[axis.dim]))

    cuttable = [position for position, axis in enumerate(placed.axes) if in_blocks(axis) > 1]
    numel = prod(axis.size for axis in placed.axes)
    if numel <= limit or not cuttable:
        yield placed
        return
    # Along the dimension that is outermost in the shard, so that each part's bytes lie close together there.
    position = max(cuttable, key=lambda position: strides[placed.axes[position].dim])
    axis, begin = placed.axes[position], 0
    while begin < axis.size:
        end = begin + max(1, axis.size * limit // numel)
        if axis.dim >= 0 and axis.step == 1:
            block, at = blocks[axis.dim], placed.at[axis.dim]
            end = max((at + begin) // block + 1, (at + end) // block) * block - at
        end = min(end, axis.size)
        index = list(placed.at)
        if axis.dim >= 0:
            index[axis.dim] += begin * axis.step
        axes = (*placed.axes[:position], axis._replace(size=end - begin), *placed.axes[position + 1 :])
        yield from _bounded(CoordinateBox(tuple(index), axes, placed.to + begin * axis.to_stride), node, blocks, limit)
        begin = end


def _source_strides(node: Pointwise | Blockwise) -> list[int]:
    """The distance of neighbours in the inputs along each dimension of `node`; a last entry, 0, stands for none."""
    strides = [0] * (len(node.sizes) + 1)
    for number, view in enumerate(node.inputs()):
        part = node.parts[number] if isinstance(node, Blockwise) else {dim: (dim, 1) for dim in range(len(view.sizes))}
        for of_result, (dim, _) in part.items():
            strides[of_result] = max(strides[of_result], view.strides[dim])
    return strides
