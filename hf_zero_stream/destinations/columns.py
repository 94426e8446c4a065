"""Columns of weights, which the ranks of a tensor-parallel group read together: when that is worth while.

A file has a weight row by row. A rank that wants some columns of it would read the short holes between them, too. So
each rank of the group reads whole rows, its share of them (:mod:`.exchange`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from ..checkpoint.nodes import FileTensor, View
from ..holdings.fsdp import ranks_at
from ..holdings.holding import LocalShard
from ..planning.boxes import Cut, ParameterBox, regions_of_range
from ..sources.base import Hints
from .base import narrowed
from .exchange import Shared


CHUNK_BYTES = 4 * 2**20
"""What arrives at a rank in one exchange, at most."""

WORTH_BYTES = 2**20
"""Bytes of holes that one rank would read, below which an exchange takes longer with any source."""


def columns_of(
    name: str,
    local: torch.Tensor,
    view: View,
    shard: LocalShard,
    cuts: Sequence[Cut],
    sharded: Any,
    hints: Hints,
    also: Sequence[int] | None,
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
    shape, itemsize = shard.box.shape, int(local.dtype.itemsize)
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
        holders = ranks_at(sharded.device_mesh, coordinate, also)
        ranks += holders
        pieces += [(start * after, stop * after)] * len(holders)
    if len(ranks) * max(end - begin for begin, end in pieces) > CHUNK_BYTES:
        return None
    rows_of = (shard._replace(copy=0, is_on_other_meshes=False) if also is not None else shard)._replace(box=box)
    return Shared(
        name,
        local.view(-1),
        narrowed(view, box),
        lambda start, stop: rows_of.target(name, local.dtype, (start, stop)),
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
