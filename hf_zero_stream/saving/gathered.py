"""Saving inside ``deepspeed.zero.GatheredParameters``, where values are in full memory, and often new on rank 0 only.

Where all of the model is gathered, stock's own function can save it on rank 0, which waits for nobody. Where a part of
it is gathered, all ranks must save. Then rank 0 is the last one to come, if any: it has changed the values.
"""

from __future__ import annotations

import time

import torch.distributed as dist
from torch import nn

from ..coordination import Coordinator
from ..errors import SaveError
from ..liveness import default_store
from ..partition.gathered import gathered, not_in_full


__all__ = ["await_others", "is_gathered_whole"]

OTHERS_COME_S = 30.0
"""How long rank 0 waits for the others."""


def is_gathered_whole(model: nn.Module) -> bool:
    """Whether this rank has all values of a ZeRO-3 model, because the caller has gathered them."""
    return bool(gathered(model.parameters())) and not not_in_full(model)


def await_others(model: nn.Module, coordinator: Coordinator) -> None:
    """Have rank 0 not wait for long if it is the only one to save inside a ``GatheredParameters``.

    Raises:
        SaveError: on rank 0; names what is not gathered, so that rank 0 cannot save it alone.
    """
    if coordinator.is_alone or not gathered(model.parameters()):
        return
    # Equal on ranks that are at the same place of their program: it counts the collectives so far.
    group = dist.distributed_c10d._get_default_group()
    number = getattr(group, "_get_sequence_number_for_group", lambda: 0)()
    keys = [f"hf_zero_stream/gathered/{number}/{rank}" for rank in range(coordinator.world_size)]
    store, deadline = default_store(), time.monotonic() + OTHERS_COME_S
    store.set(keys[coordinator.rank], "")
    if not coordinator.is_main:
        return
    while not store.check(keys):
        if time.monotonic() > deadline:
            raise SaveError(_explanation(not_in_full(model)))
        time.sleep(0.005)


def _explanation(missing: list[str]) -> str:
    came = f"Not all ranks came to save within {OTHERS_COME_S:.0f} seconds after rank 0, inside GatheredParameters"
    if not missing:
        return (
            f"{came}. hf_zero_stream.save_pretrained is for all ranks: take it out of `if rank == 0:` and the like. "
            "Or call model.save_pretrained inside streaming(): rank 0 may do so alone, as all the model is gathered."
        )
    return (
        f"{came}, and rank 0 cannot save alone, because {len(missing)} parameters are not gathered: "
        f"{', '.join(missing[:8])}. Gather these too, or save on all ranks, outside of `if rank == 0:` and the like."
    )
