"""A model in use: its memory, and which tensors of a checkpoint are for it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ..accelerators import collective_device
from ..errors import LoadError
from ..holdings.marks import is_sharded, whole_shape
from ..holdings.own_names import named_buffers, named_parameters
from ..ranks.coordinator import Coordinator
from ..settings.config import StreamingConfig
from .base import Batch, Destination, Sourced, flat_items, source_of
from .replicated import chunk_bytes, exchange_batches


def memory_of(
    model: nn.Module, coordinator: Coordinator, config: StreamingConfig, *, with_masters: bool = True
) -> Destination:
    """Where the values of `model` are: in shards, in ZeRO's partitions, or whole on every rank.

    Without masters, what ZeRO-3 trains in place of parameters keeps its values. Raises a LoadError if there is none.
    """
    if is_sharded(model):
        from .live_shards import LiveShards  # imports torch's FSDP2

        return LiveShards(model, coordinator)
    if without_memory := [name for name, param in model.named_parameters() if param.is_meta]:
        raise LoadError(
            f"load_into: the model's {without_memory[0]} is on the meta device, without memory. Call "
            "model.to_empty(device=...) first."
        )
    if "deepspeed" not in sys.modules:
        return LiveWhole(model, coordinator, config)
    from .deepspeed.live import LiveModel  # imports deepspeed, which takes seconds

    return LiveModel(model, coordinator, config, with_masters=with_masters)


class LiveWhole(Destination):
    """The memory of the model's parameters and buffers; ranks share the reading, and exchange what they have read."""

    into = "the memory of a model in use"

    exchange_settings: Sequence[str] = ("staging_bytes",)

    def __init__(self, model: nn.Module, coordinator: Coordinator, config: StreamingConfig) -> None:
        self._model = model
        self._coordinator = coordinator
        self.device = torch.device("cpu") if coordinator.is_alone else collective_device()
        self._chunk_bytes = chunk_bytes(config, self.device)

    def batches(
        self, model: nn.Module, missing: set[str], tied: set[str], *, only_planned: bool = False
    ) -> list[Batch]:
        """Those that fill the live model; the lazy `model` says what with, and stays as it is."""
        parameters, buffers = self._sources(model, missing)
        exchanged = exchange_batches(parameters, self._coordinator, self._chunk_bytes, self.device)
        return [Batch(flat_items(buffers)), *exchanged]

    def _sources(self, model: nn.Module, missing: set[str]) -> tuple[Mapping[str, Sourced], Mapping[str, Sourced]]:
        """Parameters and buffers, as :func:`live_sources`; a LoadError for values of both ends of a tie, too."""
        parameters, buffers, repeated = live_sources(self._model, model, missing)
        if repeated:
            raise LoadError(
                f"load_into: the checkpoint has values for {', '.join(repeated)} too, which the model has tied to "
                "parameters of other names. Save the checkpoint without them."
            )
        return parameters, buffers


class LiveSources(NamedTuple):
    """What to fill, by the checkpoint's names.

    Attributes:
        buffers: flat.
        repeated: other names of `parameters` that the model has tied, and for which the checkpoint has values too.
    """

    parameters: Mapping[str, Sourced]
    buffers: Mapping[str, Sourced]
    repeated: Mapping[str, Sourced]


def live_sources(live_model: nn.Module, lazy_model: nn.Module, missing: set[str]) -> LiveSources:
    """Where the tensors of `live_model` get their values from; `lazy_model` has those of the checkpoint.

    Raises:
        LoadError: a tensor of `live_model` is not there, has another shape or no memory.
    """
    live: dict[str, Any] = dict(named_buffers(live_model, remove_duplicate=False))
    live.update(named_parameters(live_model, remove_duplicate=False))
    parameters: dict[str, Sourced] = {}
    buffers: dict[str, Sourced] = {}
    repeated: dict[str, Sourced] = {}
    seen: set[int] = set()
    for name, lazy in [*lazy_model.named_parameters(), *lazy_model.named_buffers()]:
        view = None if name in missing else source_of(lazy)
        if view is None:
            continue
        found = live.get(name)
        shape = None if found is None else whole_shape(found)
        if found is None or shape != lazy.shape:
            described = "no such tensor" if shape is None else tuple(shape)
            raise LoadError(
                f"load_into: the checkpoint's {name} has shape {tuple(lazy.shape)}, the model {described}. "
                "Load a checkpoint of the same architecture and sizes."
            )
        if found.is_meta:
            raise LoadError(
                f"load_into: the model's {name} is on the meta device, without memory. Call "
                "model.to_empty(device=...) first."
            )
        if not isinstance(found, nn.Parameter):
            buffers[name] = (found.view(-1), view)
        elif id(found) in seen:
            repeated[name] = (found, view)
        else:
            seen.add(id(found))
            parameters[name] = (found, view)
    return LiveSources(parameters, buffers, repeated)
