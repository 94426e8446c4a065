"""A model in use of which every rank has all, and in which DeepSpeed has no part."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from ..errors import LoadError
from ..ranks.coordinator import Coordinator, collective_device
from .base import Batch, Destination, flat_items
from .live_sources import live_sources
from .replicated import exchange_batches


class LiveWhole(Destination):
    """The memory of the model's parameters and buffers; ranks share the reading, and exchange what they have read."""

    into = "the memory of a model in use"

    exchange_settings = ("staging_bytes",)

    def __init__(self, model: nn.Module, coordinator: Coordinator, chunk_bytes: int) -> None:
        self._model = model
        self._coordinator = coordinator
        self._chunk_bytes = chunk_bytes
        self.device = torch.device("cpu") if coordinator.is_alone else collective_device()

    def batches(
        self, model: nn.Module, missing: set[str], tied: set[str], *, only_planned: bool = False
    ) -> list[Batch]:
        """Those that fill the live model; the lazy `model` says what with, and stays as it is."""
        parameters, buffers, repeated = live_sources(self._model, model, missing)
        if repeated:
            refuse_repeated(repeated)
        exchanged = exchange_batches(parameters, self._coordinator, self._chunk_bytes, self.device)
        return [Batch(flat_items(buffers)), *exchanged]


def refuse_repeated(names: Iterable[str]) -> None:
    """Raise, because the checkpoint has values of their own for parameters that the live model has tied to others."""
    raise LoadError(
        f"load_into: the checkpoint has values for {', '.join(names)} too, which the model has tied to "
        "parameters of other names. Save the checkpoint without them."
    )
