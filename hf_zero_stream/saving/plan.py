"""Which rank writes which bytes of which shard, as frozen data; ranks differ only in what each writes alone.

There are three ways; each tensor of a shard takes the first that fits:

- *runs*: elements that lie one after the other in a parameter and in the shard, as nearly all do. The rank that holds
  them writes them, wherever they begin and end.
- *segments*: another order of elements (transposed experts). A range of the shard is put together in a buffer by the
  rank that holds all of it.
- *rounds*: segments whose elements several ranks hold, in pieces too small to be written one by one. Ranks exchange
  them first. In a round no rank sends or receives more bytes than the largest segment has.

With a single writer everything that it does not hold goes through rounds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from ..checkpoint.lazy import LazyTensor
from ..checkpoint.nodes import Computed, HostTensor, Node, Stored, View
from ..checkpoint.safetensors import NotedShard, ShardLayout, lay_out_shard
from ..planning.boxes import Box, within
from ..planning.plan import materialise_reason
from ..planning.regions import Region, regions_of_box, regions_of_range


__all__ = [
    "CHUNK_BYTES",
    "Part",
    "Round",
    "Run",
    "SavePlan",
    "Segment",
    "Share",
    "ShardToWrite",
    "Sources",
    "in_dtype",
    "make_save_plan",
    "shard_to_write",
    "view_of",
]

CHUNK_BYTES = 16 * 2**20
"""Default size of the largest segment."""


class Share(NamedTuple):
    """Elements ``[start, stop)`` of a parameter, or of a box of one, which `rank` gives."""

    rank: int
    start: int
    stop: int


@dataclass(frozen=True)
class Sources:
    """Who gives which elements. A *source* is a parameter or, where ranks hold different boxes of it, such a box.

    Its name is the parameter's first one, followed by the number of the box if there are several.

    Attributes:
        shares: for each source, shares of all its elements, in order.
        joined: each parameter of which ranks hold different boxes, put together of these.
        everywhere: sources that every rank holds in full, with the same values; none if rank 0 gives them anyway.
    """

    shares: dict[str, tuple[Share, ...]] = field(default_factory=dict)
    joined: dict[str, Node] = field(default_factory=dict)
    everywhere: set[str] = field(default_factory=set)

    def regions(self, view: View, start: int, stop: int) -> Iterator[Region]:
        """Regions for elements ``[start, stop)`` of `view`; what is stored in them is a source."""
        for region in regions_of_range(view, start, stop):
            if isinstance(region.leaf, Stored) and region.leaf.name in self.joined:
                yield from regions_of_box(self.joined[region.leaf.name], region.box, region.casts)
            else:
                yield region

    def touching(self, source: str, start: int, stop: int) -> Iterator[Share]:
        """The shares that hold any of these elements."""
        shares = self.shares[source]
        first = max(0, bisect_right(shares, start, key=lambda share: share.start) - 1)
        for share in shares[first:]:
            if share.start >= stop:
                return
            if share.stop > start:
                yield share


@dataclass(frozen=True)
class ShardToWrite:
    """One file of the checkpoint: its name, its header with where each tensor begins, and each tensor's elements."""

    name: str
    layout: ShardLayout
    views: Mapping[str, View]


def shard_to_write(noted: NotedShard) -> ShardToWrite:
    """A file with the tensors that transformers would put into it."""
    memories: dict[Any, HostTensor] = {}
    views = {
        name: tensor.view_of_node if isinstance(tensor, LazyTensor) else view_of(tensor, memories)
        for name, tensor in noted.tensors.items()
    }
    return ShardToWrite(noted.name, lay_out_shard(noted), views)


