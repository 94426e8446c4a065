"""Plans: one rank's reads, and where they go. Frozen data, made without reading weights or a process group.

A plan can be pickled, printed and compared. Functions and values in memory stay beside it: a :class:`Placement`
refers to them by number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby, pairwise
from math import prod
from typing import NamedTuple

import torch

from ..checkpoint.format import Shard
from ..checkpoint.nodes import Computed, FileTensor, HostTensor, Leaf, Node, Opaque, View
from .boxes import Box, ParameterBox, Region, regions_of_range


@dataclass(frozen=True, slots=True)
class Target:
    """Flat memory of `numel` elements that a rank fills from elements ``[start, stop)`` of a view, in row-major order.

    If `numel` is more than ``stop - start``, which may be 0, the rest is padding. `box` is the part of the parameter
    `name` that the view shows; None: all of it. `is_copy`: counted on another rank, which fills the same elements.
    """

    name: str
    dtype: torch.dtype
    numel: int
    start: int
    stop: int
    box: ParameterBox | None = None
    is_copy: bool = False

    @property
    def nbytes(self) -> int:
        return self.numel * int(self.dtype.itemsize)

    def of_neighbours(self, rank: int, ranks: Sequence[int], numel: int) -> Target:
        """The memory of `ranks`, of which `rank` has this, one share of `numel` elements that lie side by side.

        Memory that is no share of ZeRO-3's, or is a whole, stays as it is.
        """
        part, first, last = self.numel, ranks[0], ranks[-1]
        if (self.start, self.stop) != (min(numel, rank * part), min(numel, (rank + 1) * part)):
            return self
        return replace(
            self, numel=part * len(ranks), start=min(numel, first * part), stop=min(numel, (last + 1) * part)
        )

    @classmethod
    def whole(cls, name: str, dtype: torch.dtype, numel: int, box: ParameterBox | None = None) -> Target:
        """Memory that holds all of its view, and nothing else."""
        return cls(name, dtype, numel, 0, numel, box)


class Piece(NamedTuple):
    """One copy out of bytes ``[start, stop)`` of shard number `shard`, holes included, to target number `target`.

    `box` has elements relative to `start`. They are of `dtype` in the file, and cast to each of `casts` in turn.
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
        return self.box.numel * int(self.dtype.itemsize)

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


class Placement(NamedTuple):
    """Copies to target number `target` of values in host memory, or of a function's result.

    `leaf` is the number of the source among those that :func:`plan_batch` returned beside the plan.
    """

    target: int
    leaf: int
    box: Box
    casts: tuple[torch.dtype, ...]


class PlanCost(NamedTuple):
    """The cost, for this rank, of executing a plan.

    `bytes_needed` end up in a target or are inputs of a function; `bytes_read` include the holes that are read
    through. `seeks` counts reads that do not begin where the one before ended. `target_bytes` include padding.
    """

    bytes_needed: int
    bytes_read: int
    reads: int
    seeks: int
    target_bytes: int


@dataclass(frozen=True)
class BatchPlan:
    """The `reads` and then `placements` that fill the targets of one batch, which have memory at the same time.

    Reads are in file order. `materialised`: parameter -> why it could not be planned by ranges alone.
    """

    targets: tuple[Target, ...]
    reads: tuple[Read, ...]
    placements: tuple[Placement, ...]
    materialised: Mapping[str, str]
    cost: PlanCost


@dataclass(frozen=True)
class LoadPlan:
    """All reads and copies of one rank's load; executed batch by batch.

    Iterating gives its reads, in file order within each batch. Reads and placements number the targets of their batch.
    """

    rank: int
    world_size: int
    shards: tuple[Shard, ...]
    batches: tuple[BatchPlan, ...]

    @property
    def targets(self) -> tuple[Target, ...]:
        return tuple(chain.from_iterable(batch.targets for batch in self.batches))

    @property
    def checkpoint_bytes(self) -> int:
        """Size of all shards, headers included: what stock's load reads of them in all."""
        return sum(shard.size_bytes for shard in self.shards)

    @property
    def materialised(self) -> dict[str, str]:
        return {name: reason for batch in self.batches for name, reason in batch.materialised.items()}

    @property
    def cost(self) -> PlanCost:
        """The sum over the batches."""
        return PlanCost(*map(sum, zip(PlanCost(0, 0, 0, 0, 0), *(batch.cost for batch in self.batches), strict=True)))

    def __iter__(self) -> Iterator[Read]:
        return chain.from_iterable(batch.reads for batch in self.batches)


