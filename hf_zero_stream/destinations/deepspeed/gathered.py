"""Parameters that a user's ``deepspeed.zero.GatheredParameters`` holds in full at the moment."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from deepspeed.runtime.zero import partition_parameters
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus, is_zero_param
from torch import nn


__all__ = ["gather_again", "gathered", "not_in_full"]

_DEPTH = getattr(partition_parameters, "DS_Z3_GATHERED_PARAM_CONTEXT_DEPTH_ATTR", None)
"""The attribute in which DeepSpeed counts the contexts around a parameter; earlier versions do not."""


def gathered(params: Iterable[Any]) -> list[Any]:
    """Those of `params` that are inside a ``GatheredParameters`` now, and so may have other values than partitions.

    Small parameters that the engine keeps in full between steps are not among them.
    """
    available = [param for param in params if is_zero_param(param) and param.ds_status == ZeroParamStatus.AVAILABLE]
    if _DEPTH is not None:
        return [param for param in available if getattr(param, _DEPTH, 0) > 0]
    # Small ones are in full anyway, and their full values are up to date: all are taken, or none.
    return available if any(not param.ds_persist for param in available) else []


def not_in_full(model: nn.Module) -> list[str]:
    """Names of the parameters whose full values are not here."""
    return [
        name
        for name, param in model.named_parameters()
        if is_zero_param(param) and param.ds_status != ZeroParamStatus.AVAILABLE
    ]


def gather_again(params: Iterable[Any]) -> None:
    """Gather `params`, whose partitions have been written to, for the context that they are in; for all ranks."""
    wanted = list(params)
    if wanted:
        wanted[0].all_gather(param_list=wanted)
