"""Parameters that every rank has in full: each rank reads 1/N of each, and they exchange what they read.

From disk that is 1/N of what plain loading reads on every rank; over the interconnect, which is faster, the rest.
"""

from __future__ import annotations

import torch
from torch import nn

from ..checkpoint.lazy import LazyTensor
from ..ranks.coordinator import Coordinator
from ..settings.config import StreamingConfig
from .base import Batch, Destination, allocating, flat_items, host_buffer, replace_lazy
from .exchange import replica_batches


_HOST = torch.device("cpu")


def chunk_bytes(config: StreamingConfig, device: torch.device) -> int:
    """Bytes of one exchange, of all ranks together: four times the staging on a device, because each has a meeting."""
    return config.staging_on(device.type) * (1 if device.type == "cpu" else 4)


class Replicated(Destination):
    """Plain data parallelism: every rank has all of every parameter, in host memory, as in stock.

    Args:
        config: bounds the buffers of all ranks together, through which they exchange what they read.
        device: on which this rank will train, and where these buffers are if collectives want them there.
    """

    into = "whole models that ranks read for each other"
    stock_reader = "each rank"

    exchange_settings = ("staging_bytes",)

    def __init__(self, coordinator: Coordinator, config: StreamingConfig, device: torch.device = _HOST) -> None:
        self.device = device
        self._coordinator = coordinator
        self._chunk_bytes = chunk_bytes(config, device)
        self._parameters_on = _HOST

    def batches(
        self, model: nn.Module, missing: set[str], tied: set[str], *, only_planned: bool = False
    ) -> list[Batch]:
        def parameter(name: str, param: torch.Tensor) -> nn.Parameter | None:
            if not isinstance(param, LazyTensor):
                return None
            on = torch.device("meta") if only_planned else self._parameters_on
            with allocating(name, param.nbytes, "the host", self._coordinator.rank):
                values = torch.empty(param.shape, dtype=param.dtype, device=on)
            return nn.Parameter(values, requires_grad=param.requires_grad)

        parameters, buffers, _ = replace_lazy(model, missing, tied, parameter=parameter, buffer=host_buffer)
        exchanged = replica_batches(parameters, self._coordinator, self._chunk_bytes, only_planned=only_planned)
        return [Batch(flat_items(buffers)), *exchanged]
