"""The flat buffers of ZeRO stages 1 and 2: where parameters lie in them, and which buffers are waiting for an engine.

DeepSpeed 0.19.8 (``runtime/zero/stage_1_and_2.py``) concatenates the parameters of an optimizer group in the group's
order (`round_robin_gradients`: rank by rank, every N-th), after each but the last zeros up to a multiple of 16 bytes
if `parameter_alignment` is set, and at the end zeros up to a multiple of 2 * N elements.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import gcd
from operator import add
from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


__all__ = ["WAITING", "FlatLayout", "find_buffer", "zero_padding"]

# DeepSpeed's nccl_start_alignment_factor: every rank's part of the buffer begins at a multiple of 4 bytes.
_PART_ALIGNMENT = 2


class FlatLayout(NamedTuple):
    """Where parameters lie in a buffer of `numel` elements, padding included: (offset, numel) of each, ascending."""

    places: tuple[tuple[int, int], ...]
    numel: int

    @classmethod
    def padded(cls, numels: Sequence[int], paddings: Sequence[int], alignment: int) -> FlatLayout:
        """Parameters of `numels` elements in a row, `paddings` behind each, up to a multiple of `alignment`."""
        *offsets, end = accumulate(map(add, numels, paddings), initial=0)
        return cls(tuple(zip(offsets, numels, strict=True)), -(-end // alignment) * alignment)

    @classmethod
    def of_group(
        cls, numels: Sequence[int], itemsize: int, world_size: int, *, parameter_alignment: bool
    ) -> FlatLayout:
        """What DeepSpeed makes of an optimizer group of trainable parameters, in the order of the buffer."""
        step = 16 // gcd(16, itemsize) if parameter_alignment else 1
        paddings = [*(-numel % step for numel in numels[:-1]), 0]
        return cls.padded(numels, paddings, _PART_ALIGNMENT * world_size)


@dataclass(frozen=True)
class WaitingBuffer:
    """A buffer that parameters were laid out in, from address `start` on; it keeps no memory alive."""

    reference: StorageWeakRef
    start: int
    nbytes: int
    device: torch.device
    dtype: torch.dtype
    layout: FlatLayout

    def tensor(self) -> Tensor | None:
        """All of it, or None once it is freed."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self.reference.cdata)
        return None if storage is None else torch.empty(0, dtype=self.dtype, device=self.device).set_(storage)


class FlatBuffers:
    """Buffers in which parameters were laid out, until an engine takes them over. Safe between threads.

    It holds no memory: a buffer lives as long as the parameters in it. Which buffer a parameter lies in is told by its
    address, which it keeps through ``.data =``, ``nn.Parameter(view)`` and ``swap_tensors``.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: list[WaitingBuffer] = []

    def add(self, buffer: Tensor, layout: FlatLayout) -> WaitingBuffer:
        storage = buffer.untyped_storage()
        known = WaitingBuffer(
            StorageWeakRef(storage), storage.data_ptr(), storage.nbytes(), buffer.device, buffer.dtype, layout
        )
        with self._lock:
            self._known.append(known)
        return known

    def find(self, tensor: Tensor) -> WaitingBuffer | None:
        """The buffer that `tensor` lies in, or None if that is no buffer of ours."""
        address = tensor.data_ptr() if torch._C._has_storage(tensor) else -1  # sparse tensors, wrappers have none
        for known in self.alive():
            if known.start <= address < known.start + known.nbytes and known.device == tensor.device:
                return known
        return None

    def forget(self, tensors: Sequence[Tensor]) -> None:
        """Forget the buffers that `tensors` lie in."""
        starts = {known.start for known in map(self.find, tensors) if known is not None}
        with self._lock:
            self._known = [known for known in self._known if known.start not in starts]

    def alive(self) -> list[WaitingBuffer]:
        """Buffers that are not freed: the addresses of others may be those of other memory by now."""
        with self._lock:
            self._known = [known for known in self._known if not known.reference.expired()]
            return self._known


WAITING = FlatBuffers()


def find_buffer(tensors: Sequence[Tensor], layout: FlatLayout) -> Tensor | None:
    """The buffer of :data:`WAITING` with nothing but `tensors` and padding, exactly as `layout` says, or None."""
    known = WAITING.find(tensors[0])
    # The same places as when the buffer was made: so no other parameter can be where padding is expected.
    if known is None or known.layout.places != layout.places or known.layout.numel < layout.numel:
        return None
    buffer = known.tensor()
    if buffer is None:
        return None
    for tensor, (offset, numel) in zip(tensors, layout.places, strict=True):
        expected = (buffer.dtype, buffer.device, buffer.data_ptr() + offset * buffer.element_size(), numel)
        if (tensor.dtype, tensor.device, tensor.data_ptr(), tensor.numel()) != expected or not tensor.is_contiguous():
            return None
    return buffer[: layout.numel]


def zero_padding(buffer: Tensor, layout: FlatLayout) -> None:
    """Zero what lies between and behind the parameters, as DeepSpeed's own flatten does."""
    ends = [(offset, offset + numel) for offset, numel in layout.places] + [(layout.numel, layout.numel)]
    with torch.no_grad():
        for (_, stop), (start, _) in pairwise(ends):
            if stop < start:
                buffer[stop:start].zero_()
