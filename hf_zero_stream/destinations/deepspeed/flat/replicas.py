"""Whole parameters on every rank, where ZeRO stages 1 and 2 want them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ....checkpoint.lazy import LazyTensor
from ....ranks.coordinator import Coordinator
from ...replicated import Replicated
from .. import zero3
from .allocate import allocate_flat


__all__ = ["FlatReplicas"]


class FlatReplicas(Replicated):
    """ZeRO stages 0 to 2. Under stages 1 and 2, parameters lie as DeepSpeed is going to flatten them on their device.

    Args:
        ds_config: the DeepSpeed config; empty if there is none.
        coordinator: the ranks that load together.
        chunk_bytes: bound of the buffers through which ranks exchange what they read.
        on_device: put parameters on the device that this rank trains on, instead of into host memory.
    """

    def __init__(
        self, ds_config: Mapping[str, Any], coordinator: Coordinator, chunk_bytes: int, *, on_device: bool = False
    ) -> None:
        super().__init__(coordinator, chunk_bytes, zero3.local_device(), on_device=on_device)
        self._ds_config = ds_config

    def _storage(self, model: nn.Module, tied: set[str]) -> Mapping[int, torch.Tensor]:
        is_flattened = self._ds_config.get("zero_optimization", {}).get("stage") in (1, 2)
        if not is_flattened or self._parameters_on.type != self.device.type:
            return {}  # moving parameters to the device gives each memory of its own
        named = model.named_parameters()
        lazy = {name: param for name, param in named if isinstance(param, LazyTensor) and name not in tied}
        flat = allocate_flat(
            [(name, param.shape, param.dtype, param.requires_grad) for name, param in lazy.items()],
            self._ds_config,
            self._coordinator.world_size,
            self._parameters_on,
        )
        return {id(param): flat.tensors[name] for name, param in lazy.items()}
