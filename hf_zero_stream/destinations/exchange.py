"""Tensors of which several ranks need the same rows of a file: each reads a share of them, for all.

Ranks that have a tensor whole (replicas) read 1/N of it each. Ranks of a tensor-parallel group that hold columns of a
weight need all of its rows: a file has it row by row, and a rank alone would read the short holes between its columns,
too. Here each byte is read once, and what others need of it travels over the interconnect, in rounds of a bounded
buffer. While one round is sent, the next one is read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..accelerators import all_gather, collective_device
from ..checkpoint.nodes import View
from ..holdings.holding import LocalShard
from ..planning.boxes import ParameterBox
from ..ranks.coordinator import Coordinator
from .base import Batch, Item, SourcedTensor, flat_items


_ALIGNMENT = 16  # bytes; where a part begins in a buffer, so that it can be viewed in any dtype


class Shared(NamedTuple):
    """A tensor whose rows several ranks read for each other, and of whose rows each of them holds a piece.

    Attributes:
        name: of the parameter.
        local: this rank's memory, flat: its piece of each row.
        view: gives all rows, whole.
        shard: that these rows are, of the parameter.
        ranks: those that read it together, in the same order on all of them.
        pieces: first and last byte within a row of what each of them holds.
        rows: how many there are.
        most_rows: of the group of ranks that has most, because all groups exchange at the same time.
    """

    name: str
    local: torch.Tensor
    view: View
    shard: LocalShard
    ranks: Sequence[int]
    pieces: Sequence[tuple[int, int]]
    row_bytes: int
    rows: int
    most_rows: int

    @classmethod
    def of_replicas(
        cls, name: str, local: torch.Tensor, view: View, shard: LocalShard, ranks: Sequence[int], most: int
    ) -> Shared:
        """Elements that all of `ranks` have; the group that has most of them has `most`."""
        itemsize = local.dtype.itemsize
        pieces = [(0, itemsize)] * len(ranks)
        return cls(name, local, view, shard, ranks, pieces, itemsize, local.numel(), most)

    def is_gathered(self, world_size: int) -> bool:
        """Whether every rank needs all that is read, so that one collective gathers it."""
        return len(self.ranks) == world_size and all(piece == (0, self.row_bytes) for piece in self.pieces)

    @property
    def arriving_bytes(self) -> int:
        """The most that arrives at a rank if each of them reads one row."""
        return len(self.ranks) * max(end - begin for begin, end in self.pieces)


class _Part(NamedTuple):
    """Rows of one tensor in one round, from row `first` on: the next `most` of each of its ranks.

    `offset` is where they begin in the buffer of each, in bytes.
    """

    shared: Shared
    first: int
    most: int
    offset: int

    def rows_of(self, number: int) -> tuple[int, int]:
        """The first row that its rank of this number reads, and one past the last."""
        start = min(self.shared.rows, self.first + number * self.most)
        return start, min(self.shared.rows, start + self.most)

    def read_by(self, number: int, buffer: torch.Tensor) -> torch.Tensor:
        """The bytes that its rank of this number has read into its buffer."""
        start, stop = self.rows_of(number)
        return buffer[self.offset : self.offset + (stop - start) * self.shared.row_bytes]

    def memory_of(self, number: int, own: int) -> torch.Tensor:
        """The memory, on its rank of the number `own`, for what that of this number has read."""
        (start, stop), (begin, end) = self.rows_of(number), self.shared.pieces[own]
        return self.shared.local.view(torch.uint8)[start * (end - begin) : stop * (end - begin)]


class Round(NamedTuple):
    """What is exchanged at once; `nbytes` of each rank's buffer are in use."""

    parts: Sequence[_Part]
    is_gathered: bool
    nbytes: int


