"""Partitions of a model that is in use: where they are, and what must follow when they are written to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus, is_zero_param
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from ...errors import UnsupportedError
from ...versions import refuse_unknown_version
from .masters import ZENFLOW


__all__ = ["is_trained_apart", "is_zero_param", "master_partition", "shape_of", "step_back"]

_RELIED_ON = ("_get_fp32_opt_state_partition", "_swappable_optimizer_subgroup", "get_param_id")
_missing = [name for name in _RELIED_ON if not hasattr(DeepSpeedZeroOptimizer_Stage3, name)]
refuse_unknown_version("deepspeed", [f"DeepSpeedZeroOptimizer_Stage3.{name}" for name in _missing])


def shape_of(param: Any) -> torch.Size:
    """The full shape of a parameter, partitioned or not."""
    return torch.Size(param.ds_shape) if is_zero_param(param) else param.shape


def step_back(params: Iterable[Any]) -> None:
    """Free full values that are in memory now (small parameters that the engine keeps gathered, hpZ's copies).

    They would be old once the partitions are new. DeepSpeed gathers them again when a module needs them.
    """
    for param in params:
        if param.ds_status == ZeroParamStatus.AVAILABLE:
            param.partition()
        param.ds_secondary_tensor = None


def is_trained_apart(param: Any) -> bool:
    """Whether the engine trains an fp32 partition in place of this ZeRO-3 parameter: not if it began frozen."""
    optimizer = getattr(param, "_z3_optimizer", None)  # all parameters of the model have it
    return optimizer is not None and optimizer.get_param_id(param) in optimizer.grad_position


def master_partition(param: Any) -> torch.Tensor | None:
    """The fp32 partition that an initialised engine trains for `param` (a view), or None if there is none.

    A parameter that was frozen after the engine was initialised has one too: each step copies it back.

    Raises:
        UnsupportedError: it lies in a swap file, or the engine keeps copies of it that cannot be reached.
    """
    if not is_trained_apart(param):
        return None
    optimizer = param._z3_optimizer
    if getattr(optimizer, "zenflow", False):
        raise UnsupportedError(ZENFLOW)
    group, _, _ = optimizer.grad_position[optimizer.get_param_id(param)]
    if optimizer._swappable_optimizer_subgroup(group):
        raise UnsupportedError(
            "The fp32 partitions lie on NVMe (offload_optimizer.device: nvme), and cannot be loaded into while the "
            "engine is in use. Load before deepspeed.initialize, or use DeepSpeed's own checkpoints."
        )
    master, _ = optimizer._get_fp32_opt_state_partition(param, release_swap_buffers=False)
    return master
