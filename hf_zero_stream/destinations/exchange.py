"""Tensors of which several ranks need the same rows of a file: each reads a share of them, for all.

- Replicas: ranks that hold the same read 1/N of it each. But of shards where all share one host, and exchange through
  its memory, each reads them itself: the page cache serves all but the first, and is faster.
- Columns: a file has a weight row by row, and a rank that wants some columns of it would read the short holes between
  them, too. So each rank of a tensor-parallel group reads whole rows, its share of them.

So each byte leaves the storage once, and what others need of it travels over the interconnect, in rounds of a bounded
buffer. While one round is sent, the next one is read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..accelerators import all_gather, collective_device, is_accelerator, serves
from ..checkpoint.nodes import FileTensor, View
from ..holdings.fsdp import cuts_of, inner_spec, ranks_at, replicated_dims
from ..holdings.holding import LocalShard
from ..holdings.introspection import is_cut, is_dtensor
from ..planning.boxes import Cut, ParameterBox, regions_of_range
from ..ranks.coordinator import Coordinator
from ..sources.base import Hints
from .base import Batch, Item, narrowed


_ALIGNMENT = 16  # bytes; where a part begins in a buffer, so that it can be viewed in any dtype

CHUNK_BYTES = 4 * 2**20
"""What arrives at a rank in one exchange, at most."""

WORTH_BYTES = 2**20
"""Bytes of holes that one rank would read, below which an exchange takes longer with any source."""


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


class Sharing:
    """The parameters that ranks read together: the same ones on all of them.

    Args:
        room: bytes that arrive at a rank in one exchange, at most, or 16 from each rank; 0: :data:`CHUNK_BYTES`.
        hints: of the source, which decide what is worth an exchange; None: each parameter that several ranks have is.
        trains_on: the type of the device that values are for.
        only_planned: the ranks are not there.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        *,
        room: int = 0,
        hints: Hints | None = None,
        trains_on: str = "cpu",
        only_planned: bool = False,
    ) -> None:
        self._coordinator, self._room, self._hints = coordinator, room, hints
        if hints is None:
            self._replicas = only_planned or not coordinator.is_alone
        else:
            self._replicas = _replicas_are_shared(coordinator, hints, trains_on)
        self._shared: list[Shared] = []

    def batches(self) -> list[Batch]:
        """Batches that fill what this has taken, in the same order on all ranks."""
        world_size = self._coordinator.world_size
        ordered = sorted(self._shared, key=lambda shared: not shared.is_gathered(world_size))
        rounds = [*rounds_of(ordered, world_size, self._room or CHUNK_BYTES)]
        exchanger = _Exchanger(self._coordinator, max((each.nbytes for each in rounds), default=0))
        return [exchanger.batch(each, number % 2) for number, each in enumerate(rounds)]

    def takes(self, name: str, flat: torch.Tensor, view: View, shard: LocalShard, param: Any, record: Any) -> bool:
        """Take a parameter that ranks read together; returns False if each reads its own part.

        Args:
            flat: the memory of this rank's `shard`.
            view: gives the whole parameter.
            param: the parameter itself, or one that is cut as it is.
            record: FSDP2's of it, if there is one.
        """
        found = self._shared_of(name, flat, view, shard, param, record)
        self._shared += [] if found is None else [found]
        return found is not None

    def _shared_of(
        self, name: str, flat: torch.Tensor, view: View, shard: LocalShard, param: Any, record: Any
    ) -> Shared | None:
        if is_cut(param):
            return None
        ranks: Sequence[int] = range(self._coordinator.world_size)
        cuts: Sequence[Cut] = ()
        if is_dtensor(param):
            dims, cuts = replicated_dims(param), cuts_of(name, param, record)
            is_cut_by_others = record is None or inner_spec(record) is not None
            if self._hints is not None and is_cut_by_others:
                also = dims if self._replicas else None
                columns = _columns_of(name, flat, view, shard, cuts, param, self._hints, also)
                if columns is not None:
                    return columns
            ranks = ranks_at(param.device_mesh, tuple(param.device_mesh.get_coordinate()), dims)
        if not self._replicas or len(ranks) == 1:
            return None
        most = ParameterBox.of_cuts(shard.box.shape, [cut._replace(part=0) for cut in cuts]).numel
        return Shared.of_replicas(name, flat, narrowed(view, shard.box), _first_copy(shard), ranks, most)


