"""Storage for the parameters of a model that ZeRO stage 1 or 2 will train, so that its engine copies none of them.

A loader asks :func:`allocate_flat` for every parameter's final storage before it fills it. Trainable parameters become
views of one flat buffer, in the order and with the padding in which DeepSpeed flattens the usual optimizer: one group
of all trainable parameters in the model's order. ``deepspeed.initialize`` then takes the buffer as it is (see
``flatten_hook.py``); an optimizer with other groups is right as well, but has to copy (see ``relayout.py``).

Each parameter has a storage of its own over its part of the buffer, so that saving, pickling and sharing it concern
that part alone. Two things differ from parameters in memory of their own: the buffer is freed only as a whole, and a
parameter begins at any multiple of its element's size, unless `zero_optimization.parameter_alignment` is set.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..zero3 import is_enabled
from .flatten_hook import buffer_order, watch
from .layout import FlatLayout, own_storage


__all__ = ["FlatParameters", "allocate_flat", "separate_reason"]

_FP32_NAMES = ("fp32", "float32", "float", "torch.float32")
_ENABLED_DTYPES = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class FlatParameters:
    """Uninitialised storage for every parameter. Drop it after loading: it would keep the buffer from being freed."""

    tensors: dict[str, Tensor]
    """By name: contiguous, of the wanted shape and dtype, without gradient; make parameters of them, or fill them."""

    buffer: Tensor | None
    """The flat buffer, of ``layout.numel`` elements (a multiple of 2 * world size); None if there is none."""

    names: tuple[str, ...]
    """The parameters in the buffer, in its order; the i-th lies at ``layout.places[i]``."""

    layout: FlatLayout | None
    """Where they lie in it; what no parameter covers is padding, which the engine zeroes."""

    reason: str
    """Why every parameter got a storage of its own, or an empty string."""


def allocate_flat(
    parameters: Iterable[tuple[str, Sequence[int], torch.dtype, bool]],
    ds_config: Mapping[str, Any],
    world_size: int,
    device: torch.device | str,
) -> FlatParameters:
    """Allocate storage for a model's parameters, the trainable ones in one flat buffer where DeepSpeed allows.

    Args:
        parameters: (name, shape, dtype, requires_grad) of each distinct parameter, in the order of
            ``model.parameters()``; a tied parameter once.
        ds_config: the DeepSpeed config; `stage`, `round_robin_gradients` and `parameter_alignment` are looked at.
        world_size: ranks over which optimizer states will be partitioned; without model parallelism all ranks.
        device: the device on which the engine will want the parameters, ``zero3.local_device()``.

    Example:
        >>> described = [(name, p.shape, p.dtype, p.requires_grad) for name, p in model.named_parameters()]
        >>> flat = allocate_flat(described, ds_config, dist.get_world_size(), zero3.local_device())
        >>> flat.tensors["lm_head.weight"].shape
        torch.Size([151936, 2048])
    """
    described = [(name, tuple(shape), dtype, trainable) for name, shape, dtype, trainable in parameters]
    in_buffer = [(name, shape, dtype) for name, shape, dtype, trainable in described if trainable and 0 not in shape]
    reason = separate_reason(ds_config, [dtype for _, _, dtype in in_buffer])
    buffer, layout, places = None, None, {}
    names: tuple[str, ...] = ()
    # Parameters that are written later, by other threads or by training, must not be inference tensors.
    with torch.inference_mode(False), torch.no_grad():
        if not reason:
            zero = ds_config["zero_optimization"]
            order = buffer_order(len(in_buffer), world_size, zero.get("round_robin_gradients") is True)
            in_buffer = [in_buffer[index] for index in order]
            dtype = in_buffer[0][2]
            layout = FlatLayout.of_group(
                [prod(shape) for _, shape, _ in in_buffer],
                dtype.itemsize,
                world_size,
                parameter_alignment=zero.get("parameter_alignment") is True,
            )
            buffer = torch.empty(layout.numel, dtype=dtype, device=device)
            names = tuple(name for name, _, _ in in_buffer)
            places = dict(zip(names, layout.places, strict=True))
            watch(buffer, layout)
        tensors = {
            name: own_storage(buffer.narrow(0, *places[name])).view(shape)
            if buffer is not None and name in places
            else torch.empty(shape, dtype=dtype, device=device)
            for name, shape, dtype, _ in described
        }
    return FlatParameters(tensors, buffer, names, layout, reason)


def separate_reason(ds_config: Mapping[str, Any], dtypes: Sequence[torch.dtype]) -> str:
    """Why trainable parameters of these dtypes should not lie in one buffer under this config, or an empty string.

    One buffer is freed only as a whole. So where DeepSpeed is going to copy parameters whatever happens, one by one,
    they had better have storages of their own, as in stock.
    """
    zero = ds_config.get("zero_optimization") or {}
    stage = zero.get("stage", 0)
    if stage not in (1, 2):
        return f"ZeRO stage {stage} does not flatten parameters"
    if not dtypes:
        return "there is no trainable parameter"
    if len(set(dtypes)) > 1:
        return f"trainable parameters are of several dtypes: {', '.join(sorted(map(str, set(dtypes))))}"
    enabled = {dtype for name, dtype in _ENABLED_DTYPES.items() if is_enabled(ds_config, name)}
    if enabled and enabled != set(dtypes):
        return f"DeepSpeed casts parameters of {dtypes[0]} to {', '.join(sorted(map(str, enabled)))}"
    if zero.get("zenflow"):
        return "ZenFlow has a flatten of its own"
    if (ds_config.get("expert_parallel") or {}).get("enabled"):
        return "AutoEP replaces the experts' parameters"
    if (ds_config.get("tensor_parallel") or {}).get("autotp_size", 0) > 1:
        return "AutoTP replaces parameters"
    accumulated_in = (ds_config.get("data_types") or {}).get("grad_accum_dtype")
    offload = (zero.get("offload_optimizer") or {}).get("device", "none")
    if stage == 1 and enabled == {torch.bfloat16} and accumulated_in in _FP32_NAMES and offload == "none":
        return "DeepSpeed's BF16_Optimizer, which it takes for grad_accum_dtype fp32, has a flatten of its own"
    return ""
