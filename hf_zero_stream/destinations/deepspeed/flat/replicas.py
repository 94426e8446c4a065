"""Whole parameters on every rank, where ZeRO stages 1 and 2 want them, so that their engine copies none of them.

Trainable parameters become views of one flat buffer, in the order and with the padding in which DeepSpeed flattens the
usual optimizer: one group of all trainable parameters in the model's order. ``deepspeed.initialize`` then takes the
buffer as it is (see ``flatten_hook.py``); an optimizer with other groups is right as well, but has to copy (see
``relayout.py``).

Each parameter has a storage of its own over its part, so that saving, pickling and sharing it concern that part alone.
But the buffer is freed only as a whole, and a parameter begins at any multiple of its element's size, unless
`zero_optimization.parameter_alignment` is set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ....checkpoint.lazy import LazyTensor
from ....ranks.coordinator import Coordinator
from ...replicated import Replicated
from .. import zero3
from .flatten_hook import in_buffer_order, watch


__all__ = ["FlatReplicas", "allocate_flat", "separate_reason"]

_FP32_NAMES = ("fp32", "float32", "float", "torch.float32")


class FlatReplicas(Replicated):
    """ZeRO stages 0 to 2. Under stages 1 and 2, parameters lie as DeepSpeed is going to flatten them on their device.

    For the arguments see :class:`...replicated.Replicated`; `ds_config` is empty if there is none.
    """

    def __init__(
        self, ds_config: Mapping[str, Any], coordinator: Coordinator, chunk_bytes: int, *, on_device: bool = False
    ) -> None:
        super().__init__(coordinator, chunk_bytes, zero3.local_device(), on_device=on_device)
        self._ds_config = ds_config

    def _storage(self, model: nn.Module, tied: set[str]) -> Mapping[int, Tensor]:
        is_flattened = self._ds_config.get("zero_optimization", {}).get("stage") in (1, 2)
        if not is_flattened or self._parameters_on.type != self.device.type:
            return {}  # moving parameters to the device gives each memory of its own
        named = model.named_parameters()
        lazy = {name: param for name, param in named if isinstance(param, LazyTensor) and name not in tied}
        flat = allocate_flat(lazy, self._ds_config, self._coordinator.world_size, self._parameters_on)
        return {id(param): flat[name] for name, param in lazy.items()}


def allocate_flat(
    parameters: Mapping[str, Tensor], ds_config: Mapping[str, Any], world_size: int, device: torch.device | str
) -> dict[str, Tensor]:
    """Uninitialised storage for a model's parameters, the trainable ones in one flat buffer where DeepSpeed allows.

    Args:
        parameters: shape, dtype and requires_grad of each, in the order of ``model.parameters()``; a tied one once.
        world_size: ranks over which optimizer states will be partitioned; without model parallelism all ranks.
        device: the device on which the engine will want the parameters, ``zero3.local_device()``.

    Returns:
        Contiguous tensors, by name. They keep the buffer from being freed.
    """
    trained = {id(param): name for name, param in parameters.items() if param.requires_grad and param.numel()}
    if separate_reason(ds_config, [parameters[name].dtype for name in trained.values()]):
        trained = {}
    tensors: dict[str, Tensor] = {}
    # Parameters that are written later, by other threads or by training, must not be inference tensors.
    with torch.inference_mode(False), torch.no_grad():
        if trained:
            group = [parameters[name] for name in trained.values()]
            group, layout = in_buffer_order(group, world_size, ds_config["zero_optimization"])
            buffer = torch.empty(layout.numel, dtype=group[0].dtype, device=device)
            watch(buffer, layout)
            for param, place in zip(group, layout.places, strict=True):
                # A storage of its own over this part, which cannot be resized.
                tensors[trained[id(param)]] = torch.from_dlpack(buffer.narrow(0, *place)).view(param.shape)
        for name, param in parameters.items():
            if name not in tensors:
                tensors[name] = torch.empty(param.shape, dtype=param.dtype, device=device)
    return tensors


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
    enabled = set(zero3.enabled_dtypes(ds_config))
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
