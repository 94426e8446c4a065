"""The plan of a save, as frozen data: which rank writes which bytes; ranks differ only in what each writes alone.

What is written is cut into *segments*; each tensor of a shard takes the first way that fits:

- *runs*: elements that lie one after the other in a parameter and in the shard, as nearly all do. The rank that holds
  them writes them from where they lie, however many they are.
- another order of elements (transposed experts): the rank that holds all of a segment puts it together in a buffer.
- *rounds*: segments whose elements several ranks hold, in pieces too small to be written one by one. Ranks exchange
  them first. In a round no rank sends or receives more bytes than the largest such segment has.

With a single writer everything that it does not hold goes through rounds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import torch

from ..checkpoint.nodes import Computed, HostTensor, Node, Stored, View, sources_of
from ..checkpoint.safetensors import ShardToWrite
from ..planning.boxes import Box, Region, clipped, regions_of_box, regions_of_range
from ..planning.plan import materialise_reason


CHUNK_BYTES = 16 * 2**20
"""The largest segment that passes through a buffer, and what a rank sends or writes in one round."""


class Share(NamedTuple):
    """Elements ``[start, stop)`` of a parameter, or of a box of one, which `rank` gives."""

    rank: int
    start: int
    stop: int


class SegmentPart(NamedTuple):
    """Elements of a segment that `rank` gives: of a source, or of a buffer or padding, which are rank 0's."""

    rank: int
    source: str | HostTensor
    box: Box
    casts: tuple[torch.dtype, ...]


@dataclass(frozen=True)
class Sources:
    """The ranks that give each element of each source.

    A *source* is a parameter or, where ranks hold different boxes of it, such a box. Its name is the parameter's first
    one, followed by the number of the box if there are several.

    Attributes:
        shares: for each source, shares of all its elements, in order.
        joined: each parameter of which ranks hold different boxes, put together of these.
        everywhere: sources that every rank holds in full, with the same values; none if rank 0 gives them anyway.
        replicas: sources that every rank holds in full, with values that need not be the same.
    """

    shares: dict[str, tuple[Share, ...]] = field(default_factory=dict)
    joined: dict[str, Node] = field(default_factory=dict)
    everywhere: set[str] = field(default_factory=set)
    replicas: set[str] = field(default_factory=set)

    def regions(self, view: View, start: int, stop: int) -> Iterator[Region]:
        """Regions for elements ``[start, stop)`` of `view`; what is stored in them is a source."""
        for region in regions_of_range(view, start, stop):
            if isinstance(region.leaf, Stored) and region.leaf.name in self.joined:
                yield from regions_of_box(self.joined[region.leaf.name], region.box, region.casts)
            else:
                yield region

    def source_of(self, view: View) -> str:
        """The source that `view` is, as it is; "" if it is none."""
        node = view.node
        is_whole = view.sizes == node.sizes and view.offset == 0 and view.is_row_major
        return node.name if isinstance(node, Stored) and is_whole and node.name in self.shares else ""

    def numel(self, source: str) -> int:
        """How many elements of `source` the ranks have between them."""
        return sum(share.stop - share.start for share in self.shares[source])

    def elements(self, region: Region) -> dict[str, int]:
        """How many elements of each source go into `region`: all of what a function computes it from."""
        if isinstance(region.leaf, Stored):
            return {region.leaf.name: region.box.numel}
        found: dict[str, int] = {}
        for node, _ in sources_of([View.whole(region.leaf)]) if isinstance(region.leaf, Computed) else ():
            if isinstance(node, Stored):
                found |= {source: self.numel(source) for source in self.sources_of(node.name)}
        return found

    def sources_of(self, name: str) -> list[str]:
        """The sources that are the parameter `name`, or the boxes that it is put together of."""
        joined = self.joined.get(name)
        if joined is None:
            return [name]
        return [node.name for node, _ in sources_of([View.whole(joined)]) if isinstance(node, Stored)]

    def parts(self, region: Region, only: int | None = None) -> Iterator[SegmentPart]:
        """The parts of `region`, which is no function's, that ranks give, or that the rank `only` gives."""
        leaf, box, stop = region.leaf, region.box, region.box.at + region.box.at_extent
        if isinstance(leaf, HostTensor):
            yield SegmentPart(0, leaf, box, region.casts)
            return
        assert isinstance(leaf, Stored)
        shares = self.shares[leaf.name]
        first = max(0, bisect_right(shares, box.at, key=lambda share: share.start) - 1)
        for share in shares[first:]:
            if share.start >= stop:
                return
            if only is None or share.rank == only:
                for cut in clipped(box, share.start, share.stop):
                    yield SegmentPart(share.rank, leaf.name, cut, region.casts)


