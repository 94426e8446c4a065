"""What one rank reads and where it goes: frozen data, made without reading weights and without a process group.

A plan can be pickled, printed and compared. What is no data (functions, values in memory) stays beside it: a
:class:`Placement` refers to it by number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, pairwise
from math import prod
from typing import NamedTuple

import torch

from ..checkpoint.format import Shard
from ..checkpoint.nodes import Computed, FileTensor, HostTensor, Node, Opaque, View
from .boxes import Box
from .parameter_box import ParameterBox
from .reads import Piece, Read, merge_pieces, pieces_of_region
from .regions import Leaf, Region, regions_of_range


__all__ = ["BatchPlan", "LoadPlan", "Placement", "Target", "materialise_reason", "partition_range", "plan_batch"]


@dataclass(frozen=True, slots=True)
class Target:
    """Flat memory of `numel` elements that a rank fills from elements ``[start, stop)`` of a view, in row-major order.

    Attributes:
        name: the parameter's or buffer's name in the model.
        numel: may be more than ``stop - start``, which may be 0: the rest is padding.
        box: what of the parameter the view shows; None: all of it.
    """

    name: str
    dtype: torch.dtype
    numel: int
    start: int
    stop: int
    box: ParameterBox | None = None

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @classmethod
    def whole(cls, name: str, dtype: torch.dtype, numel: int, box: ParameterBox | None = None) -> Target:
        """Memory that holds all of its view, and nothing else."""
        return cls(name, dtype, numel, 0, numel, box)


class Placement(NamedTuple):
    """Copies to target number `target` of values in host memory, or of a function's result.

    `leaf` is the number of the source among those that :func:`plan_batch` returned beside the plan.
    """

    target: int
    leaf: int
    box: Box
    casts: tuple[torch.dtype, ...]


class PlanCost(NamedTuple):
    """What executing a plan costs this rank.

    Attributes:
        bytes_needed: bytes of shards that end up in a target or are inputs of a function.
        bytes_read: bytes asked for, holes that are read through included.
        seeks: reads that do not begin where the one before ended.
        target_bytes: bytes of all targets, padding included.
    """

    bytes_needed: int
    bytes_read: int
    reads: int
    seeks: int
    target_bytes: int


@dataclass(frozen=True)
class BatchPlan:
    """How the targets of one batch are filled, which have memory at the same time.

    Attributes:
        reads: byte ranges to read, in file order, with the copies out of each.
        placements: copies from host memory and from functions, executed after the reads.
        materialised: parameter -> why it could not be planned by ranges alone.
    """

    targets: tuple[Target, ...]
    reads: tuple[Read, ...]
    placements: tuple[Placement, ...]
    materialised: Mapping[str, str]
    cost: PlanCost


@dataclass(frozen=True)
class LoadPlan:
    """Which bytes of which shard go where, for one rank; it is executed batch by batch.

    Iterating gives its reads, in file order within each batch. Reads and placements number the targets of their batch.

    `world_size` ranks share the checkpoint.
    """

    rank: int
    world_size: int
    shards: tuple[Shard, ...]
    batches: tuple[BatchPlan, ...]

    @property
    def targets(self) -> tuple[Target, ...]:
        return tuple(chain.from_iterable(batch.targets for batch in self.batches))

    @property
    def materialised(self) -> dict[str, str]:
        """Parameter -> why it could not be planned by ranges alone."""
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
                pieces.extend(pieces_of_region(region, position, request_bytes, seek_bytes))
            else:
                number = leaves.setdefault(region.leaf, len(leaves))
                placements.append(Placement(position, number, region.box, region.casts))
                bytes_of_functions += _source_bytes(region)
        if reason := materialise_reason(view.node):
            materialised[target.name] = reason
    reads = tuple(merge_pieces(pieces, request_bytes, seek_bytes))
    cost = PlanCost(
        bytes_needed=sum(piece.payload_bytes for piece in pieces) + bytes_of_functions,
        bytes_read=sum(read.length for read in reads) + bytes_of_functions,
        reads=len(reads),
        seeks=len(reads) - sum((a.shard, a.stop) == (b.shard, b.start) for a, b in pairwise(reads)),
        target_bytes=sum(target.nbytes for target in targets),
    )
    return BatchPlan(tuple(targets), reads, tuple(placements), materialised, cost), tuple(leaves)


def materialise_reason(node: Node) -> str:
    """Why a value that depends on `node` needs whole tensors in memory; "" if it does not."""
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
        return prod(sizes) * view.node.dtype.itemsize
    return sum(_file_bytes(inner) for inner in view.node.inputs())
