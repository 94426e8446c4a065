"""Parameters that every rank has in full: each rank reads 1/N of each, and they exchange what they read.

From disk that is 1/N of what plain loading reads on every rank; over the interconnect, which is faster, the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from ..accelerators import all_gather, serves
from ..checkpoint.lazy import LazyTensor
from ..planning.plan import Target
from ..ranks.coordinator import Coordinator
from ..settings.config import StreamingConfig
from .base import Batch, Destination, Item, SourcedTensor, allocating, flat_items, host_buffer, replace_lazy


_HOST = torch.device("cpu")
_ALIGNMENT = 16  # bytes; each part begins at a multiple of it, so that it can be viewed in any dtype


class _ExchangedPart(NamedTuple):
    """The part of one tensor that this rank brings to one exchange, and with it the parts that the others bring.

    Attributes:
        target: the memory that it reads into; begins with this rank's elements, and may end in padding.
        first: first element of rank 0's part in the tensor; the parts of the others follow, each as long.
        offset: where the part begins in a rank's buffer, in bytes.
    """

    target: Target
    first: int
    offset: int

    def memory(self, buffer: torch.Tensor) -> torch.Tensor:
        """The part within a rank's buffer."""
        return buffer[self.offset : self.offset + self.target.nbytes].view(self.target.dtype)


def exchanges(
    tensors: Mapping[str, torch.Tensor], rank: int, world_size: int, rank_bytes: int
) -> Iterator[tuple[list[_ExchangedPart], int]]:
    """The parts of each all-gather that fills flat `tensors`, and the bytes that it takes of each rank's buffer.

    All ranks have the same parts, but for their targets. A rank's buffer has `rank_bytes`.
    """
    parts: list[_ExchangedPart] = []
    used = 0
    for name, tensor in tensors.items():
        numel, itemsize = tensor.numel(), tensor.dtype.itemsize
        first = 0
        while first < numel:
            length = min(-(-(numel - first) // world_size), (rank_bytes - used) // itemsize)
            if length == 0:
                yield parts, used
                parts, used = [], 0
                continue
            start = min(numel, first + rank * length)
            stop = min(numel, start + length)
            parts.append(_ExchangedPart(Target(name, tensor.dtype, length, start, stop), first, used))
            used = min(rank_bytes, -(-(used + length * itemsize) // _ALIGNMENT) * _ALIGNMENT)
            first += length * world_size
    if parts:
        yield parts, used


def chunk_bytes(config: StreamingConfig, device: torch.device) -> int:
    """Bytes of one exchange, of all ranks together: four times the staging on a device, because each has a meeting."""
    return config.staging_on(device.type) * (1 if device.type == "cpu" else 4)


def exchange_batches(
    parameters: Mapping[str, SourcedTensor], coordinator: Coordinator, chunk_bytes: int, device: torch.device
) -> list[Batch]:
    """Batches that fill whole parameters on every rank, of which each rank reads 1/N.

    Each passes through at most `chunk_bytes` of all ranks' buffers together, but through 16 bytes a rank at least.
    """
    tensors = {name: param.detach().view(-1) for name, (param, _) in parameters.items()}
    views = {name: view for name, (_, view) in parameters.items()}
    if coordinator.is_alone:
        return [Batch(flat_items({name: (tensor, views[name]) for name, tensor in tensors.items()}))]
    world_size = coordinator.world_size
    rank_bytes = max(_ALIGNMENT, chunk_bytes // world_size // _ALIGNMENT * _ALIGNMENT)
    exchanger = _Exchanger(tensors, coordinator, rank_bytes, device)

    def item(part: _ExchangedPart, turn: int) -> Item:
        return Item(part.target, views[part.target.name], lambda: part.memory(exchanger.buffer(1, turn)))

    return [
        Batch(
            [item(part, number % 2) for part in parts],
            finish=partial(exchanger.begin, parts, nbytes, number % 2),
            is_collective=True,
            is_temporary=True,
            completes={part.target.name: tensors[part.target.name] for part in parts},
        )
        for number, (parts, nbytes) in enumerate(exchanges(tensors, coordinator.rank, world_size, rank_bytes))
    ]


class _Exchanger:
    """Exchanges parts of flat `tensors`; a rank's own buffers, of `rank_bytes`, are two, used in turn.

    One is filled while the other is sent.
    """

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], coordinator: Coordinator, rank_bytes: int, device: torch.device
    ) -> None:
        self._tensors, self._coordinator, self._rank_bytes = tensors, coordinator, rank_bytes
        self._device = device
        self._buffers: dict[tuple[int, int], torch.Tensor] = {}

    def buffer(self, ranks: int, turn: int = 0) -> torch.Tensor:
        """Memory for the buffers of so many ranks, made at first use."""
        if (ranks, turn) not in self._buffers:
            # On the device where the default group's collectives want their tensors.
            on_device = self._device if serves(self._device.type) else _HOST
            self._buffers[ranks, turn] = torch.empty(self._rank_bytes * ranks, dtype=torch.uint8, device=on_device)
        return self._buffers[ranks, turn]

    def begin(self, parts: Sequence[_ExchangedPart], nbytes: int, turn: int) -> Callable[[], None]:
        """Begin to exchange the parts (all ranks); the returned function waits, and puts them into the tensors."""
        received = self.buffer(self._coordinator.world_size)[: self._coordinator.world_size * nbytes]
        wait = self._coordinator.begin(all_gather, received, self.buffer(1, turn)[:nbytes])
        return partial(self._end, wait, parts, received.view(-1, nbytes))

    def _end(self, wait: Callable[[], None], parts: Sequence[_ExchangedPart], received: torch.Tensor) -> None:
        """Each part takes one copy, or two where the last ranks have less of it, however many ranks there are."""
        wait()
        for part in parts:
            target, tensor = part.target, self._tensors[part.target.name]
            of_ranks = received[:, part.offset : part.offset + target.nbytes].view(target.dtype)
            there = tensor[part.first : part.first + of_ranks.numel()]
            full = there.numel() // target.numel
            there[: full * target.numel].view(full, target.numel).copy_(of_ranks[:full])
            rest = there[full * target.numel :]
            if len(rest):
                rest.copy_(of_ranks[full, : len(rest)])


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
            with allocating(name, param.nbytes, "the host", self._coordinator.rank):
                values = torch.empty(param.shape, dtype=param.dtype, device=self._parameters_on)
            return nn.Parameter(values, requires_grad=param.requires_grad)

        parameters, buffers, _ = replace_lazy(model, missing, tied, parameter=parameter, buffer=host_buffer)
        exchanged = exchange_batches(parameters, self._coordinator, self._chunk_bytes, self.device)
        return [Batch(flat_items(buffers)), *exchanged]