def rounds_of(tensors: Iterable[Shared], world_size: int, room: int) -> Iterator[Round]:
    """Rounds in which at most `room` bytes arrive at a rank, or 16 from each rank. All ranks have the same."""
    parts: list[_Part] = []
    used, is_gathered = 0, False
    of_each_rank = max(_ALIGNMENT, room // world_size // _ALIGNMENT * _ALIGNMENT)
    for shared in tensors:
        of_all, first = shared.is_gathered(world_size), 0
        limit = of_each_rank if of_all else room
        nbytes = shared.row_bytes if of_all else max(shared.row_bytes, shared.arriving_bytes)
        while first < shared.most_rows:
            most = min(-(-(shared.most_rows - first) // len(shared.ranks)), (limit - used) // nbytes)
            if parts and (most <= 0 or is_gathered != of_all):
                yield Round(parts, is_gathered, used)
                parts, used = [], 0
                continue
            is_gathered = of_all
            parts.append(_Part(shared, first, most, used))
            used = min(limit, used + -(-most * nbytes // _ALIGNMENT) * _ALIGNMENT)
            first += most * len(shared.ranks)
    if parts:
        yield Round(parts, is_gathered, used)


def exchange_batches(tensors: Iterable[Shared], coordinator: Coordinator, room: int) -> list[Batch]:
    """Batches that fill the memory of `tensors`, which come in the same order on all ranks.

    At most `room` bytes arrive at a rank at once, or 16 from each rank.
    """
    world_size = coordinator.world_size
    ordered = sorted(tensors, key=lambda shared: not shared.is_gathered(world_size))
    rounds = [*rounds_of(ordered, world_size, room)]
    exchanger = _Exchanger(coordinator, max((each.nbytes for each in rounds), default=0))
    return [exchanger.batch(each, number % 2) for number, each in enumerate(rounds)]


def replica_batches(
    parameters: Mapping[str, SourcedTensor], coordinator: Coordinator, room: int, *, only_planned: bool = False
) -> list[Batch]:
    """Batches that fill parameters which every rank has whole; for `room` see :func:`exchange_batches`."""
    flat = {name: (param.detach().view(-1), view) for name, (param, view) in parameters.items()}
    if coordinator.is_alone and not only_planned:
        return [Batch(flat_items(flat))]
    ranks = range(coordinator.world_size)

    def shared(name: str, memory: torch.Tensor, view: View) -> Shared:
        whole = LocalShard(ParameterBox.whole(memory.shape), 0, 1)
        return Shared.of_replicas(name, memory, view, whole, ranks, memory.numel())

    return exchange_batches((shared(name, *sourced) for name, sourced in flat.items()), coordinator, room)


class _Exchanger:
    """Exchanges what ranks have read into buffers of `nbytes`, two of each rank, used in turn."""

    def __init__(self, coordinator: Coordinator, nbytes: int) -> None:
        self._coordinator, self._nbytes = coordinator, nbytes
        self._buffers: dict[object, torch.Tensor] = {}

    def batch(self, each: Round, turn: int) -> Batch:
        """The batch that reads this rank's part of a round, and exchanges it."""
        whole = {part.shared.name: part.shared.local for part in each.parts} if each.is_gathered else {}
        return Batch(
            [self._item(part, turn) for part in each.parts],
            finish=partial(self._begin, each, turn),
            is_collective=True,
            is_temporary=True,
            completes=whole,
        )

    def _item(self, part: _Part, turn: int) -> Item:
        shared, number = part.shared, self._number(part)
        numel = shared.row_bytes // shared.local.dtype.itemsize
        start, stop = part.rows_of(number)

        def memory() -> torch.Tensor:
            return part.read_by(number, self._buffer(turn, self._nbytes)).view(shared.local.dtype)

        elements = start * numel, stop * numel
        return Item(shared.shard.target(shared.name, shared.local.dtype, elements), shared.view, memory)

    def _number(self, part: _Part) -> int:
        return part.shared.ranks.index(self._coordinator.rank)

    def _buffer(self, use: object, nbytes: int) -> torch.Tensor:
        """Memory for one use, made anew only if it is to be larger."""
        if use not in self._buffers or len(self._buffers[use]) < nbytes:
            self._buffers[use] = torch.empty(nbytes, dtype=torch.uint8, device=collective_device())
        return self._buffers[use]

    def _begin(self, each: Round, turn: int) -> Callable[[], None]:
        """Begin to exchange what ranks have read (all ranks); what is returned waits, and puts it where it belongs."""
        read = self._buffer(turn, self._nbytes)
        if each.is_gathered:
            nbytes = self._coordinator.world_size * each.nbytes
            received = self._buffer("received", nbytes)[:nbytes]
            wait = self._coordinator.begin(all_gather, received, read[: each.nbytes])
            return partial(_end_gather, wait, each.parts, received.view(-1, each.nbytes))
        leaving: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        places: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        for part in each.parts:
            own = self._number(part)
            rows = part.read_by(own, read).view(-1, part.shared.row_bytes)
            for number, (rank, (begin, end)) in enumerate(zip(part.shared.ranks, part.shared.pieces, strict=True)):
                leaving[rank].append(rows[:, begin:end])
                places[rank].append(part.memory_of(number, own))
        ranks = range(self._coordinator.world_size)
        sizes = [sum(rows.numel() for rows in leaving[rank]) for rank in ranks]
        expected = [sum(map(len, places[rank])) for rank in ranks]
        sent, at = self._buffer("sent", sum(sizes))[: sum(sizes)], 0
        for rows in (rows for rank in ranks for rows in leaving[rank]):
            sent[at : at + rows.numel()].view(rows.shape).copy_(rows)
            at += rows.numel()
        received = self._buffer("received", sum(expected))[: sum(expected)]
        wait = self._coordinator.begin(dist.all_to_all_single, received, sent, expected, sizes)
        return partial(_end, wait, [place for rank in ranks for place in places[rank]], received)


def _end(wait: Callable[[], None], places: Sequence[torch.Tensor], received: torch.Tensor) -> None:
    wait()
    for place, values in zip(places, received.split([*map(len, places)]), strict=True):
        place.copy_(values)


def _end_gather(wait: Callable[[], None], parts: Sequence[_Part], received: torch.Tensor) -> None:
    """Each part takes one copy, or two where the last ranks have less of it, however many ranks there are."""
    wait()
    for part in parts:
        nbytes = part.most * part.shared.row_bytes
        of_ranks = received[:, part.offset : part.offset + nbytes]
        at = part.first * part.shared.row_bytes
        there = part.shared.local.view(torch.uint8)[at : at + of_ranks.numel()]
        full = there.numel() // nbytes
        there[: full * nbytes].view(full, nbytes).copy_(of_ranks[:full])
        rest = there[full * nbytes :]
        if len(rest):
            rest.copy_(of_ranks[full, : len(rest)])