def partition_range(numel: int, rank: int, world_size: int) -> tuple[int, int, int]:
    """ZeRO-3's share of a parameter: (elements per rank with padding, first own element, one past the last own)."""
    part = -(-numel // world_size)
    return part, min(numel, rank * part), min(numel, (rank + 1) * part)


def plan_batch(
    views: Iterable[tuple[Target, View]], *, request_bytes: int, seek_bytes: int
) -> tuple[BatchPlan, tuple[Leaf, ...]]:
    """The plan that fills each target from its view, and the sources that its placements refer to by number.

    No read is longer than `request_bytes`; a hole of at most `seek_bytes` is read through.
    """
    targets: list[Target] = []
    pieces: list[Piece] = []
    placements: list[Placement] = []
    leaves: dict[Leaf, int] = {}
    materialised: dict[str, str] = {}
    bytes_of_functions = 0
    for position, (target, view) in enumerate(views):
        targets.append(target)
        for region in regions_of_range(view, target.start, target.stop, target.dtype):
            if isinstance(region.leaf, FileTensor):
                pieces.extend(_pieces_of_region(region, position, request_bytes, seek_bytes))
            else:
                number = leaves.setdefault(region.leaf, len(leaves))
                placements.append(Placement(position, number, region.box, region.casts))
                bytes_of_functions += _source_bytes(region)
        if reason := materialise_reason(view.node):
            materialised[target.name] = reason
    reads = tuple(_merge_pieces(pieces, request_bytes, seek_bytes))
    cost = PlanCost(
        bytes_needed=sum(piece.payload_bytes for piece in pieces) + bytes_of_functions,
        bytes_read=sum(read.length for read in reads) + bytes_of_functions,
        reads=len(reads),
        seeks=len(reads) - sum((a.shard, a.stop) == (b.shard, b.start) for a, b in pairwise(reads)),
        target_bytes=sum(target.nbytes for target in targets),
    )
    return BatchPlan(tuple(targets), reads, tuple(placements), materialised, cost), tuple(leaves)


def _pieces_of_region(region: Region, target: int, request_bytes: int, seek_bytes: int) -> Iterator[Piece]:
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


def _merge_pieces(pieces: Iterable[Piece], request_bytes: int, seek_bytes: int) -> Iterator[Read]:
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
        joined = _joined(group[-1], piece) if group else None
        if joined is None:
            group.append(piece)
        else:
            group[-1] = joined
    if group:
        yield Read(shard, start, stop, tuple(group))


def _joined(first: Piece, second: Piece) -> Piece | None:
    """The two as one piece, if both are runs, and the second goes on in the shard and in its target."""
    a, b = first.box, second.box
    goes_on = first.stop == second.start and first.target == second.target and a.to + a.numel == b.to
    if not (goes_on and first.dtype == second.dtype and first.casts == second.casts):
        return None
    if not a.at_strides == a.to_strides == b.at_strides == b.to_strides == (1,):
        return None
    box = Box((a.numel + b.numel,), 0, (1,), a.to, (1,))
    return first._replace(stop=second.stop, box=box)


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


def materialise_reason(node: Node) -> str:
    """The reason why a value that depends on `node` needs whole tensors in memory; "" if it does not."""
    pending, seen = [node], {node}
    while pending:
        current = pending.pop()
        if isinstance(current, (HostTensor, Opaque)) and current.reason:
            return current.reason
        for view in current.inputs():
            if not isinstance(view.node, FileTensor) and view.node not in seen:
                seen.add(view.node)
                pending.append(view.node)
    return ""


def _source_bytes(region: Region) -> int:
    """Bytes of shards behind a region of a function: its share of a pointwise one, all of an opaque one."""
    leaf = region.leaf
    if not isinstance(leaf, Computed) or leaf.numel == 0:
        return 0
    share = 1.0 if isinstance(leaf, Opaque) else region.box.numel / leaf.numel
    return round(share * sum(_file_bytes(view) for view in leaf.inputs()))


def _file_bytes(view: View) -> int:
    if isinstance(view.node, FileTensor):
        # A dimension of stride 0 repeats the same bytes.
        sizes = (size for size, stride in zip(view.sizes, view.strides, strict=True) if stride)
        return prod(sizes) * int(view.node.dtype.itemsize)
    return sum(_file_bytes(inner) for inner in view.node.inputs())
