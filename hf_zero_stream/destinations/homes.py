"""Where the parameters of a model live once it is loaded, and in which batches they get there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn

from ..checkpoint.lazy import LazyTensor
from ..checkpoint.nodes import View
from ..engine.reader import Batch, Item
from ..planning.plan import LoadPlan, Target, partition_range
from ..ranks.coordinator import Coordinator
from .deepspeed import nvme, zero3
from .deepspeed.flat.allocate import allocate_flat
from .replicated import Exchange, exchanges


__all__ = [
    "Home",
    "PartitionedHome",
    "ReplicatedHome",
    "Sourced",
    "Sources",
    "exchange_batches",
    "swap_batch",
    "whole",
]

Sourced = tuple[Any, View]
"""A parameter, or a flat buffer, and where its values come from."""

Sources = Mapping[str, Sourced]
"""The same by name."""


class Home(Protocol):
    """What a load asks about the memory that it fills."""

    is_partitioned: bool
    """Whether parameters become ZeRO-3's; if not, transformers makes memory for those that no checkpoint fills."""

    def dtype(self, wanted: torch.dtype | None) -> torch.dtype | None:
        """The dtype of all floating-point parameters if `wanted` was asked for; None if each has its own.

        Asked before :meth:`parameter`. If nothing is `wanted`: None too if it is not decided yet.
        """

    def expect(self, model: nn.Module, tied: set[str]) -> None:
        """Called once with the lazy model, before what follows.

        `tied` are names that will be replaced by the other end of a tie.
        """

    def parameter(self, param: torch.Tensor) -> nn.Parameter | None:
        """What takes the place of a lazy or missing parameter; None leaves it to transformers."""

    def buffer(self, buffer: torch.Tensor) -> torch.Tensor | None:
        """The same for a buffer."""

    def target(self, name: str, param: Any) -> Target:
        """What this rank reads of a parameter."""

    def check(self, plan: LoadPlan) -> None:
        """Raise, before anything is read, if `plan` cannot be carried out here."""

    def batches(self, model: nn.Module, parameters: Sources, buffers: Sources) -> list[Batch]:
        """Make the memory, and say in which batches it is to be filled."""


class PartitionedHome:
    """ZeRO-3: each parameter is partitioned over the ranks, on the device, in host memory or in swap files.

    Args:
        ds_config: the DeepSpeed config; empty for a plan without one.
        coordinator: the ranks that load together.
    """

    is_partitioned = True

    def __init__(self, ds_config: Mapping[str, Any], coordinator: Coordinator) -> None:
        self._ds_config = ds_config
        self._dtype = zero3.partition_dtype(ds_config) if ds_config else None
        self._coordinator = coordinator
        self._device = zero3.local_device()

    def dtype(self, wanted: torch.dtype | None) -> torch.dtype | None:
        """DeepSpeed's, as in stock."""
        self._dtype = self._dtype or wanted
        return self._dtype

    def expect(self, model: nn.Module, tied: set[str]) -> None:
        pass

    def parameter(self, param: torch.Tensor) -> nn.Parameter | None:
        dtype = self._dtype if self._dtype is not None and param.is_floating_point() else param.dtype
        requires_grad = param.requires_grad if isinstance(param, LazyTensor) else param.is_floating_point()
        return zero3.placeholder(param.shape, dtype, self._device, requires_grad)

    def buffer(self, buffer: torch.Tensor) -> torch.Tensor | None:
        if not isinstance(buffer, LazyTensor) and not buffer.is_meta:
            return buffer.to(self._device)
        return torch.empty(buffer.shape, dtype=buffer.dtype, device=self._device)

    def target(self, name: str, param: Any) -> Target:
        rank, world_size = zero3.place_in_group(param, self._coordinator.rank, self._coordinator.world_size)
        return Target(name, param.dtype, *partition_range(param.numel(), rank, world_size))

    def check(self, plan: LoadPlan) -> None:
        nvme.refuse_wrong_settings(self._ds_config, plan.targets)

    def batches(self, model: nn.Module, parameters: Sources, buffers: Sources) -> list[Batch]:
        """Everything at once, but for what passes through buffers on its way to a disk."""
        init = zero3.PartitionedInit(model, self._ds_config)
        items = {id(param): (zero3.partition_target(name, param), view) for name, (param, view) in parameters.items()}
        kept = [param for param, _ in parameters.values() if not init.is_swapped(param)]
        direct = Batch(
            [*(items[id(param)] for param in kept), *whole(buffers)],
            lambda: [*(param.ds_tensor for param in kept), *(buffer for buffer, _ in buffers.values())],
        )
        return [direct, *(swap_batch(wave, items) for wave in init.swap_waves())]


