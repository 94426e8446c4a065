"""Local shards of parameters that are DTensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from ..errors import UnsupportedError
from ..planning.boxes import Cut, ParameterBox
from ..ranks.coordinator import Coordinator
from . import fsdp
from .holding import Holding, LocalShard, open_flat
from .introspection import is_cut, local_of
from .kinds import PARAMETERS, refuse_unknown


def local_shard_of(name: str, param: Any, managed: fsdp.Managed | None, coordinator: Coordinator) -> LocalShard:
    """As :func:`dtensor_shard_of`, and of a parameter that is no DTensor: all of it, as every rank holds it."""
    if isinstance(param, DTensor):
        return dtensor_shard_of(name, param, managed)
    if is_cut(param):
        from .deepspeed.autotp_shards import autotp_shard_of  # imports deepspeed, which takes seconds

        return autotp_shard_of(name, param)
    refuse_unknown({name: param}, PARAMETERS, "an optimizer's parameter")
    return LocalShard(ParameterBox.whole(param.shape), coordinator.rank, coordinator.world_size)


def dtensor_shard_of(name: str, param: DTensor, managed: fsdp.Managed | None) -> LocalShard:
    """Return this rank's local shard of `param`; `managed` is FSDP2's record of it, if there is one.

    FSDP2 cuts last, although its placement comes first. Where tensor parallelism cuts a fused weight along the same
    dimension, the placements alone do not say what FSDP2 all-gathers; its record does.

    Raises:
        UnsupportedError: a placement is a partial sum, whose values no rank holds.
    """
    copy, copies = 0, 1
    for placement, size, coordinate in _placed(name, param):
        if isinstance(placement, Replicate):
            copy, copies = copy * size + coordinate, copies * size
    is_on_other_meshes = int(param.device_mesh.mesh.min()) != 0
    return LocalShard(
        ParameterBox.of_cuts(param.shape, cuts_of(name, param, managed)), copy, copies, is_on_other_meshes
    )


def cuts_of(name: str, param: DTensor, managed: fsdp.Managed | None) -> list[Cut]:
    """Return the cuts that leave this rank's shard of `param`, in order; for the rest see :func:`dtensor_shard_of`."""
    if managed is None:
        return list(_cuts(list(_placed(name, param))))
    inner, chunk = fsdp.inner_spec(managed), fsdp.chunk_of(managed)
    cuts = [] if inner is None else list(_cuts(list(_placed(name, inner))))
    return cuts if chunk is None else [*cuts, chunk]


_Placed = tuple[Any, int, int]
"""A placement, the number of ranks along its dimension of the mesh, and this rank's coordinate there."""


def _placed(name: str, sharded: Any) -> Iterator[_Placed]:
    """The placements of a DTensor or of a spec."""
    mesh = sharded.device_mesh
    coordinates = mesh.get_coordinate()
    if coordinates is None:
        raise UnsupportedError(
            f"{name}: expected that all ranks hold the same model between them; this rank has no part in {mesh}, on "
            "which this parameter is. Stages of a pipeline cannot be loaded or saved together."
        )
    for number, placement in enumerate(sharded.placements):
        if isinstance(placement, Partial):
            raise UnsupportedError(
                f"{name}: its placement is {placement}, a partial sum, whose values no rank holds. Redistribute it to "
                "Shard or Replicate first."
            )
        yield placement, mesh.size(number), coordinates[number]


def _cuts(placed: Sequence[_Placed]) -> Iterator[Cut]:
    """The cuts in the order in which they were made: one whose groups are those of the cuts behind it came last."""
    last: list[Cut] = []
    for number, (placement, size, coordinate) in enumerate(placed):
        if isinstance(placement, Replicate):
            continue
        groups = getattr(placement, "split_factor", 1)
        behind = [size for other, size, _ in placed[number + 1 :] if getattr(other, "dim", None) == placement.dim]
        if behind and groups == prod(behind):
            last.insert(0, Cut(placement.dim, size, coordinate))
        else:
            yield Cut(placement.dim, size, coordinate, groups)
    yield from last


def held_shards(
    model: nn.Module, params: Mapping[str, nn.Parameter], *, masters: bool, rank: int, world_size: int
) -> dict[str, Holding]:
    """A :class:`.holding.Holder`: the shards of DTensors."""
    managed = fsdp.managed_params(model)

    def holding(name: str, param: Any) -> Holding:
        record = managed.get(name)
        # FSDP2 may have put gathered parameters in place of its own.
        mine = record if record is not None and record.sharded_param is param else None
        shard, values = dtensor_shard_of(name, param, mine), partial(open_flat, local_of(param))
        return Holding(shard.box, param.dtype, *shard.share, values, is_whole=shard.copies > 1)

    return {name: holding(name, param) for name, param in params.items()}
