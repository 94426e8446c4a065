"""Parameters that every rank has in full: each rank reads 1/N of each, and they exchange what they read.

From disk that is 1/N of what plain loading reads on every rank; over the interconnect, which is faster, the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ..checkpoint.lazy import LazyTensor
from ..planning.parameter_box import ParameterBox
from ..planning.plan import Target, partition_range
from ..ranks.coordinator import Coordinator, Wait
from .allocation import allocating
from .base import Batch, Destination, Holding, Item, Sources, flat_items, replace_lazy


__all__ = ["Replicated", "all_gather", "exchange_batches", "exchanges", "open_flat"]

# torch 2.13 warns of the old name.
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)

_HOST = torch.device("cpu")
_ALIGNMENT = 16  # bytes; each part begins at a multiple of it, so that it can be viewed in any dtype


class _Part(NamedTuple):
    """What this rank brings of one tensor to one exchange. Numbers are elements, but for the last one.

    Attributes:
        tensor: its index.
        share: length of each rank's share of the tensor, the last one's padding included.
        first: first element within the share.
        start: first element that this rank reads; counted from the tensor's beginning.
        stop: one past the last; less than ``start + length`` where the share ends in padding.
        offset: where the part begins in a rank's buffer, in bytes.
    """

    tensor: int
    share: int
    first: int
    length: int
    start: int
    stop: int
    offset: int


@dataclass(frozen=True)
class _Exchange:
    """One all-gather of what every rank has read of the same parts.

    Attributes:
        tensors: flat, in host memory or on the device.
        rank_bytes: length of one rank's buffer.
        buffer: gives memory for so many ranks' buffers, shared by exchanges one after the other.
    """

    tensors: Sequence[torch.Tensor]
    parts: Sequence[_Part]
    rank_bytes: int
    buffer: Callable[[int], torch.Tensor]
    world_size: int
    wait: Wait

    def memory(self, part: _Part) -> torch.Tensor:
        """Where this rank puts what it reads of a part."""
        return self._view(self.buffer(1), part)

    def finish(self) -> None:
        """Exchange the parts and put them into the tensors; all ranks must call it."""
        everyone = self.buffer(self.world_size)[: self.world_size * self.rank_bytes]
        self.wait(all_gather(everyone, self.buffer(1)[: self.rank_bytes], async_op=True))
        for rank, of_rank in enumerate(everyone.split(self.rank_bytes)):
            for part in self.parts:
                tensor = self.tensors[part.tensor]
                start = rank * part.share + part.first
                stop = min(start + part.length, (rank + 1) * part.share, tensor.numel())
                if start < stop:
                    tensor[start:stop].copy_(self._view(of_rank, part)[: stop - start])

    def _view(self, buffer: torch.Tensor, part: _Part) -> torch.Tensor:
        dtype = self.tensors[part.tensor].dtype
        return buffer[part.offset : part.offset + part.length * dtype.itemsize].view(dtype)


def exchanges(
    tensors: Sequence[torch.Tensor],
    rank: int,
    world_size: int,
    chunk_bytes: int,
    wait: Wait = lambda work: work.wait(),
    device: torch.device = _HOST,
) -> Iterator[_Exchange]:
    """Exchanges that fill flat `tensors`, each through at most `chunk_bytes` of all ranks' buffers together.

    At least 16 bytes a rank are used. `wait` returns when an asynchronous collective is done, or raises.
    """
    limit = max(_ALIGNMENT, chunk_bytes // world_size // _ALIGNMENT * _ALIGNMENT)

    @cache
    def buffer(ranks: int) -> torch.Tensor:
        # On the device where the default group's collectives want their tensors.
        return torch.empty(limit * ranks, dtype=torch.uint8, device=_HOST if "gloo" in dist.get_backend() else device)

    parts: list[_Part] = []
    used = 0
    for number, tensor in enumerate(tensors):
        share = -(-tensor.numel() // world_size)
        itemsize = tensor.dtype.itemsize
        first = 0
        while first < share:
            length = min(share - first, (limit - used) // itemsize)
            if length == 0:
                yield _Exchange(tensors, parts, used, buffer, world_size, wait)
                parts, used = [], 0
                continue
            start = min(tensor.numel(), rank * share + first)
            stop = min(tensor.numel(), start + length, (rank + 1) * share)
            parts.append(_Part(number, share, first, length, start, max(start, stop), used))
            used = min(limit, -(-(used + length * itemsize) // _ALIGNMENT) * _ALIGNMENT)
            first += length
    if parts:
        yield _Exchange(tensors, parts, used, buffer, world_size, wait)


def exchange_batches(
    parameters: Sources, coordinator: Coordinator, chunk_bytes: int, device: torch.device
) -> list[Batch]:
    """Batches that fill whole parameters on every rank, of which each rank reads 1/N."""
    values = {name: param.detach().view(-1) for name, (param, _) in parameters.items()}
    if coordinator.is_alone:
        return [Batch(flat_items({name: (values[name], view) for name, (_, view) in parameters.items()}))]
    names = list(parameters)

    def batch(exchange: _Exchange) -> Batch:
        def item(part: _Part) -> Item:
            name = names[part.tensor]
            target = Target(name, values[name].dtype, part.length, part.start, part.stop)
            return Item(target, parameters[name][1], partial(exchange.memory, part))

        return Batch(
            [item(part) for part in exchange.parts],
            finish=exchange.finish,
            is_collective=True,
            is_temporary=True,
            completes={names[part.tensor]: values[names[part.tensor]] for part in exchange.parts},
        )

    rank, world_size = coordinator.rank, coordinator.world_size
    all_exchanges = exchanges(list(values.values()), rank, world_size, chunk_bytes, coordinator.wait, device)
    return [batch(exchange) for exchange in all_exchanges]


class Replicated(Destination):
    """Plain data parallelism: every rank has all of every parameter.

    Args:
        chunk_bytes: bound of the buffers of all ranks together, through which they exchange what they read.
        on_device: put parameters on `device`, instead of into host memory.
    """

    exchanges_reads = True

    def __init__(
        self, coordinator: Coordinator, chunk_bytes: int, device: torch.device = _HOST, *, on_device: bool = False
    ) -> None:
        self.device = device
        self._coordinator = coordinator
        self._chunk_bytes = chunk_bytes
        self._parameters_on = device if on_device else _HOST

    def batches(
        self, model: nn.Module, missing: set[str], tied: set[str], *, only_planned: bool = False
    ) -> list[Batch]:
        storage = self._storage(model, tied)

        def parameter(name: str, param: torch.Tensor) -> nn.Parameter | None:
            if not isinstance(param, LazyTensor):
                return None
            values = storage.get(id(param))
            if values is None:
                with allocating(name, param.nbytes, "the host", self._coordinator.rank):
                    values = torch.empty(param.shape, dtype=param.dtype, device=self._parameters_on)
            return nn.Parameter(values, requires_grad=param.requires_grad)

        def buffer(old: torch.Tensor) -> torch.Tensor | None:
            return torch.empty(old.shape, dtype=old.dtype) if isinstance(old, LazyTensor) else None

        parameters, buffers, _ = replace_lazy(model, missing, tied, parameter=parameter, buffer=buffer)
        exchanged = exchange_batches(parameters, self._coordinator, self._chunk_bytes, self.device)
        return [Batch(flat_items(buffers)), *exchanged]

    def _storage(self, model: nn.Module, tied: set[str]) -> Mapping[int, torch.Tensor]:
        """Memory of a subclass's own for lazy parameters, by their ``id``."""
        return {}

    @classmethod
    def holdings(
        cls, params: Mapping[str, nn.Parameter], *, masters: bool, rank: int, world_size: int
    ) -> dict[str, Holding]:
        """All of each parameter, of which each rank gives 1/N."""

        def holding(param: nn.Parameter) -> Holding:
            _, start, stop = partition_range(param.numel(), rank, world_size)
            box = ParameterBox.whole(param.shape)
            return Holding(box, param.dtype, start, stop, partial(open_flat, param), is_whole=True)

        return {name: holding(param) for name, param in params.items()}


def open_flat(param: torch.Tensor) -> AbstractContextManager[torch.Tensor]:
    """A context with the flat values that a parameter has by then."""
    return nullcontext(param.detach().contiguous().view(-1))
