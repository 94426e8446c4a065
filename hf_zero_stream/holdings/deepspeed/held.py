"""Holders for DeepSpeed's memory: partitions of ZeRO-3, and the tensors that optimizers train in their place."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import is_zero_param
from deepspeed.utils import safe_get_local_fp32_param
from torch import nn

from ...errors import UnsupportedError
from ..holding import Holding, open_flat
from . import partitions
from .autotp_shards import is_empty_shard, trained_box
from .masters import Master, masters_of
from .partitions import differs_from_partition, select_gathered


logger = logging.getLogger(__name__)


def held_partitions(
    model: nn.Module, params: Mapping[str, nn.Parameter], *, masters: bool, rank: int, world_size: int
) -> dict[str, Holding]:
    """Partitions, or the full values of parameters that a ``GatheredParameters`` holds or code has changed."""
    in_context = set(map(id, select_gathered(params.values())))
    undone = []

    def holding(name: str, param: Any) -> Holding:
        box, (_, start, stop) = partitions.box_of(param), partitions.own_range(param)
        if id(param) in in_context:
            values = partial(open_flat, param)
            return Holding(box, param.dtype, start, stop, values, is_whole=True, is_gathered=True)
        # Perhaps on some ranks only: each gives at least the elements of its partition.
        if differs_from_partition(param):
            if is_trained_apart(param):
                undone.append(name)
            return Holding(box, param.dtype, start, stop, partial(open_flat, param), is_whole=True)
        is_swapped = param.ds_tensor.final_location == "nvme"
        return Holding(box, param.dtype, start, stop, partial(partitions.open_partition, param), is_swapped=is_swapped)

    found = {name: holding(name, param) for name, param in params.items() if is_zero_param(param)}
    if undone:
        logger.warning(
            f"{', '.join(undone[:8])}: code has changed {len(undone)} parameter(s) in place, outside of "
            "GatheredParameters. They are saved as they are, but the optimizer has the old values, which the next "
            "step and a resume go on with."
        )
    return found


def held_by_optimizers(
    model: nn.Module, params: Mapping[str, nn.Parameter], *, masters: bool, rank: int, world_size: int
) -> dict[str, Holding]:
    """Return the tensors that optimizers train in place of parameters; nothing without `masters`."""
    if not masters:
        return {}
    in_context = set(map(id, select_gathered(params.values())))
    replaced = masters_of(param for param in params.values() if not is_zero_param(param))
    found: dict[str, Holding] = {}
    for name, param in params.items():
        if param.dtype == torch.float32:
            continue
        is_left_out = bool(replaced) and is_empty_shard(param)  # no optimizer trains what has no elements
        if id(param) in replaced or is_left_out:
            found[name] = _holding_of_masters(name, param, replaced.get(id(param), []), rank, world_size)
        elif is_zero_param(param) and is_trained_apart(param):
            if id(param) in in_context:
                raise UnsupportedError(
                    f"dtype=torch.float32 inside GatheredParameters: the values of {name} are gathered in "
                    f"{param.dtype}, and the fp32 values that the optimizer trains may be others. Save after the "
                    "context, or without dtype."
                )
            if differs_from_partition(param):
                raise UnsupportedError(
                    f"dtype=torch.float32: code has changed {name} in place, outside of GatheredParameters, and "
                    "the fp32 values that the optimizer trains are still the old ones. Change it inside a "
                    "GatheredParameters, with deepspeed.utils.safe_set_full_fp32_param too, or save without dtype."
                )
            _, start, stop = partitions.own_range(param)
            values = partial(_open_master_partition, param)
            found[name] = Holding(partitions.box_of(param), torch.float32, start, stop, values, is_swapped=True)
    return found


def _holding_of_masters(
    name: str, param: torch.Tensor, masters: Sequence[Master], rank: int, world_size: int
) -> Holding:
    nothing = Master(torch.empty(0, dtype=torch.float32), 0, 0, is_whole=False)  # all of it is trained by other ranks
    values, start, stop, is_whole = masters[0] if masters else nothing
    box, share = trained_box(name, param, rank, world_size)
    if is_whole:
        start, stop = share
    return Holding(box, values.dtype, start, stop, lambda: nullcontext(values), is_whole=is_whole)


@contextmanager
def _open_master_partition(param: Any) -> Iterator[torch.Tensor]:
    _, start, stop = partitions.own_range(param)
    requires_grad = param.requires_grad
    param.requires_grad = True  # DeepSpeed gives nothing for a parameter that was frozen since
    try:
        values = safe_get_local_fp32_param(param)
    finally:
        param.requires_grad = requires_grad
    yield values.detach().view(-1)[: stop - start]


def is_trained_apart(param: Any) -> bool:
    """Whether the engine trains an fp32 partition in place of this ZeRO-3 parameter: not if it began frozen."""
    optimizer = getattr(param, "_z3_optimizer", None)  # all parameters of the model have it
    return optimizer is not None and optimizer.get_param_id(param) in optimizer.grad_position
