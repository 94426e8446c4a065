"""The flat buffers of ZeRO stages 1 and 2: where parameters lie in them, and which buffers are waiting for an engine.

DeepSpeed 0.19.8 (``runtime/zero/stage_1_and_2.py``) concatenates the parameters of an optimizer group in the group's
order (`round_robin_gradients`: rank by rank, every N-th), after each but the last zeros up to a multiple of 16 bytes
if `parameter_alignment` is set, and at the end zeros up to a multiple of 2 * N elements.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gcd

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


__all__ = ["WAITING", "FlatBuffers", "FlatLayout", "find_buffer", "storage_key", "zero_padding"]

# DeepSpeed's nccl_start_alignment_factor: every rank's part of the buffer begins at a multiple of 4 bytes.
_PART_ALIGNMENT = 2


@dataclass(frozen=True)
class FlatLayout:
    """Places in one flat buffer, in elements."""

    places: tuple[tuple[int, int], ...]
    """(offset, numel) of each parameter, ascending."""

    numel: int
    """Elements of the whole buffer, padding included."""

    @classmethod
    def padded(cls, numels: Sequence[int], paddings: Sequence[int], alignment: int) -> FlatLayout:
        """Parameters of `numels` elements in a row, `paddings` behind each, up to a multiple of `alignment`."""
        places, offset = [], 0
        for numel, padding in zip(numels, paddings, strict=True):
            places.append((offset, numel))
            offset += numel + padding
        return cls(tuple(places), -(-offset // alignment) * alignment)

    @classmethod
    def of_group(
        cls, numels: Sequence[int], itemsize: int, world_size: int, *, parameter_alignment: bool
    ) -> FlatLayout:
        """What DeepSpeed makes of one optimizer group.

        Args:
            numels: elements of each trainable parameter, in the order of the buffer.
            itemsize: bytes of one element.
            world_size: ranks that share the group's optimizer states.
            parameter_alignment: the setting of `zero_optimization`.
        """
        paddings, offset = [], 0
        step = 16 // gcd(16, itemsize) if parameter_alignment else 1
        for numel in numels:
            paddings.append(-(offset + numel) % step)
            offset += numel + paddings[-1]
        if paddings:
            paddings[-1] = 0
        return cls.padded(numels, paddings, _PART_ALIGNMENT * world_size)


class FlatBuffers:
    """The buffers that parameters were laid out in and that no engine has taken over yet.

    It holds no memory: a buffer lives as long as the tensors that view it. Buffers are told apart by their storage,
    because parameters keep it through ``.data =``, ``nn.Parameter(view)`` and ``swap_tensors``. Safe between threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # The weak reference keeps torch from using the address, the key, for another storage.
        self._known: dict[int, tuple[StorageWeakRef, FlatLayout]] = {}

    def add(self, buffer: Tensor, layout: FlatLayout) -> None:
        """Remember that parameters lie in `buffer` as `layout` says."""
        reference = StorageWeakRef(buffer.untyped_storage())
        with self._lock:
            self._known[reference.cdata] = (reference, layout)

    def layout_of(self, tensor: Tensor) -> FlatLayout | None:
        """The layout of the buffer that `tensor` lies in, or None if that is no buffer of ours."""
        key = storage_key(tensor)
        with self._lock:
            found = None if key is None else self._known.get(key)
        return None if found is None else found[1]

    def forget(self, tensors: Sequence[Tensor]) -> None:
        """Forget the buffers that `tensors` lie in."""
        keys = {storage_key(tensor) for tensor in tensors}
        with self._lock:
            self._known = {key: value for key, value in self._known.items() if key not in keys}

    def __len__(self) -> int:
        """Buffers that are still alive."""
        with self._lock:
            self._known = {key: value for key, value in self._known.items() if not value[0].expired()}
            return len(self._known)


WAITING = FlatBuffers()
"""Buffers of this process in which parameters were laid out, until an engine takes them over."""


def find_buffer(tensors: Sequence[Tensor], layout: FlatLayout) -> Tensor | None:
    """The buffer of ``layout.numel`` elements in which `tensors` lie exactly as `layout` says, or None.

    The buffer must be one of :data:`WAITING` and hold nothing but these tensors and padding; no element is copied.
    """
    if not tensors:
        return None
    first = tensors[0]
    known = WAITING.layout_of(first)
    # The same places as when the buffer was made: so no other parameter can be where padding is expected.
    if known is None or known.places != layout.places or known.numel < layout.numel:
        return None
    for tensor, (offset, numel) in zip(tensors, layout.places, strict=True):
        same_buffer = tensor.dtype == first.dtype and storage_key(tensor) == storage_key(first)
        if not same_buffer or (tensor.storage_offset(), tensor.numel()) != (offset, numel):
            return None
        if not tensor.is_contiguous():
            return None
    buffer = torch.empty(0, dtype=first.dtype, device=first.device)
    return buffer.set_(first.untyped_storage(), 0, (layout.numel,), (1,))


def zero_padding(buffer: Tensor, layout: FlatLayout) -> None:
    """Zero what lies between and behind the parameters, as DeepSpeed's own flatten does."""
    ends = [(offset, offset + numel) for offset, numel in layout.places] + [(layout.numel, layout.numel)]
    with torch.no_grad():
        for (_, stop), (start, _) in pairwise(ends):
            if stop < start:
                buffer[stop:start].zero_()


def storage_key(tensor: Tensor) -> int | None:
    """What tells the storage of `tensor` from all others that live; None if it has none (sparse tensors, wrappers)."""
    return tensor.untyped_storage()._cdata if torch._C._has_storage(tensor) else None
