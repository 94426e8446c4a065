"""What this rank holds of a parameter that is a DTensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate

from ..errors import UnsupportedError
from ..planning.boxes import Cut, ParameterBox
from ..planning.plan import Target, partition_range
from ..ranks.coordinator import Coordinator
from . import fsdp
from .kinds import PARAMETERS, refuse_unknown
from .marks import is_cut


class Shard(NamedTuple):
    """What this rank holds of a parameter, as number `copy` of the `copies` ranks of its mesh that hold the same.

    `is_repeated`: there may be other meshes of ranks that hold all of it too, one of them with rank 0. Of tensor
    parallelism under FSDP2, what only FSDP2 shards is on a mesh of its own for each rank of tensor parallelism.
    """

    box: ParameterBox
    copy: int
    copies: int
    is_repeated: bool = False

    @property
    def share(self) -> tuple[int, int]:
        """The first element of the box that this rank gives when it is saved, and one past the last."""
        _, start, stop = partition_range(self.box.numel, self.copy, self.copies)
        return start, stop

    def target(self, name: str, dtype: torch.dtype, elements: tuple[int, int] | None = None) -> Target:
        """The target of all of the box of parameter `name`, or of these elements of it."""
        start, stop = elements or (0, self.box.numel)
        box = None if self.box.is_whole else self.box
        return Target(name, dtype, stop - start, start, stop, box, is_copy=self.copy > 0 or self.is_repeated)


def held_of(name: str, param: Any, managed: fsdp.Managed | None, coordinator: Coordinator) -> Shard:
    """As :func:`shard_of`, and of a parameter that is no DTensor: all of it, as every rank holds it."""
    if isinstance(param, DTensor):
        return shard_of(name, param, managed)
    if is_cut(param):
        from .deepspeed.parts import part_of  # imports deepspeed, which takes seconds

        return part_of(name, param)
    refuse_unknown({name: param}, PARAMETERS, "an optimizer's parameter")
    return Shard(ParameterBox.whole(param.shape), coordinator.rank, coordinator.world_size)


def shard_of(name: str, param: DTensor, managed: fsdp.Managed | None) -> Shard:
    """What this rank holds of `param`; `managed` is FSDP2's record of it, if there is one.

    FSDP2 cuts last, although its placement comes first. Where tensor parallelism cuts a fused weight along the same
    dimension, the placements alone do not say what FSDP2 all-gathers; its record does.

    Raises:
        UnsupportedError: a placement is a partial sum, whose values no rank holds.
    """
    copy, copies = 0, 1
    for placement, size, coordinate in _placed(name, param):
        if isinstance(placement, Replicate):
            copy, copies = copy * size + coordinate, copies * size
    is_repeated = int(param.device_mesh.mesh.min()) != 0
    return Shard(ParameterBox.of_cuts(param.shape, cuts_of(name, param, managed)), copy, copies, is_repeated)


def cuts_of(name: str, param: DTensor, managed: fsdp.Managed | None) -> list[Cut]:
    """The cuts that leave what this rank holds of `param`, in their order; arguments and errors as of `shard_of`."""
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