def in_dtype(value: Any, dtype: torch.dtype | None) -> Any:
    """`value`, cast if it is a tensor of floating point and a dtype is asked for."""
    if dtype is not None and isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.to(dtype)
    return value


class Segment(NamedTuple):
    """`numel` elements of a shard from byte `position` on."""

    shard: int
    position: int
    numel: int
    dtype: torch.dtype
    parts: tuple[SegmentPart, ...]

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def is_run(self) -> bool:
        """Whether its elements lie in this order in one source."""
        return len(self.parts) == 1 and self.parts[0].box.is_run

    def is_of_rank_0(self, single_writer: bool) -> bool:
        """Whether rank 0 must write it: stock, too, saves rank 0's values of what is not a parameter's."""
        return single_writer or any(isinstance(part.source, HostTensor) for part in self.parts)


ExchangeRound = tuple[tuple[int, Segment], ...]
"""(writer, segment) for each segment of a round."""


class Computation(NamedTuple):
    """A tensor that a function gives: all ranks gather its parameters, and rank 0 writes it."""

    shard: int
    position: int
    name: str
    view: View
    reason: str


Step = Segment | Computation


@dataclass(frozen=True)
class SavePlan:
    """The segments that one rank writes alone, and those that all write together, the same on each.

    Attributes:
        elements: how many elements of each source all ranks write between them; what a function computes with counts.
    """

    alone: tuple[Segment, ...]
    rounds: tuple[ExchangeRound, ...]
    computations: tuple[Computation, ...]
    bytes_written: int
    elements: Mapping[str, int] = field(default_factory=dict)


