"""Parameters that every rank has in full: each rank reads 1/N of each, and they exchange what they read.

From disk that is 1/N of what plain loading reads on every rank; over the interconnect, which is faster, the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..ranks.messages import Wait
from .deepspeed.zero3 import local_device


__all__ = ["Exchange", "Part", "all_gather", "exchanges"]

# torch 2.13 warns of the old name.
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)

ALIGNMENT = 16
"""Each part begins at a multiple of so many bytes, so that it can be viewed in any dtype."""


class Part(NamedTuple):
    """What this rank brings of one tensor to one exchange.

    Attributes:
        tensor: which of the tensors.
        share: elements of each rank's share of the tensor, the last one's padding included.
        first: first element within the share.
        length: elements, the same on every rank.
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


class Exchange:
    """One all-gather of what every rank has read of the same parts.

    Args:
        tensors: the flat tensors that are filled, in host memory or on the device.
        parts: what this rank brings.
        rank_bytes: length of one rank's buffer, in bytes.
        buffers: memory for one rank's buffer and for those of all ranks, shared by exchanges one after the other.
        wait: returns when an asynchronous collective is done, or raises.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], parts: Sequence[Part], rank_bytes: int, buffers: _Buffers, wait: Wait
    ) -> None:
        self.parts = parts
        self._tensors = tensors
        self._rank_bytes = rank_bytes
        self._buffers = buffers
        self._wait = wait

    def begin(self) -> list[torch.Tensor]:
        """A destination for each part of this rank."""
        mine = self._buffers.mine()
        return [self._view(mine, part) for part in self.parts]

    def settle(self) -> None:
        """Exchange the parts and put them into the tensors; all ranks must call it."""
        ranks = self._buffers.world_size
        everyone = self._buffers.everyone()[: ranks * self._rank_bytes]
        self._wait(all_gather(everyone, self._buffers.mine()[: self._rank_bytes], async_op=True))
        for rank in range(ranks):
            of_rank = everyone[rank * self._rank_bytes : (rank + 1) * self._rank_bytes]
            for part in self.parts:
                tensor = self._tensors[part.tensor]
                start = rank * part.share + part.first
                stop = min(start + part.length, (rank + 1) * part.share, tensor.numel())
                if start < stop:
                    tensor[start:stop].copy_(self._view(of_rank, part)[: stop - start])

    def _view(self, buffer: torch.Tensor, part: Part) -> torch.Tensor:
        dtype = self._tensors[part.tensor].dtype
        return buffer[part.offset : part.offset + part.length * dtype.itemsize].view(dtype)


class _Buffers:
    """One rank's buffer and all ranks' together, made at first use."""

    def __init__(self, rank_bytes: int, world_size: int) -> None:
        self.world_size = world_size
        self._rank_bytes = rank_bytes
        self._mine: torch.Tensor | None = None
        self._everyone: torch.Tensor | None = None

    def mine(self) -> torch.Tensor:
        if self._mine is None:
            self._mine = torch.empty(self._rank_bytes, dtype=torch.uint8, device=_device())
        return self._mine

    def everyone(self) -> torch.Tensor:
        if self._everyone is None:
            self._everyone = torch.empty(self._rank_bytes * self.world_size, dtype=torch.uint8, device=_device())
        return self._everyone


def exchanges(
    tensors: Sequence[torch.Tensor],
    rank: int,
    world_size: int,
    chunk_bytes: int,
    wait: Wait = lambda work: work.wait(),
) -> Iterator[Exchange]:
    """Exchanges that fill `tensors`, each through at most `chunk_bytes` of all ranks' buffers together.

    Args:
        tensors: flat, of any dtypes; the same on every rank.
        chunk_bytes: at least 16 bytes a rank are used.
        wait: returns when an asynchronous collective is done, or raises.
    """
    limit = max(ALIGNMENT, chunk_bytes // world_size // ALIGNMENT * ALIGNMENT)
    buffers = _Buffers(limit, world_size)
    parts: list[Part] = []
    used = 0
    for number, tensor in enumerate(tensors):
        share = -(-tensor.numel() // world_size)
        itemsize = tensor.dtype.itemsize
        first = 0
        while first < share:
            length = min(share - first, (limit - used) // itemsize)
            if length == 0:
                yield Exchange(tensors, parts, used, buffers, wait)
                parts, used = [], 0
                continue
            start = min(tensor.numel(), rank * share + first)
            stop = min(tensor.numel(), start + length, (rank + 1) * share)
            parts.append(Part(number, share, first, length, start, max(start, stop), used))
            used = min(limit, -(-(used + length * itemsize) // ALIGNMENT) * ALIGNMENT)
            first += length
    if parts:
        yield Exchange(tensors, parts, used, buffers, wait)


def _device() -> torch.device:
    """Where the default group's collectives want their tensors."""
    return torch.device("cpu") if "gloo" in dist.get_backend() else local_device()