def _replicas_are_shared(coordinator: Coordinator, hints: Hints, trains_on: str) -> bool:
    """Whether ranks that hold the same shard read it for each other."""
    on_device = is_accelerator(torch.device(trains_on)) and (coordinator.is_alone or serves(trains_on))
    if hints.reads_per_exchange <= 1 or on_device:
        return True
    return not coordinator.is_alone and len(coordinator.topology.ranks_of_host) < coordinator.world_size


def _first_copy(shard: LocalShard) -> LocalShard:
    """`shard`, of which each rank that holds it reads other elements."""
    return shard._replace(copy=0, is_on_other_meshes=False)


def _columns_of(
    name: str,
    flat: torch.Tensor,
    view: View,
    shard: LocalShard,
    cuts: Sequence[Cut],
    sharded: Any,
    hints: Hints,
    also: tuple[int, ...] | None,
) -> Shared | None:
    """Decide how ranks along one dimension of a mesh read a parameter together; None if each reads its own part.

    Args:
        view: gives the whole parameter.
        cuts: the cuts that left ``shard.box`` of it.
        sharded: the DTensor that says which ranks share the columns.
        hints: of the source. Of n ranks that read together, each saves n bytes of reading for each byte that it gets
            from others.
        also: dimensions of its mesh along which ranks hold the same, if these read with them.
    """
    of_columns = [cut for cut in cuts if cut.dim > 0]
    if len(of_columns) != 1 or of_columns[0].groups > 1 or of_columns[0].parts <= hints.reads_per_exchange:
        return None
    (cut,) = of_columns
    mesh_dim = next((n for n, placement in enumerate(sharded.placements) if placement.is_shard(cut.dim)), None)
    shape, itemsize = shard.box.shape, int(flat.dtype.itemsize)
    length, after = shape[cut.dim], prod(shape[cut.dim + 1 :]) * itemsize
    most = ParameterBox.of_cuts(shape, [other._replace(part=0) for other in cuts])  # torch.chunk: none has more
    most_rows, hole = prod(most.sizes[: cut.dim]), (length - most.sizes[cut.dim]) * after
    is_worth = most_rows * hole >= WORTH_BYTES and 2 * length * after <= CHUNK_BYTES
    share = hole / (length * after)
    if mesh_dim is None or not is_worth or not _holes_are_read(view, cut.dim, share, hints.seek_bytes):
        return None
    box = shard.box._replace(
        intervals=(*shard.box.intervals[: cut.dim], ((0, length),), *shard.box.intervals[cut.dim + 1 :])
    )
    ranks: list[int] = []
    pieces: list[tuple[int, int]] = []
    coordinate = [*sharded.device_mesh.get_coordinate()]
    for part in range(cut.parts):
        ((start, stop),) = ParameterBox.of_cuts((length,), [Cut(0, cut.parts, part)]).intervals[0]
        coordinate[mesh_dim] = part
        holders = ranks_at(sharded.device_mesh, tuple(coordinate), also)
        ranks += holders
        pieces += [(start * after, stop * after)] * len(holders)
    if len(ranks) * max(end - begin for begin, end in pieces) > CHUNK_BYTES:
        return None
    rows_of = (shard if also is None else _first_copy(shard))._replace(box=box)
    return Shared(
        name,
        flat,
        narrowed(view, box),
        rows_of,
        ranks,
        pieces,
        length * after,
        prod(box.sizes[: cut.dim]),
        most_rows,
    )


def _holes_are_read(view: View, dim: int, share: float, seek_bytes: int) -> bool:
    """Whether a row of `view` lies in one piece in a file, and the others' `share` of it is a hole to be read."""
    regions = list(regions_of_range(view, 0, prod(view.sizes[dim:])))
    return all(
        isinstance(region.leaf, FileTensor)
        and region.box.is_run
        and region.box.numel * region.leaf.dtype.itemsize * share <= seek_bytes
        for region in regions
    )


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
