"""Whether the parameters of a model, and the other ranks, are there, for a save or for whatever else sends values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import PreTrainedModel

from ..destinations.base import fill_whole
from ..errors import UnsupportedError
from ..holdings.holder import refuse_unknown_shards, refuse_unreadable
from ..holdings.introspection import has_gathered, lacks_values
from ..holdings.own_names import modules
from ..ranks.coordinator import Coordinator
from ..ranks.rendezvous import SAVE, MeetingKind


ARRIVAL_S = 600.0  # how long the first rank waits for the last one to begin a save
OTHERS_COME_S = 30.0  # how long rank 0 waits for the others inside a ``GatheredParameters``


def make_ready(model: Any, inner: torch.nn.Module, doing: str, instead: str) -> None:
    """Have all parameters of `inner` be there to be read; raises if those of `model`, around it, cannot be.

    The error is ``{doing}: ... {instead}``.
    """
    refuse_unknown_shards(model, doing)
    fill_whole(inner)
    if isinstance(model, torch.nn.Module):
        _refuse_fsdp1(model, doing, instead)
    refuse_unreadable(inner, doing, instead)
    if isinstance(inner, PreTrainedModel):
        _refuse_without_dtype(inner, doing, instead)


def _refuse_without_dtype(model: PreTrainedModel, doing: str, instead: str) -> None:
    """Raise an UnsupportedError (``{doing}: ... {instead}``) if transformers cannot tell the dtype that it writes."""
    try:
        _ = model.dtype
    except StopIteration:  # no error that anybody should get to see
        dtypes = sorted({str(param.dtype) for param in model.parameters()})
        raise UnsupportedError(
            f"{doing}: expected a floating-point parameter, whose dtype transformers takes for the model's; found "
            f"{', '.join(dtypes) or 'no parameters'} alone. DeepSpeed's stages 1 and 2 make all parameters complex "
            f"that they flatten with a complex one: keep that as real numbers (torch.view_as_real). {instead}"
        ) from None


def _refuse_fsdp1(model: torch.nn.Module, doing: str, instead: str) -> None:
    """Raise if FSDP1 shards any of `model`, whose parameters then are flat pieces that look like whole ones."""
    if any(isinstance(module, FullyShardedDataParallel) for module in modules(model)):
        raise UnsupportedError(
            f"{doing}: expected parameters that are DTensors, ZeRO partitions or whole; FSDP1 "
            "(FullyShardedDataParallel) keeps flat pieces in their place. Use FSDP2 (fully_shard; accelerate: "
            f"fsdp_version 2). {instead}"
        )


def kind_of_save(model: PreTrainedModel, coordinator: Coordinator, *, to_url: bool = False) -> MeetingKind:
    """How ranks come together to save `model`.

    Rank 0 waits briefly where it is often alone: in a ``GatheredParameters``, and with a model that it has whole.
    """
    if to_url and not lacks_values(model):
        advice = "All ranks save to a URL together, also a model that each has whole: take it out of `if rank == 0:`."
        return replace(SAVE, patience_s=OTHERS_COME_S, advice=advice)
    if coordinator.is_alone or not coordinator.is_main or not has_gathered(model):
        return replace(SAVE, patience_s=ARRIVAL_S)
    from ..holdings.deepspeed.partitions import partitioned_names  # imports deepspeed, which takes seconds

    missing = partitioned_names(model)
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
