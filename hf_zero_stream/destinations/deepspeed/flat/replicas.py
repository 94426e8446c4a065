"""Whole parameters on every rank, where ZeRO stages 1 and 2 want them, so that their engine copies none of them.

Trainable parameters become views of one flat buffer, in the order and with the padding in which DeepSpeed flattens the
usual optimizer: one group of all trainable parameters in the model's order. ``deepspeed.initialize`` then takes the
buffer as it is (see ``flatten_hook.py``); for an optimizer with other groups it has to copy (see ``layout.py``).

Each parameter has a storage of its own over its part, so that saving, pickling and sharing it concern that part alone.
But the buffer is freed only as a whole: parameters that DeepSpeed copies one by one have memory of their own, as in
stock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ....accelerators import free_bytes, is_accelerator, on_device
from ....checkpoint.lazy import LazyTensor
from ....ranks.coordinator import Coordinator
from ...replicated import Replicated
from .. import zero3
from .flatten_hook import buffer_group, watch


_FP32_NAMES = ("fp32", "float32", "float", "torch.float32")


class FlatReplicas(Replicated):
    """Stages 0 to 2, whose engines move all parameters to the device: there at once, if it has room for them.

    Under stages 1 and 2 they lie as DeepSpeed will flatten them.
    """

    def __init__(self, ds_config: Mapping[str, Any], coordinator: Coordinator, chunk_bytes: int) -> None:
        super().__init__(coordinator, chunk_bytes, zero3.local_device())
        self._ds_config = ds_config

    def _storage(self, model: nn.Module, tied: set[str]) -> Mapping[int, Tensor]:
        named = model.named_parameters()
        lazy = [param for name, param in named if isinstance(param, LazyTensor) and name not in tied]
        if is_accelerator(self.device):
            needed = sum(param.nbytes for param in lazy) + self._chunk_bytes
            if free_bytes(self.device) < needed:
                return {}  # in host memory, as in stock: moving parameters to the device gives each memory of its own
        self._parameters_on = self.device
        return allocate_flat(lazy, self._ds_config, self._coordinator.world_size, self._parameters_on)


def allocate_flat(
    params: Iterable[Tensor], ds_config: Mapping[str, Any], world_size: int, device: torch.device | str
) -> dict[int, Tensor]:
    """Uninitialised memory in one flat buffer for those of `params` that train; none where DeepSpeed would copy them.

    `params` are in the order of ``model.parameters()``, a tied one once, and may be without memory. Optimizer states
    will be partitioned over `world_size` ranks, and the engine wants parameters on `device`. Returns contiguous
    tensors, by the ``id`` of the parameter, which keep the buffer from being freed.
    """
    trained = [param for param in params if param.requires_grad and param.numel()]
    if separate_reason(ds_config, [param.dtype for param in trained]):
        return {}
    group, layout = buffer_group(trained, world_size, ds_config["zero_optimization"])
    buffer = torch.empty(layout.numel, dtype=trained[0].dtype, device=device)
    watch(buffer, layout)
    # Each a storage of its own over its part, which cannot be resized.
    with on_device(buffer.device):  # the one that DLPack exports from
        parts = [torch.from_dlpack(buffer.narrow(0, *place)) for place in layout.places]
    return {id(param): part.view(param.shape) for param, part in zip(group, parts, strict=True)}


def separate_reason(ds_config: Mapping[str, Any], dtypes: Sequence[torch.dtype]) -> str:
    """Why DeepSpeed is going to copy trainable parameters of these dtypes one by one, or an empty string."""
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
