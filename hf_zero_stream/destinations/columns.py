"""Columns of weights, which the ranks of a tensor-parallel group read together.

A file has a weight row by row. A rank that wants some columns of it would read the short holes between them, too. So
each rank of the group reads whole rows, its share of them, and sends to every other rank the columns that are its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, partial
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..accelerators import collective_device
from ..checkpoint.nodes import FileTensor, View
from ..holdings.holding import LocalShard
from ..planning.boxes import Cut, ParameterBox, regions_of_range
from ..planning.plan import Target
from ..ranks.coordinator import Coordinator
from ..sources.base import Hints
from .base import Batch, Item, narrowed


CHUNK_BYTES = 4 * 2**20
"""Size of each of the two buffers through which a rank exchanges rows."""

WORTH_BYTES = 2**20
"""Bytes of holes that one rank would read, below which an exchange takes longer with any source."""

_ALIGNMENT = 16  # bytes; where a part begins in a buffer, so that it can be viewed in any dtype


class Columns(NamedTuple):
    """A parameter of which this rank holds some columns. All sizes are the same on all ranks, but for :attr:`rows`.

    Attributes:
        local: this rank's memory, flat.
        view: gives the rows that the group holds between them, each whole.
        shard: the box of these rows.
        dim: the dimension that is cut; a row is an index along all dimensions before it.
        pieces: first and last byte within a row of each rank's columns, in the order of the group.
        rows: how many rows the group holds.
        most_rows: those of the group that has most.
        mesh_dimension: the device mesh, and the number of its dimension that is the group.
    """

    name: str
    local: torch.Tensor
    view: View
    shard: LocalShard
    dim: int
    pieces: Sequence[tuple[int, int]]
    rank: int
    rows: int
    most_rows: int
    mesh_dimension: tuple[Any, int]

    @property
    def row_numel(self) -> int:
        return prod(self.shard.box.sizes[self.dim :])

    @property
    def row_bytes(self) -> int:
        return self.row_numel * int(self.local.dtype.itemsize)

    @property
    def share(self) -> int:
        """Rows that each rank reads; the last ones may have fewer."""
        return -(-self.most_rows // len(self.pieces))

    @property
    def bytes_per_row(self) -> int:
        """Bytes that a row of each rank's share takes of a buffer: as read, or as the columns that arrive for it."""
        return max(self.row_bytes, len(self.pieces) * max(end - begin for begin, end in self.pieces))


