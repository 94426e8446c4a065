"""The load plan of one rank: frozen data, made without reading weights and without a process group."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch

from ..checkpoint.format import Shard
from ..checkpoint.nodes import Computed, FileTensor, HostTensor, Node, Opaque, View
from ..footprint.memory import MemoryFootprint
from .reads import Piece, Read, merge_pieces, pieces_of_region
from .regions import Region, regions_of_range


__all__ = ["LoadPlan", "PlanCost", "Target", "make_plan", "partition_range"]


@dataclass(frozen=True, slots=True)
class Target:
    """A flat destination that a rank owns, and the elements of a parameter or buffer that belong in it.

    Attributes:
        name: the parameter's or buffer's name in the model.
        dtype: dtype of the destination.
        numel: its length in elements, padding included.
        start: first flat element of the parameter that goes there.
        stop: one past the last; ``stop - start`` may be less than `numel` (padding) and even 0.
    """

    name: str
    dtype: torch.dtype
    numel: int
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class Placement(NamedTuple):
    """A region that does not come straight out of a shard: values in host memory or a function's result."""

    target: int
    region: Region


@dataclass(frozen=True, slots=True)
class PlanCost:
    """What executing a plan costs this rank.

    Attributes:
        bytes_needed: bytes of shards that end up in a target or are inputs of a function.
        bytes_read: bytes asked for, holes that are read through included.
        reads: positional reads.
        seeks: reads that do not begin where the one before ended.
        target_bytes: bytes of all targets, padding included.
    """

    bytes_needed: int
    bytes_read: int
    reads: int
    seeks: int
    target_bytes: int


@dataclass(frozen=True)
class LoadPlan:
    """Which bytes of which shard go where, for one rank; iterating gives its reads in file order.

    Attributes:
        rank: the rank that it is for.
        world_size: number of ranks that share the checkpoint.
        shards: the checkpoint's files.
        targets: the destinations.
        reads: byte ranges to read, in file order, with the copies out of each.
        placements: regions from host memory or from functions, which are executed one at a time.
        materialised: parameter -> why it could not be planned by ranges alone.
        cost: what reading takes.
        footprint: the memory that this rank needs, in the load and in training; None if ZeRO-3 is not what loads.
    """

    rank: int
    world_size: int
    shards: tuple[Shard, ...]
    targets: tuple[Target, ...]
    reads: tuple[Read, ...]
    placements: tuple[Placement, ...]
    materialised: Mapping[str, str]
    cost: PlanCost
    footprint: MemoryFootprint | None = None

    def __iter__(self) -> Iterator[Read]:
        return iter(self.reads)

    def __len__(self) -> int:
        return len(self.reads)


def partition_range(numel: int, rank: int, world_size: int) -> tuple[int, int, int]:
    """ZeRO-3's share of a parameter: (elements per rank with padding, first own element, one past the last own)."""
    part = -(-numel // world_size)
    return part, min(numel, rank * part), min(numel, (rank + 1) * part)


def make_plan(
    views: Iterable[tuple[Target, View]],
    shards: tuple[Shard, ...],
    *,
    rank: int,
    world_size: int,
    request_bytes: int,
    seek_bytes: int,
) -> LoadPlan:
    """Plan the copies that fill each target from its view.

    Args:
        views: each target with the view whose flat range ``[target.start, target.stop)`` fills it from position 0.
        request_bytes: largest single read.
        seek_bytes: a hole of at most this many bytes is read through.
    """
    targets: list[Target] = []
    pieces: list[Piece] = []
    placements: list[Placement] = []
    materialised: dict[str, str] = {}
    for position, (target, view) in enumerate(views):
        targets.append(target)
        for region in regions_of_range(view, target.start, target.stop, target.dtype):
            if isinstance(region.leaf, FileTensor):
                pieces.extend(pieces_of_region(region, position, request_bytes, seek_bytes))
            else:
                placements.append(Placement(position, region))
        reason = materialise_reason(view.node)
        if reason:
            materialised[target.name] = reason
    reads = tuple(merge_pieces(pieces, request_bytes, seek_bytes))
    return LoadPlan(
        rank,
        world_size,
        shards,
        tuple(targets),
        reads,
        tuple(placements),
        materialised,
        _cost(reads, placements, targets, pieces),
    )


def materialise_reason(node: Node) -> str:
    """Why a value that depends on `node` needs whole tensors in memory, or an empty string if it does not."""
    pending, seen = [node], {id(node)}
    while pending:
        current = pending.pop()
        if isinstance(current, (HostTensor, Opaque)) and current.reason:
            return current.reason
        for view in current.inputs():
            inner = view.node
            if not isinstance(inner, FileTensor) and id(inner) not in seen:
                seen.add(id(inner))
                pending.append(inner)
    return ""


def _cost(
    reads: tuple[Read, ...], placements: list[Placement], targets: list[Target], pieces: list[Piece]
) -> PlanCost:
    needed = sum(piece.payload_bytes for piece in pieces)
    seeks, before = 0, (-1, -1)
    for read in reads:
        seeks += before != (read.shard, read.start)
        before = (read.shard, read.stop)
    whole = sum(_source_bytes(placement.region) for placement in placements)
    return PlanCost(
        bytes_needed=needed + whole,
        bytes_read=sum(read.length for read in reads) + whole,
        reads=len(reads),
        seeks=seeks,
        target_bytes=sum(target.nbytes for target in targets),
    )


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
        return prod(sizes) * view.node.dtype.itemsize
    return sum(_file_bytes(inner) for inner in view.node.inputs())
