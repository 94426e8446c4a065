"""Whole parameters for the engines of stages 0 to 2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ...accelerators import free_bytes, is_accelerator
from ...checkpoint.lazy import LazyTensor
from ...holdings.deepspeed import partitions
from ...ranks.coordinator import Coordinator
from ...registry import has_tool, tool
from ...settings.config import StreamingConfig
from ..base import Batch
from ..replicated import Replicated


class EngineReplicas(Replicated):
    """Stages 0 to 2, whose engines move all parameters to the device: there at once, if it has room for them."""

    def __init__(self, ds_config: Mapping[str, Any], coordinator: Coordinator, config: StreamingConfig) -> None:
        super().__init__(coordinator, config, partitions.local_device())
        self._stage = (ds_config.get("zero_optimization") or {}).get("stage", 0)

    def batches(
        self, model: nn.Module, missing: set[str], tied: set[str], *, only_planned: bool = False
    ) -> list[Batch]:
        if is_accelerator(self.device):
            needed = sum(param.nbytes for param in model.parameters() if isinstance(param, LazyTensor))
            if free_bytes(self.device) >= needed + self._chunk_bytes:
                self._parameters_on = self.device
        will_be_flattened(model, self._stage)
        return super().batches(model, missing, tied, only_planned=only_planned)


def will_be_flattened(model: nn.Module, stage: int) -> None:
    """Tell the plug-in that spares engines a second copy, if it is there, that one of this ZeRO stage gets `model`."""
    if stage in (1, 2) and has_tool("flat"):
        tool("flat", "flat")(model)