def make_save_plan(
    shards: Sequence[ShardToWrite],
    sources: Sources,
    *,
    rank: int,
    world_size: int,
    single_writer: bool,
) -> SavePlan:
    """Plan what `rank` writes; a `single_writer` is rank 0. Segments that are no runs have at most `CHUNK_BYTES`."""
    alone: list[Segment] = []
    exchanged: list[Segment] = []
    computations: list[Computation] = []
    elements: Counter[str] = Counter()
    own: dict[int, list[Share]] = {}
    """The shares of `rank` among those that many sources have in common, by their id."""
    nbytes = turn = 0
    for number, shard in enumerate(shards):
        for name, position in shard.starts.items():
            view = shard.views[name]
            dtype = view.node.dtype
            if view.numel == 0:
                continue
            if not single_writer and (source := sources.source_of(view)):  # as all moments are, and most values
                elements[source] += view.numel
                shares = sources.shares[source]
                if id(shares) not in own:
                    own[id(shares)] = [share for share in shares if share.rank == rank]
                for share in own[id(shares)]:
                    at, count = position + share.start * dtype.itemsize, share.stop - share.start
                    part = SegmentPart(rank, source, Box((count,), share.start, (1,), 0, (1,)), ())
                    alone.append(Segment(number, at, count, dtype, (part,)))
                continue
            regions = list(sources.regions(view, 0, view.numel))
            for region in regions:
                elements.update(sources.elements(region))
            if (computation := computation_of(view, regions, number, position, name)) is not None:
                computations.append(computation)
                nbytes += view.numel * dtype.itemsize if rank == 0 else 0
                continue
            are_runs = all(region.box.is_run and isinstance(region.leaf, Stored) for region in regions)
            if are_runs and single_writer:
                are_runs = all(part.rank == 0 for region in regions for part in sources.parts(region))
            if are_runs:
                for region in regions:
                    for part in sources.parts(region, only=rank):
                        at = position + part.box.to * dtype.itemsize
                        here = part._replace(box=part.box._replace(to=0))
                        alone.append(Segment(number, at, part.box.numel, dtype, (here,)))
                continue
            limit = max(1, CHUNK_BYTES // dtype.itemsize)
            for segment in segments_of(view, sources, number, position, limit, regions):
                turn += 1
                is_of_rank_0 = segment.is_of_rank_0(single_writer)
                segment = _given_by_one(segment, sources.everywhere, 0 if is_of_rank_0 else turn % world_size)
                holders = {part.rank for part in segment.parts}
                writer = 0 if is_of_rank_0 else min(holders)
                if holders != {writer}:
                    exchanged.append(segment)
                elif writer == rank:
                    alone.append(segment)
    rounds = exchange_rounds(_of_writers(exchanged, single_writer), CHUNK_BYTES)
    written = [segment for of_round in rounds for writer, segment in of_round if writer == rank]
    nbytes += sum(segment.nbytes for segment in chain(alone, written))
    return SavePlan(tuple(alone), rounds, tuple(computations), nbytes, dict(elements))


def computation_of(view: View, regions: Iterable[Region], shard: int, position: int, name: str) -> Computation | None:
    """The computation of a tensor of which a function gives any of its `regions`; else None."""
    if not any(isinstance(region.leaf, Computed) for region in regions):
        return None
    return Computation(shard, position, name, view, materialise_reason(view.node) or "a function gives its values")


def segments_of(
    view: View, sources: Sources, shard: int, position: int, limit: int, regions: Sequence[Region] = ()
) -> Iterator[Segment]:
    """`view` cut into segments of at most `limit` elements, from byte `position` of a shard on.

    `regions` are those of all of it, if they are known.
    """
    dtype = view.node.dtype
    for start in range(0, view.numel, limit):
        stop = min(view.numel, start + limit)
        is_whole = stop - start == view.numel
        of_range = regions if regions and is_whole else sources.regions(view, start, stop)
        parts = chain.from_iterable(map(sources.parts, of_range))
        yield Segment(shard, position + start * dtype.itemsize, stop - start, dtype, tuple(parts))


def _given_by_one(segment: Segment, everywhere: Set[str], turn: int) -> Segment:
    """`segment` with what every rank holds given by one: the first that gives other parts of it, else rank `turn`."""
    held = {part.rank for part in segment.parts if part.source not in everywhere}
    giver = min(held, default=turn)
    parts = tuple(part._replace(rank=giver) if part.source in everywhere else part for part in segment.parts)
    return segment._replace(parts=parts)


def _of_writers(segments: Iterable[Segment], single_writer: bool) -> dict[int, list[Segment]]:
    """By writer, its segments: it holds the most of each and, of several who do, has the fewest bytes so far."""
    found: dict[int, list[Segment]] = {}
    written: Counter[int] = Counter()
    for segment in segments:
        held: Counter[int] = Counter()
        for part in segment.parts:
            held[part.rank] += part.box.numel
        most = max(held.values())
        able = (0,) if segment.is_of_rank_0(single_writer) else [rank for rank in held if held[rank] == most]
        writer = min(able, key=lambda rank: (written[rank], rank))
        found.setdefault(writer, []).append(segment)
        written[writer] += segment.nbytes
    return found


def rounds_of(steps: Mapping[int, Iterable[Step]], limit: int) -> Iterator[ExchangeRound | Computation]:
    """Rounds in which no rank gets or gives more than `limit` bytes, or what one segment needs.

    `steps` are, by writer, its segments and computations; each has its own in this order, and all go on side by side.
    """
    queues = {writer: _Queue(of_writer) for writer, of_writer in steps.items()}
    order = deque(queues)
    while any(queue.head is not None for queue in queues.values()):
        of_round: list[tuple[int, Segment]] = []
        gets: Counter[int] = Counter()
        gives: Counter[int] = Counter()
        for writer in order:
            while isinstance(segment := queues[writer].head, Segment):
                leaving = _leaving(segment, writer)
                fits = gets[writer] + segment.nbytes <= limit
                if of_round and not (fits and all(gives[rank] + count <= limit for rank, count in leaving.items())):
                    break
                of_round.append((writer, segment))
                gets[writer] += segment.nbytes
                gives.update(leaving)
                queues[writer].advance()
        order.rotate(-1)  # whoever had no room comes first some time
        if of_round:
            yield tuple(of_round)
        for queue in queues.values():
            if isinstance(computation := queue.head, Computation):
                queue.advance()
                yield computation


def exchange_rounds(segments: Mapping[int, Sequence[Segment]], limit: int) -> tuple[ExchangeRound, ...]:
    """Do what :func:`rounds_of` does, with segments alone."""
    return tuple(each for each in rounds_of(segments, limit) if not isinstance(each, Computation))


class _Queue:
    """What one rank writes; `head` comes next, and is None at the end."""

    def __init__(self, steps: Iterable[Step]) -> None:
        self._steps = iter(steps)
        self.head: Step | None = None
        self.advance()

    def advance(self) -> None:
        self.head = next(self._steps, None)


def _leaving(segment: Segment, writer: int) -> Mapping[int, int]:
    """The bytes of `segment` that each rank gives to another."""
    found: Counter[int] = Counter()
    for part in segment.parts:
        if part.rank != writer:
            found[part.rank] += part.box.numel * segment.dtype.itemsize
    return found
