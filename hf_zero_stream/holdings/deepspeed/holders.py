"""What a rank holds of a model that DeepSpeed partitions, or trains in fp32: two holders."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import is_zero_param
from torch import nn

from ...errors import UnsupportedError
from ..fsdp import shard_of
from ..holding import Holding, cut_shard_of, open_flat
from ..introspection import is_cut, lies_in_files
from ..slots import VALUES, holding_of
from . import partitions
from .masters import masters_of


logger = logging.getLogger(__name__)


def held_partitions(
    model: nn.Module, params: Mapping[str, nn.Parameter], *, masters: bool, rank: int, world_size: int
) -> dict[str, Holding]:
    """A :class:`..holding.Holder`: partitions, or values that a ``GatheredParameters`` holds or code has changed."""
    in_context = set(map(id, partitions.select_gathered(params.values())))
    undone = []

    def holding(name: str, param: Any) -> Holding:
        part = shard_of(name, param, None, rank, world_size)
        box, (start, stop) = part.box, part.share
        if id(param) in in_context:
            values = partial(open_flat, param)
            return Holding(box, param.dtype, start, stop, values, is_whole=True, is_gathered=True)
        # Perhaps on some ranks only: each gives at least the elements of its partition.
        if partitions.differs_from_partition(param):
            if _is_trained_apart(param):
                undone.append(name)
            return Holding(box, param.dtype, start, stop, partial(open_flat, param), is_whole=True)
        is_swapped = param.ds_tensor.final_location == "nvme"
        # Files that change are an error of the next step.
        digests = vars(param).setdefault("_hf_zero_stream_digests", {}) if lies_in_files(param) else None
        opened = partial(partitions.open_partition, param)
        return Holding(box, param.dtype, start, stop, opened, is_swapped=is_swapped, digests=digests)

    found = {name: holding(name, param) for name, param in params.items() if is_zero_param(param)}
    if undone:
        logger.warning(
            f"{', '.join(undone[:8])}: code has changed {len(undone)} parameter(s) in place, outside of "
            "GatheredParameters. They are saved as they are, but the optimizer has the old values, which the next "
            "step and a resume go on with."
        )
    return found


def _is_trained_apart(param: Any) -> bool:
    """Whether the engine trains an fp32 partition in place of this ZeRO-3 parameter: not if it began frozen."""
    optimizer = getattr(param, "_z3_optimizer", None)  # all parameters of the model have it
    return optimizer is not None and optimizer.get_param_id(param) in optimizer.grad_position


def held_by_optimizers(
    model: nn.Module, params: Mapping[str, nn.Parameter], *, masters: bool, rank: int, world_size: int
) -> dict[str, Holding]:
    """A :class:`..holding.Holder`: what engines train in place of parameters in 16 bit; nothing without `masters`."""
    if not masters:
        return {}
    in_context = set(map(id, partitions.select_gathered(params.values())))
    trained = masters_of(params, rank, world_size)
    found: dict[str, Holding] = {}
    for name, param in params.items():
        if param.dtype == torch.float32:
            continue
        if name in trained:
            _refuse_differing(name, param, is_in_context=id(param) in in_context)
            found[name] = holding_of(*trained[name][0], VALUES)
        elif trained and is_cut(param) and param.requires_grad and not param.numel():
            nothing = torch.empty(0, dtype=torch.float32)  # no optimizer trains what has no elements
            found[name] = Holding(cut_shard_of(name, param).box, nothing.dtype, 0, 0, partial(nullcontext, nothing))
    return found


def _refuse_differing(name: str, param: Any, *, is_in_context: bool) -> None:
    """Raise an UnsupportedError if the masters of a ZeRO-3 parameter may be others than its values."""
    if is_in_context:
        raise UnsupportedError(
            f"dtype=torch.float32 inside GatheredParameters: the values of {name} are gathered in {param.dtype}, and "
            "the fp32 values that the optimizer trains may be others. Save after the context, or without dtype."
        )
    if partitions.differs_from_partition(param):
        raise UnsupportedError(
            f"dtype=torch.float32: code has changed {name} in place, outside of GatheredParameters, and the fp32 "
            "values that the optimizer trains are still the old ones. Change it inside a GatheredParameters, with "
            "deepspeed.utils.safe_set_full_fp32_param too, or save without dtype."
        )