def view_of(tensor: torch.Tensor, memories: dict[Any, HostTensor]) -> View:
    """A tensor whose values are at hand; one node for all that share a memory, which goes on in `memories`.

    transformers puts tensors that share a memory into one shard, and saves the same ones only once.
    """
    storage = tensor.untyped_storage()
    key: Any = (storage.data_ptr(), tensor.dtype)
    if storage.data_ptr() == 0 or storage.nbytes() % tensor.dtype.itemsize:
        key = id(tensor)  # no memory, or none of that dtype alone
        memories[key] = HostTensor.of(tensor)
        return View.whole(memories[key])
    if key not in memories:
        memories[key] = HostTensor.of(torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage))
    return View(memories[key], tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


def in_dtype(value: Any, dtype: torch.dtype | None) -> Any:
    """`value`, cast if it is a tensor of floating point and a dtype is asked for."""
    if dtype is not None and isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.to(dtype)
    return value


class Run(NamedTuple):
    """Elements ``[start, stop)`` of parameter `source`, written from byte `position` of a shard on."""

    shard: int
    position: int
    source: str
    start: int
    stop: int
    casts: tuple[torch.dtype, ...]


class Part(NamedTuple):
    """Elements of a segment that one rank holds: `box` goes from the parameter `source` to the segment."""

    rank: int
    source: str
    box: Box
    casts: tuple[torch.dtype, ...]


@dataclass(frozen=True, slots=True)
class Segment:
    """`numel` elements of a shard from byte `position` on.

    Attributes:
        constants: what is not a parameter's: buffers of the model, padding. Rank 0 writes a segment that has any.
    """

    shard: int
    position: int
    numel: int
    dtype: torch.dtype
    parts: tuple[Part, ...]
    constants: tuple[Region, ...]

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


Round = tuple[tuple[int, Segment], ...]
"""(writer, segment) for each segment of a round."""


class Computation(NamedTuple):
    """A tensor that a function gives: all ranks gather its parameters, and rank 0 writes it."""

    shard: int
    position: int
    name: str
    view: View
    reason: str


@dataclass(frozen=True)
class SavePlan:
    """What one rank writes alone (runs and segments, in file order), and what all do together, the same on each."""

    runs: tuple[Run, ...]
    segments: tuple[Segment, ...]
    rounds: tuple[Round, ...]
    computations: tuple[Computation, ...]
    bytes_written: int


def make_save_plan(
    shards: Sequence[ShardToWrite],
    sources: Sources,
    *,
    rank: int,
    world_size: int,
    chunk_bytes: int,
    single_writer: bool,
) -> SavePlan:
    """Plan what `rank` writes, in segments of at most `chunk_bytes`; a `single_writer` is rank 0."""
    runs: list[Run] = []
    own: list[Segment] = []
    exchanged: list[Segment] = []
    computations: list[Computation] = []
    nbytes = turn = 0
    for number, shard in enumerate(shards):
        for name, position in shard.layout.starts.items():
            view = shard.views[name]
            itemsize = view.node.dtype.itemsize
            if view.numel == 0:
                continue
            regions = list(sources.regions(view, 0, view.numel))
            if any(isinstance(region.leaf, Computed) for region in regions):
                reason = materialise_reason(view.node) or "a function gives its values"
                computations.append(Computation(number, position, name, view, reason))
                nbytes += view.numel * itemsize if rank == 0 else 0
                continue
            are_runs = all(region.box.is_run and isinstance(region.leaf, Stored) for region in regions)
            if are_runs and (not single_writer or _givers(regions, sources) == {0}):
                for region in regions:
                    mine = list(_own_runs(region, sources, rank, number, position, itemsize))
                    nbytes += sum(run.stop - run.start for run in mine) * itemsize
                    runs.extend(mine)
                continue
            for segment in _segments(view, sources, number, position, max(1, chunk_bytes // itemsize)):
                turn += 1
                alone = _is_of_rank_0(segment, single_writer)
                segment = _given_by_one(segment, sources.everywhere, 0 if alone else turn % world_size)
                holders = {part.rank for part in segment.parts} or {0}
                writer = 0 if alone else min(holders)
                if holders != {writer}:
                    exchanged.append(segment)
                elif writer == rank:
                    own.append(segment)
    rounds = tuple(_rounds(exchanged, world_size, chunk_bytes, single_writer))
    nbytes += sum(segment.nbytes for segment in own)
    nbytes += sum(segment.nbytes for of_round in rounds for writer, segment in of_round if writer == rank)
    return SavePlan(tuple(runs), tuple(own), rounds, tuple(computations), nbytes)


def _is_of_rank_0(segment: Segment, single_writer: bool) -> bool:
    """Whether rank 0 must write `segment`: stock, too, saves rank 0's values of what is not a parameter's."""
    return single_writer or bool(segment.constants)


def _givers(regions: Sequence[Region], sources: Sources) -> set[int]:
    """The ranks that give any element of the sources in `regions`."""
    return {share.rank for region in regions for share in sources.shares[region.leaf.name]}  # type: ignore[union-attr]


def _own_runs(region: Region, sources: Sources, rank: int, shard: int, position: int, itemsize: int) -> Iterator[Run]:
    assert isinstance(region.leaf, Stored)
    box, name = region.box, region.leaf.name
    first, last = box.at, box.at + box.numel
    for share in sources.touching(name, first, last):
        begin, end = max(first, share.start), min(last, share.stop)
        if share.rank == rank and begin < end:
            at = position + (box.to + begin - first) * itemsize
            yield Run(shard, at, name, begin, end, region.casts)


def _segments(view: View, sources: Sources, shard: int, position: int, limit: int) -> Iterator[Segment]:
    """`view` cut into segments of at most `limit` elements, from byte `position` of a shard on."""
    dtype = view.node.dtype
    for start in range(0, view.numel, limit):
        stop = min(view.numel, start + limit)
        parts: list[Part] = []
        constants: list[Region] = []
        for region in sources.regions(view, start, stop):
            if isinstance(region.leaf, HostTensor):
                constants.append(region)
                continue
            assert isinstance(region.leaf, Stored)
            box, name = region.box, region.leaf.name
            for share in sources.touching(name, box.at, box.at + box.at_extent):
                for cut in within(box, share.start, share.stop):
                    parts.append(Part(share.rank, name, cut, region.casts))
        at = position + start * dtype.itemsize
        yield Segment(shard, at, stop - start, dtype, tuple(parts), tuple(constants))


def _given_by_one(segment: Segment, everywhere: Set[str], turn: int) -> Segment:
    """`segment` with what every rank holds given by one: the first that gives other parts of it, else rank `turn`."""
    held = {part.rank for part in segment.parts if part.source not in everywhere}
    giver = min(held, default=turn)
    parts = tuple(part._replace(rank=giver) if part.source in everywhere else part for part in segment.parts)
    return replace(segment, parts=parts)


def _rounds(segments: Sequence[Segment], world_size: int, chunk_bytes: int, single_writer: bool) -> Iterator[Round]:
    """Rounds in file order; a writer is one of those that hold the segment, if one of them has room."""
    of_round: list[tuple[int, Segment]] = []
    written: Counter[int] = Counter()  # bytes, by rank
    sent: Counter[int] = Counter()

    def has_room(done: Counter[int], rank: int, nbytes: int) -> bool:
        return done[rank] + nbytes <= chunk_bytes or rank not in done

    for segment in segments:
        leaving: Counter[int] = Counter()
        for part in segment.parts:
            leaving[part.rank] += part.box.numel * segment.dtype.itemsize
        holders = sorted(leaving, key=lambda rank: (-leaving[rank], rank))
        candidates = (0,) if _is_of_rank_0(segment, single_writer) else (*holders, *range(world_size))
        writer = next((rank for rank in candidates if has_room(written, rank, segment.nbytes)), None)
        if writer is None or not all(has_room(sent, rank, nbytes) for rank, nbytes in leaving.items()):
            yield tuple(of_round)
            of_round, written, sent = [], Counter(), Counter()
            writer = candidates[0]
        of_round.append((writer, segment))
        written[writer] += segment.nbytes
        sent.update(leaving)
    if of_round:
        yield tuple(of_round)