def columns_of(
    name: str, local: torch.Tensor, view: View, shard: LocalShard, cuts: Sequence[Cut], spec: Any, hints: Hints
) -> Columns | None:
    """Decide how ranks along one dimension of a mesh read a parameter together; None if each reads its own part.

    Args:
        view: gives the whole parameter.
        cuts: the cuts that left ``shard.box`` of it.
        spec: the DTensor, or its spec, that says which ranks share the columns.
        hints: of the source. Of n ranks that read together, each saves n bytes of reading for each byte that it gets
            from others.
    """
    of_columns = [cut for cut in cuts if cut.dim > 0]
    if len(of_columns) != 1 or of_columns[0].groups > 1 or of_columns[0].parts <= hints.reads_per_exchange:
        return None
    (cut,) = of_columns
    mesh_dim = next((n for n, placement in enumerate(spec.placements) if placement.is_shard(cut.dim)), None)
    shape, itemsize = shard.box.shape, int(local.dtype.itemsize)
    length, after = shape[cut.dim], prod(shape[cut.dim + 1 :]) * itemsize
    most = ParameterBox.of_cuts(shape, [other._replace(part=0) for other in cuts])  # torch.chunk: none has more
    most_rows, hole = prod(most.sizes[: cut.dim]), (length - most.sizes[cut.dim]) * after
    is_worth = most_rows * hole >= WORTH_BYTES and 2 * length * after <= CHUNK_BYTES
    share = hole / (length * after)
    if mesh_dim is None or not is_worth or not _holes_are_read(view, cut.dim, share, hints.seek_bytes):
        return None
    parts = [ParameterBox.of_cuts((length,), [Cut(0, cut.parts, part)]).intervals[0][0] for part in range(cut.parts)]
    box = shard.box._replace(
        intervals=(*shard.box.intervals[: cut.dim], ((0, length),), *shard.box.intervals[cut.dim + 1 :])
    )
    return Columns(
        name,
        local.view(-1),
        narrowed(view, box),
        shard._replace(box=box),
        cut.dim,
        [(start * after, stop * after) for start, stop in parts],
        cut.part,
        prod(box.sizes[: cut.dim]),
        most_rows,
        (spec.device_mesh, mesh_dim),
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


class _RowsInExchange(NamedTuple):
    """Rows of one parameter in one exchange: `most` of each rank's share, from row `first` of it on.

    `offset` is where this rank's begin in its buffer, in bytes.
    """

    columns: Columns
    first: int
    most: int
    offset: int

    def rows_of(self, rank: int) -> tuple[int, int]:
        """The first row that `rank` reads, and one past the last."""
        first = rank * self.columns.share + self.first
        last = min(first + self.most, (rank + 1) * self.columns.share, self.columns.rows)
        return min(first, self.columns.rows), max(min(first, self.columns.rows), last)

    @property
    def target(self) -> Target:
        columns = self.columns
        start, stop = (row * columns.row_numel for row in self.rows_of(columns.rank))
        return columns.shard.target(columns.name, columns.local.dtype, (start, stop))

    def read_rows(self, buffer: torch.Tensor) -> torch.Tensor:
        """The rows that this rank has read, as bytes."""
        start, stop = self.rows_of(self.columns.rank)
        row_bytes = self.columns.row_bytes
        return buffer[self.offset : self.offset + (stop - start) * row_bytes].view(stop - start, row_bytes)

    def local_rows(self, rank: int) -> torch.Tensor:
        """The memory of this rank's columns of the rows that `rank` reads, as bytes."""
        columns = self.columns
        begin, end = columns.pieces[columns.rank]
        start, stop = (row * (end - begin) for row in self.rows_of(rank))
        return columns.local.view(torch.uint8)[start:stop]


def _exchanges(all_columns: Iterable[Columns]) -> Iterator[list[_RowsInExchange]]:
    """The parts of each exchange; all ranks have as many exchanges, and each group has the same parts."""
    parts: list[_RowsInExchange] = []
    used = 0
    for columns in all_columns:
        first = 0
        while first < columns.share:
            is_other = parts and parts[0].columns.mesh_dimension != columns.mesh_dimension
            most = 0 if is_other else min(columns.share - first, (CHUNK_BYTES - used) // columns.bytes_per_row)
            if most == 0:
                yield parts
                parts, used = [], 0
                continue
            parts.append(_RowsInExchange(columns, first, most, used))
            used += -(-most * columns.bytes_per_row // _ALIGNMENT) * _ALIGNMENT
            first += most
    if parts:
        yield parts


def column_batches(all_columns: Iterable[Columns], coordinator: Coordinator) -> list[Batch]:
    """Batches that fill the memory of `all_columns`, which come in the same order on all ranks."""
    exchanger = _ColumnExchanger(coordinator)

    def item(part: _RowsInExchange) -> Item:
        target = part.target
        return Item(target, part.columns.view, lambda: part.read_rows(exchanger.rows).view(-1).view(target.dtype))

    return [
        Batch(
            [item(part) for part in parts],
            finish=partial(exchanger.exchange, parts),
            is_collective=True,
            is_temporary=True,
        )
        for parts in _exchanges(all_columns)
    ]


class _ColumnExchanger:
    """Sends columns of the rows that this rank has read to the ranks that hold them, through two buffers."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    @cached_property
    def rows(self) -> torch.Tensor:
        """The rows that this rank has read; later, the columns that it receives."""
        return torch.empty(CHUNK_BYTES, dtype=torch.uint8, device=collective_device())

    @cached_property
    def _sent(self) -> torch.Tensor:
        return torch.empty_like(self.rows)

    def exchange(self, parts: Sequence[_RowsInExchange]) -> None:
        """Send and receive the columns of `parts` (all ranks of the group)."""
        mesh, mesh_dim = parts[0].columns.mesh_dimension
        ranks = range(len(parts[0].columns.pieces))
        sent_bytes, sizes = 0, []
        for rank in ranks:
            before = sent_bytes
            for part in parts:
                begin, end = part.columns.pieces[rank]
                rows = part.read_rows(self.rows)[:, begin:end]
                self._sent[sent_bytes : sent_bytes + rows.numel()].view(rows.shape).copy_(rows)
                sent_bytes += rows.numel()
            sizes.append(sent_bytes - before)
        places = [[part.local_rows(rank) for part in parts] for rank in ranks]
        expected = [sum(map(len, of_rank)) for of_rank in places]
        received = self.rows[: sum(expected)]  # in place of what has been sent
        group, sent = mesh.get_group(mesh_dim), self._sent[:sent_bytes]
        self._coordinator.run(dist.all_to_all_single, received, sent, expected, sizes, group=group)
        all_places = [place for of_rank in places for place in of_rank]
        for place, values in zip(all_places, received.split([*map(len, all_places)]), strict=True):
            place.copy_(values)
