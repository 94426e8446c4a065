"""Which shards ranks read together (:mod:`.exchange`), so that each byte leaves the storage once.

- Replicas: ranks that hold the same read it for each other. But where all share one host, and exchange through its
  memory, each reads it itself: the page cache serves all but the first, and is faster.
- Columns: a file has a weight row by row, and a rank that wants some columns of it would read the short holes between
  them, too. So each rank of a tensor-parallel group reads whole rows, its share of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from ..accelerators import is_accelerator, serves
from ..checkpoint.nodes import FileTensor, View
from ..holdings.fsdp import Managed, cuts_of, inner_spec, ranks_at, replicated_dims
from ..holdings.holding import LocalShard
from ..holdings.introspection import is_cut, is_dtensor
from ..planning.boxes import Cut, ParameterBox, regions_of_range
from ..ranks.coordinator import Coordinator
from ..sources.base import Hints
from .base import Batch, narrowed
from .exchange import Shared, exchange_batches


CHUNK_BYTES = 4 * 2**20
"""What arrives at a rank in one exchange, at most."""

WORTH_BYTES = 2**20
"""Bytes of holes that one rank would read, below which an exchange takes longer with any source."""


class Sharing:
    """The parameters that ranks read together, with these `hints` of the source: the same ones on all of them.

    Args:
        trains_on: the type of the device that values are for.
        is_on: if not, each rank reads what it holds, as where it compares that with the files.
    """

    def __init__(self, coordinator: Coordinator, hints: Hints, trains_on: str, *, is_on: bool) -> None:
        self._coordinator, self._hints, self._is_on = coordinator, hints, is_on
        on_device = is_accelerator(torch.device(trains_on)) and (coordinator.is_alone or serves(trains_on))
        self._replicas = hints.reads_per_exchange <= 1 or on_device
        if not self._replicas and not coordinator.is_alone:
            self._replicas = len(coordinator.topology.ranks_of_host) < coordinator.world_size
        self._shared: list[Shared] = []

    def batches(self) -> list[Batch]:
        """Batches that fill what this has taken."""
        return exchange_batches(self._shared, self._coordinator, CHUNK_BYTES)

    def takes(
        self, name: str, flat: torch.Tensor, view: View, shard: LocalShard, sharded: Any, managed: Managed | None
    ) -> bool:
        """Take a parameter that ranks read together; returns False if each reads its own part.

        Args:
            flat: the memory of this rank's `shard`.
            view: gives the whole parameter.
            sharded: the parameter itself, or what it is going to be cut like.
            managed: FSDP2's record of it, if there is one.
        """
        found = self._shared_of(name, flat, view, shard, sharded, managed) if self._is_on else None
        self._shared += [] if found is None else [found]
        return found is not None

    def _shared_of(
        self, name: str, flat: torch.Tensor, view: View, shard: LocalShard, sharded: Any, managed: Managed | None
    ) -> Shared | None:
        if is_cut(sharded):
            return None
        ranks: Sequence[int] = range(self._coordinator.world_size)
        cuts: Sequence[Cut] = ()
        if is_dtensor(sharded):
            dims, cuts = replicated_dims(sharded), cuts_of(name, sharded, managed)
            if managed is None or inner_spec(managed) is not None:  # FSDP2 is not alone in cutting it
                also = dims if self._replicas else None
                columns = _columns_of(name, flat, view, shard, cuts, sharded, self._hints, also)
                if columns is not None:
                    return columns
            ranks = ranks_at(sharded.device_mesh, tuple(sharded.device_mesh.get_coordinate()), dims)
        if not self._replicas or len(ranks) == 1:
            return None
        most = ParameterBox.of_cuts(shard.box.shape, [cut._replace(part=0) for cut in cuts]).numel
        return Shared.of_replicas(name, flat, narrowed(view, shard.box), _first_copy(shard), ranks, most)


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
