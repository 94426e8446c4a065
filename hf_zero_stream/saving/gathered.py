"""Saving inside ``deepspeed.zero.GatheredParameters``, where values are in full memory, and often new on rank 0 only.

Where all of the model is gathered, stock's own function can save it on rank 0, which waits for nobody. Where a part of
it is gathered, all ranks must save. Then rank 0 is the last one to come, if any: it has changed the values.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from ..destinations.deepspeed.gathered import gathered, not_in_full
from ..ranks.coordinator import Coordinator
from ..ranks.rendezvous import SAVE, Occasion


__all__ = ["is_gathered_whole", "occasion_to_save"]

ARRIVAL_S = 600.0
"""How long the first rank waits for the last one to begin a save."""

OTHERS_COME_S = 30.0
"""How long rank 0 waits for the others inside a ``GatheredParameters``."""


def is_gathered_whole(model: nn.Module) -> bool:
    """Whether this rank has all values of a ZeRO-3 model, because the caller has gathered them."""
    return bool(gathered(model.parameters())) and not not_in_full(model)


def occasion_to_save(model: nn.Module, coordinator: Coordinator) -> Occasion:
    """How ranks come together to save `model`: rank 0 does not wait for long inside a ``GatheredParameters``."""
    if coordinator.is_alone or not coordinator.is_main or not gathered(model.parameters()):
        return replace(SAVE, patience_s=ARRIVAL_S)
    missing = not_in_full(model)
    if missing:
        advice = (
            f"Inside GatheredParameters rank 0 cannot save alone, because {len(missing)} parameters are not gathered: "
            f"{', '.join(missing[:8])}. Gather these too, or save on all ranks, outside of `if rank == 0:` and the "
            "like."
        )
    else:
        advice = (
            "Inside GatheredParameters, hf_zero_stream.save_pretrained is for all ranks: take it out of "
            "`if rank == 0:` and the like. Or call model.save_pretrained inside streaming(): rank 0 may do so alone, "
            "as all the model is gathered."
        )
    return replace(SAVE, patience_s=OTHERS_COME_S, advice=advice)
