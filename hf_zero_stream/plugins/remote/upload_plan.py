"""The plan of a save into objects, which are written from their first byte to their last, each by one rank.

Shards are dealt to ranks. Segments of them follow each other in rounds: in each, a rank gets the next bytes of its
shard from the ranks that hold them. All ranks see the same rounds, which are made one after the other: there is no
list of them.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence, Set
from itertools import chain
from typing import NamedTuple

from ...plugin_api import (
    Computation,
    ExchangeRound,
    Segment,
    ShardToWrite,
    Sources,
    Step,
    computation_of,
    rounds_of,
    segments_of,
)


ROUND_BYTES = 4 * 2**20
"""The most bytes that a rank gets in a round, or gives."""


class Upload(NamedTuple):
    """A shard, which the rank `writer` sends."""

    shard: ShardToWrite
    writer: int


def deal(sizes: Sequence[int], ranks: Sequence[int]) -> list[int]:
    """The rank, of `ranks`, that sends each shard of these `sizes`: the largest first, to whoever has the least."""
    loads = [(0, number, rank) for number, rank in enumerate(ranks)]
    found = [0] * len(sizes)
    for shard in sorted(range(len(sizes)), key=lambda shard: (-sizes[shard], shard)):
        load, number, rank = loads[0]
        found[shard] = rank
        heapq.heapreplace(loads, (load + sizes[shard], number, rank))
    return found


def upload_steps(
    uploads: Sequence[Upload], sources: Sources, limit: int = ROUND_BYTES
) -> Iterator[ExchangeRound | Computation]:
    """Rounds, and between them tensors that a function computes, for which all ranks gather parameters.

    Segments of one upload come in the order of its bytes. In a round no rank gets or gives more than `limit` bytes.
    """
    steps: dict[int, list[Iterator[Step]]] = {}
    for number, upload in enumerate(uploads):
        steps.setdefault(upload.writer, []).append(_steps_of(number, upload, sources, limit))
    return rounds_of({writer: chain.from_iterable(each) for writer, each in steps.items()}, limit)


def _steps_of(number: int, upload: Upload, sources: Sources, limit: int) -> Iterator[Step]:
    """All tensors of a shard, in the order of its bytes."""
    for name, position in sorted(upload.shard.starts.items(), key=lambda start: start[1]):
        view = upload.shard.views[name]
        if view.numel == 0:
            continue
        regions = [*sources.regions(view, 0, view.numel)]
        if (computation := computation_of(view, regions, number, position, name)) is not None:
            yield computation
            continue
        most = max(1, limit // view.node.dtype.itemsize)
        for segment in segments_of(view, sources, number, position, most, regions):
            yield _given_by(upload.writer, segment, sources.everywhere)


def _given_by(writer: int, segment: Segment, everywhere: Set[str]) -> Segment:
    """`segment`, of which the rank that sends it gives what every rank holds."""
    parts = (part._replace(rank=writer) if part.source in everywhere else part for part in segment.parts)
    return segment._replace(parts=tuple(parts))
