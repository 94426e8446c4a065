"""The flat buffers of ZeRO stages 1 and 2: where parameters lie in them, and how parameters are moved into others.

DeepSpeed 0.19.8 (``runtime/zero/stage_1_and_2.py``) concatenates the parameters of an optimizer group in the group's
order (`round_robin_gradients`: rank by rank, every N-th), after each but the last zeros up to a multiple of 16 bytes
if `parameter_alignment` is set, and at the end zeros up to a multiple of 2 * N elements.

Its groups may ask for another layout than the load chose: a parameter was frozen, weight decay made two groups. With
one buffer, which is freed only as a whole, its flatten, group by group, would then need more device memory than in
stock. So everything is moved before it starts, in the first way that has room:

1. ``recognised``: nothing has to be moved.
2. ``device``: copied on the device; needs as much free memory as the new buffers take.
3. ``distributed``: each of the N ranks copies its 1/N, the old parameters are freed, and the parts are all-gathered;
   needs 1/N of the memory. Right because DeepSpeed has just made parameters equal on all ranks.
4. ``host``: through host memory.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, compress, pairwise
from math import gcd
from operator import add
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ....ranks.coordinator import all_gather


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


class Group(NamedTuple):
    """One optimizer group: its trainable, non-empty parameters in the order of DeepSpeed's flat buffer."""

    params: Sequence[Tensor]
    layout: FlatLayout

    def empty(self, numel: int) -> Tensor:
        """Memory for so many elements of the buffer."""
        return torch.empty(numel, dtype=self.params[0].dtype, device=self.params[0].device)

    def move_to(self, buffer: Tensor, values: Iterable[Tensor] = ()) -> None:
        """Make the parameters views of `buffer`, which holds their values, or gets these."""
        for value, (offset, numel) in zip(values, self.layout.places, strict=False):
            buffer.narrow(0, offset, numel).copy_(value.reshape(-1))
        for param, (offset, numel) in zip(self.params, self.layout.places, strict=True):
            param.data = buffer.narrow(0, offset, numel).view(param.shape)
        WAITING.add(buffer, self.layout)


@torch.no_grad()
def lay_out(groups: Sequence[Group], frozen: Iterable[nn.Parameter], process_group: Any, free_bytes: int) -> str:
    """Make every group lie in a buffer of its own, so that DeepSpeed's flatten finds it; return how (all ranks).

    Each group is of one dtype and on this rank's device. `frozen` are the model's other parameters: those that share
    a buffer with parameters that leave it get storages of their own, or they would keep the whole buffer alive.
    """
    moves = [find_buffer(group.params, group.layout) is None for group in groups]
    moving = list(compress(groups, moves))
    freed, sharing = _vacated(moving, frozen)
    how = _choose(moves, moving, sharing, free_bytes, freed, process_group)
    if how in ("device", "distributed"):
        for param in sharing:
            param.data = param.data.clone()
    if how == "device":
        for group in moving:
            group.move_to(group.empty(group.layout.numel), group.params)
    elif how == "distributed":
        _distribute(moving, process_group)
    elif how == "host":
        _through_host(moving, sharing)
    return how


def _choose(
    moves: list[bool], moving: Sequence[Group], sharing: Sequence[Tensor], free: int, freed: int, process_group: Any
) -> str:
    """How, once all ranks have told what each would do alone, because "distributed" needs all of them.

    `free` bytes are there now, and `freed` more once parameters have left their old memory.
    """
    flat_bytes = sum(group.layout.numel * group.params[0].element_size() for group in moving)
    separate_bytes = sum(param.nbytes for param in sharing)
    world_size = dist.get_world_size(process_group)
    part_bytes = flat_bytes // world_size + separate_bytes
    # Parameters of DeepSpeed's OptimizedLinear are not replicas.
    replicas = not any(hasattr(param, "ds_optim_param") for group in moving for param in group.params)
    has_room = free >= part_bytes and free + freed >= part_bytes + flat_bytes
    can_distribute = world_size > 1 and replicas and has_room and any(moves)
    how = "host" if free < flat_bytes + separate_bytes else "device" if any(moves) else "recognised"
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, (how, can_distribute, moves), group=process_group)
    short_of_room = any(theirs == "host" for theirs, _, _ in everyone)
    alike = all(can and theirs == moves for _, can, theirs in everyone)
    return "distributed" if short_of_room and alike else how


def _distribute(moving: Sequence[Group], process_group: Any) -> None:
    rank, world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
    parts = []
    for group in moving:
        part = group.empty(group.layout.numel // world_size).zero_()
        first = rank * part.numel()
        for param, (offset, numel) in zip(group.params, group.layout.places, strict=True):
            start, stop = max(offset, first), min(offset + numel, first + part.numel())
            if start < stop:
                part[start - first : stop - first].copy_(param.reshape(-1)[start - offset : stop - offset])
        parts.append(part)
    _free(chain.from_iterable(group.params for group in moving))
    for group in moving:
        buffer = group.empty(group.layout.numel)
        # As bytes: not every backend knows every dtype.
        all_gather(buffer.view(torch.uint8), parts.pop(0).view(torch.uint8), group=process_group)
        group.move_to(buffer)


def _through_host(moving: Sequence[Group], sharing: Sequence[nn.Parameter]) -> None:
    on_host = [[param.data.cpu() for param in group.params] for group in moving]
    separate = [param.data.to("cpu", copy=True) for param in sharing]  # also on a CPU, out of the shared buffer
    _free(chain(sharing, *(group.params for group in moving)))
    for group, values in zip(moving, on_host, strict=True):
        group.move_to(group.empty(group.layout.numel), values)
    for param, value in zip(sharing, separate, strict=True):
        param.data = value.to(param.device)


def _free(params: Iterable[Tensor]) -> None:
    """Leave each parameter the memory of one element, and its shape."""
    for param in params:
        param.data = torch.empty((), dtype=param.dtype, device=param.device).expand(param.shape)
    get_accelerator().empty_cache()


def _vacated(moving: Sequence[Group], frozen: Iterable[nn.Parameter]) -> tuple[int, list[nn.Parameter]]:
    """What moving `moving` frees: (bytes, the frozen parameters that must leave their buffer for that).

    A buffer of which more would be copied than is used by parameters that leave it stays, with holes.
    """
    storages: dict[int | None, int] = {}
    leaving: dict[int | None, int] = {}
    for param in (param for group in moving for param in group.params):
        key, storages[key] = _memory_of(param)
        leaving[key] = leaving.get(key, 0) + param.nbytes
    staying: dict[int | None, list[nn.Parameter]] = {key: [] for key in storages}
    for param in frozen:
        staying.get(_memory_of(param)[0], []).append(param)
    vacated = [key for key in storages if sum(param.nbytes for param in staying[key]) <= leaving[key]]
    return sum(storages[key] for key in vacated), [param for key in vacated for param in staying[key]]


def _memory_of(tensor: Tensor) -> tuple[int | None, int]:
    """(address, bytes) of the memory that is freed with `tensor`: a whole buffer's, or its storage's."""
    known = WAITING.find(tensor)
    if known is not None:
        return known.start, known.nbytes
    if not torch._C._has_storage(tensor):  # sparse tensors, wrappers
        return None, 0
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()
