"""What one rank's memory will hold while loading and training a model that DTensor shards, by FSDP2 or without it.

The arithmetic follows torch's FSDP2 (`torch/distributed/fsdp/_fully_shard/_fsdp_param.py`, `_fsdp_collectives.py`):
parameters, their gradients and AdamW's two states are shards of one size, in the parameters' own dtype. What a group
of parameters gathers is in the dtype of its mixed precision. Not counted: activations, reduce-scatter's buffers,
temporary values of the optimizer's step, and that FSDP2 gathers the next group while it still holds the last one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from .memory import HOST, MemoryFootprint


__all__ = ["HeldShard", "sharded_footprint"]

_ADAM_STATES = 2


class HeldShard(NamedTuple):
    """What one rank holds of a parameter: bytes with FSDP2's padding, and the type of the device that they are on."""

    nbytes: int
    place: str
    requires_grad: bool


def sharded_footprint(
    shards: Iterable[HeldShard],
    gathers: Iterable[tuple[str, int]],
    *,
    device: str,
    buffer_bytes: int = 0,
    staging_bytes: int = 0,
) -> MemoryFootprint:
    """Follow one rank's memory from the load to the first step of AdamW.

    Args:
        shards: of all parameters, each once.
        gathers: name and bytes of each group of parameters that FSDP2 gathers together.
        device: the type of the device that trains: "cpu", "cuda", ...
    """
    partitions, trained = Counter[str](), Counter[str]()
    for nbytes, place, requires_grad in shards:
        partitions[place] += nbytes
        trained[place] += nbytes if requires_grad else 0
    buffers = Counter({device: buffer_bytes})
    gradients, states = +trained, Counter({place: _ADAM_STATES * nbytes for place, nbytes in trained.items()})
    loaded = partitions + buffers
    gather_of, gather = max(gathers, key=lambda group: group[1], default=("", 0))
    return MemoryFootprint(
        engine="torch",
        partitions=dict(+partitions),
        buffers=dict(+buffers),
        staging=staging_bytes,
        swap_buffers=0,
        largest_gather=gather,
        largest_gather_of=gather_of,
        master={},
        gradients=dict(gradients),
        reduce_bucket={},
        secondary={},
        optimizer_states=dict(+states),
        load_peak=dict(loaded + Counter({HOST: staging_bytes})),
        start_peak=dict(loaded),
        held=dict(loaded + gradients + states),
    )