class ReplicatedHome:
    """ZeRO stages 0 to 2 and plain data parallelism: every rank has all of every parameter.

    Each rank reads 1/N of every parameter and gets the rest from the others, chunk by chunk. Under stages 1 and 2,
    parameters that are on the device already are laid out as DeepSpeed is going to flatten them there.

    Args:
        ds_config: the DeepSpeed config; empty if there is none.
        coordinator: the ranks that load together.
        chunk_bytes: bound of the buffers through which ranks exchange what they read.
        on_device: put parameters on the device that this rank trains on, instead of into host memory.
    """

    is_partitioned = False

    def __init__(
        self, ds_config: Mapping[str, Any], coordinator: Coordinator, chunk_bytes: int, *, on_device: bool = False
    ) -> None:
        self._ds_config = ds_config
        self._coordinator = coordinator
        self._chunk_bytes = chunk_bytes
        self._device = zero3.local_device() if on_device else torch.device("cpu")
        self._laid_out: dict[int, torch.Tensor] = {}

    def dtype(self, wanted: torch.dtype | None) -> torch.dtype | None:
        return None

    def expect(self, model: nn.Module, tied: set[str]) -> None:
        is_flattened = self._ds_config.get("zero_optimization", {}).get("stage") in (1, 2)
        if not is_flattened or self._device.type != zero3.local_device().type:
            return  # moving parameters to the device gives each memory of its own
        named = model.named_parameters()
        lazy = {name: param for name, param in named if isinstance(param, LazyTensor) and name not in tied}
        storage = allocate_flat(
            [(name, param.shape, param.dtype, param.requires_grad) for name, param in lazy.items()],
            self._ds_config,
            self._coordinator.world_size,
            self._device,
        )
        self._laid_out = {id(param): storage.tensors[name] for name, param in lazy.items()}

    def parameter(self, param: torch.Tensor) -> nn.Parameter | None:
        if not isinstance(param, LazyTensor):
            return None
        values = self._laid_out.pop(id(param), None)
        if values is None:
            values = torch.empty(param.shape, dtype=param.dtype, device=self._device)
        return nn.Parameter(values, requires_grad=param.requires_grad)

    def buffer(self, buffer: torch.Tensor) -> torch.Tensor | None:
        return torch.empty(buffer.shape, dtype=buffer.dtype) if isinstance(buffer, LazyTensor) else None

    def target(self, name: str, param: Any) -> Target:
        share = partition_range(param.numel(), self._coordinator.rank, self._coordinator.world_size)
        return Target(name, param.dtype, *share)

    def check(self, plan: LoadPlan) -> None:
        pass

    def batches(self, model: nn.Module, parameters: Sources, buffers: Sources) -> list[Batch]:
        everywhere = Batch(whole(buffers), lambda: [buffer for buffer, _ in buffers.values()])
        return [everywhere, *exchange_batches(parameters, self._coordinator, self._chunk_bytes)]


def swap_batch(
    wave: nvme.SwapWave, items: Mapping[int, Item], ready: Mapping[int, torch.Tensor] | None = None
) -> Batch:
    """The batch of those parameters of `wave` that have an item, by their ``id``.

    Others get the values that are `ready` for them, or become zero in their swap files.
    """
    sourced = [items[id(param)] for param in wave.params if id(param) in items]

    def begin() -> list[torch.Tensor]:
        buffers = dict(zip(map(id, wave.params), wave.begin(), strict=True))
        for key, values in (ready or {}).items():
            if key in buffers:
                buffers[key].copy_(values)
        return [buffer for key, buffer in buffers.items() if key in items]

    return Batch(sourced, begin, wave.settle, is_lent=True)


def exchange_batches(parameters: Sources, coordinator: Coordinator, chunk_bytes: int) -> list[Batch]:
    """Batches that fill whole parameters on every rank, of which each rank reads 1/N."""
    if coordinator.is_alone:
        flat = {name: (param.detach().view(-1), view) for name, (param, view) in parameters.items()}
        return [Batch(whole(flat), lambda: [values for values, _ in flat.values()])]
    names = list(parameters)
    values = [parameters[name][0].detach().view(-1) for name in names]

    def batch(exchange: Exchange) -> Batch:
        items = [
            (
                Target(names[part.tensor], values[part.tensor].dtype, part.length, part.start, part.stop),
                parameters[names[part.tensor]][1],
            )
            for part in exchange.parts
        ]
        return Batch(
            items,
            exchange.begin,
            exchange.settle,
            is_collective=True,
            is_lent=True,
            completes={names[part.tensor]: values[part.tensor] for part in exchange.parts},
        )

    rank, world_size = coordinator.rank, coordinator.world_size
    return [batch(exchange) for exchange in exchanges(values, rank, world_size, chunk_bytes, coordinator.wait)]


def whole(buffers: Sources) -> list[Item]:
    """Items that fill flat tensors from beginning to end."""
    return [(Target(name, flat.dtype, flat.numel(), 0, flat.numel()), view) for name, (flat, view) in buffers.items()]
