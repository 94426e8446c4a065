"""How the engines of stages 1 and 2 start without a second copy of a model's parameters.

While its optimizer is constructed, DeepSpeed (``runtime/zero/stage_1_and_2.py``, 0.18.9 and 0.19.8) flattens one group
of parameters after the other: on the device if ``available_memory()`` says that a second copy fits, else through the
host. For a model of ours each of the N ranks copies 1/N of the flat buffer instead, the old parameters are freed, and
ranks gather the buffer from each other. That is right because DeepSpeed has just made parameters equal on all ranks,
and there is room for 1/N, because the fp32 copies of it come next.

The constructor is replaced while such a model lives; for the optimizer of such a model two methods are, while it runs.
Other models, and other optimizers, see no difference.
"""

from __future__ import annotations

import inspect
import logging
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from operator import add
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from ...plugin_api import all_gather, free_bytes, installed, kind, override_methods
from . import FLAT


logger = logging.getLogger(__name__)

_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Models that stage 1 or 2 may come to train."""

_CONSTRUCTOR = inspect.signature(DeepSpeedZeroOptimizer.__init__)


def flatten_sharded(model: nn.Module) -> None:
    """Make the optimizers of stages 1 and 2 that train `model` flatten its parameters in parts, one on each rank."""
    _models.add(model)
    installed(FLAT).while_alive(model)


def construct(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    """Replace the constructor of DeepSpeed's optimizer."""
    arguments = _CONSTRUCTOR.bind(self, *args, **kwargs).arguments
    if type(self) is not DeepSpeedZeroOptimizer or not _can_flatten_sharded(arguments):
        return original(self, *args, **kwargs)
    own = self.flatten_dense_tensors_aligned

    def flatten(tensor_list: Sequence[Tensor], alignment: int, use_cpu_data: bool = False, **kwargs: Any) -> Tensor:
        """Return the same buffer, and free the memory of `tensor_list`."""
        if use_cpu_data:
            return own(tensor_list, alignment, use_cpu_data, **kwargs)
        paddings = kwargs.get("param_padding") or [0] * len(tensor_list)
        return _flatten_sharded(tensor_list, paddings, alignment, self.dp_process_group)

    has_room = override_methods(get_accelerator(), available_memory=lambda *args, **kwargs: sys.maxsize)
    with has_room, override_methods(self, flatten_dense_tensors_aligned=flatten):
        original(self, *args, **kwargs)


def _can_flatten_sharded(arguments: Mapping[str, Any]) -> bool:
    """Whether all ranks can flatten the parameters in parts; all call it if the model is of ours (all ranks).

    If not, rank 0 says why.
    """
    groups = [
        [param for param in group["params"] if param.requires_grad]
        for group in arguments["init_optimizer"].param_groups
    ]
    of_ours = {id(param) for model in _models for param in model.parameters()}
    if not any(id(param) in of_ours for params in groups for param in params):
        return False
    process_group = arguments.get("dp_process_group")
    world_size = dist.get_world_size(process_group)
    device = torch.device(get_accelerator().current_device_name())
    # Experts of DeepSpeed's own are partitioned over other ranks; those of its OptimizedLinear are no replicas.
    if world_size == 1:
        return False
    reasons = {
        "ZenFlow has an optimizer of its own": arguments.get("zenflow_config"),
        "its experts are partitioned over other ranks": arguments.get("has_moe_layers"),
    }
    for number, params in enumerate(groups):
        dtypes = {str(param.dtype) for param in params}
        is_elsewhere = any(param.device != device for param in params)
        is_optimized = any(hasattr(param, "ds_optim_param") for param in params)
        reasons |= {
            f"group {number} has parameters of {' and '.join(sorted(dtypes))}": len(dtypes) != 1,
            f"parameters of group {number} are not on {device}": is_elsewhere,
            f"group {number} has parameters of an OptimizedLinear": is_optimized,
        }
    part_bytes = max(sum(param.nbytes for param in params) for params in groups) // world_size
    reasons["the device has no room for a part of it"] = free_device_bytes() <= part_bytes
    why = next((reason for reason, is_so in reasons.items() if is_so), "")
    everyone = [why] * world_size
    dist.all_gather_object(everyone, why, group=process_group)
    if (why := next(filter(None, everyone), "")) and dist.get_rank() == 0:
        logger.warning(f"The engine starts with DeepSpeed's second copy of the parameters, because {why}.")
    return not why


def free_device_bytes() -> int:
    """Free memory of the device, in bytes, after torch's cache has been emptied."""
    accelerator = get_accelerator()
    accelerator.empty_cache()
    if accelerator.device_name() == kind():
        # DeepSpeed's own figure is the total less this process's share where pynvml is not installed.
        return free_bytes(torch.device(accelerator.device_name()))
    return accelerator.available_memory()


@torch.no_grad()
def _flatten_sharded(params: Sequence[Tensor], paddings: Sequence[int], alignment: int, group: Any) -> Tensor:
    """Lay `params` in a row, with its padding of zeros behind each, up to a multiple of `alignment` (all ranks)."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    *offsets, end = accumulate(map(add, (param.numel() for param in params), paddings), initial=0)
    part = params[0].new_zeros(-(-end // alignment) * alignment // world_size)
    first = rank * len(part)
    for param, offset in zip(params, offsets, strict=True):
        start, stop = max(offset, first), min(offset + param.numel(), first + len(part))
        if start < stop:
            part[start - first : stop - first].copy_(param.reshape(-1)[start - offset : stop - offset])
        param.data = param.new_empty(()).expand(param.shape)  # of one element
    get_accelerator().empty_cache()
    buffer = part.new_empty(len(part) * world_size)
    all_gather(buffer.view(torch.uint8), part.view(torch.uint8), group=group)  # not every backend knows every dtype
    return buffer
