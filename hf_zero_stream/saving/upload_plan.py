"""The plan of a save into objects, which are written from their first byte to their last, each by one rank.

Shards are dealt to ranks. Segments of them follow each other in *rounds*: in each, a rank gets the next bytes of its
shard from the ranks that hold them. All ranks see the same rounds, which are made one after the other: there is no
list of them.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from ..checkpoint.nodes import Computed
from ..checkpoint.safetensors import ShardToWrite
from ..planning.plan import materialise_reason
from .plan import Computation, ExchangeRound, Segment, SegmentPart, Sources, segments_of


ROUND_BYTES = 4 * 2**20
"""The most bytes that a rank gets in a round, or gives."""


@dataclass(frozen=True)
class Upload:
    """A shard of plan number `plan` of a save, which the rank `writer` sends."""

    shard: ShardToWrite
    sources: Sources
    plan: int
    writer: int

    def source(self, name: str) -> str:
        """The name of a source of this plan among those of all plans."""
        return f"{self.plan} {name}"


def deal(sizes: Sequence[int], ranks: Sequence[int]) -> list[int]:
    """The rank, of `ranks`, that sends each shard of these `sizes`: the largest first, to whoever has the least."""
    loads = [(0, number, rank) for number, rank in enumerate(ranks)]
    found = [0] * len(sizes)
    for shard in sorted(range(len(sizes)), key=lambda shard: (-sizes[shard], shard)):
        load, number, rank = loads[0]
        found[shard] = rank
        heapq.heapreplace(loads, (load + sizes[shard], number, rank))
    return found


def upload_steps(uploads: Sequence[Upload], limit: int = ROUND_BYTES) -> Iterator[ExchangeRound | Computation]:
    """Rounds, and between them tensors that a function computes, for which all ranks gather parameters.

    Segments and computations have the number of an upload in place of a shard's. Those of one upload come in the order
    of its bytes. In a round no rank gets or gives more than `limit` bytes.
    """
    of_writer: dict[int, list[int]] = {}
    for number, upload in enumerate(uploads):
        of_writer.setdefault(upload.writer, []).append(number)
    queues = {writer: _Queue(uploads, numbers, limit) for writer, numbers in of_writer.items()}
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


class _Queue:
    """What one rank sends; `head` comes next, and is None at the end."""

    def __init__(self, uploads: Sequence[Upload], numbers: Sequence[int], limit: int) -> None:
        self._steps = (step for number in numbers for step in _steps_of(uploads[number], number, limit))
        self.head: Segment | Computation | None = None
        self.advance()

    def advance(self) -> None:
        self.head = next(self._steps, None)


def _steps_of(upload: Upload, number: int, limit: int) -> Iterator[Segment | Computation]:
    """All tensors of a shard, in the order of its bytes."""
    shard = upload.shard
    for name, position in sorted(shard.starts.items(), key=lambda start: start[1]):
        view = shard.views[name]
        if view.numel == 0:
            continue
        regions = [*upload.sources.regions(view, 0, view.numel)]
        if any(isinstance(region.leaf, Computed) for region in regions):
            reason = materialise_reason(view.node) or "a function gives its values"
            yield Computation(number, position, name, view, reason)
            continue
        most = max(1, limit // view.node.dtype.itemsize)
        for segment in segments_of(view, upload.sources, number, position, most, regions):
            yield segment._replace(parts=tuple(map(partial(_part_of, upload), segment.parts)))


def _part_of(upload: Upload, part: SegmentPart) -> SegmentPart:
    """`part` under the name of its upload's source; who sends the shard gives what every rank holds."""
    if not isinstance(part.source, str):
        return part
    rank = upload.writer if part.source in upload.sources.everywhere else part.rank
    return part._replace(rank=rank, source=upload.source(part.source))


def _leaving(segment: Segment, writer: int) -> Mapping[int, int]:
    """The bytes of `segment` that each rank gives to another."""
    found: Counter[int] = Counter()
    for part in segment.parts:
        if part.rank != writer:
            found[part.rank] += part.box.numel * segment.dtype.itemsize
    return found
