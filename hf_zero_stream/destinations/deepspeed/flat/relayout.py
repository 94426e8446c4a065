"""Moving parameters into the flat buffers that ZeRO stage 1 or 2 is about to ask for.

The optimizer's groups may ask for another layout than the load chose: a parameter was frozen, weight decay made two
groups. With one buffer, which is freed only as a whole, DeepSpeed's own flatten, group by group, would then need more
device memory than in stock. So everything is moved before it starts, in the first way that has room:

1. ``recognised``: nothing has to be moved.
2. ``device``: copied on the device; needs as much free memory as the new buffers take.
3. ``distributed``: each of the N ranks copies its 1/N, the old parameters are freed, and the parts are all-gathered;
   needs 1/N of the memory. Right because DeepSpeed has just made parameters equal on all ranks.
4. ``host``: through host memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, compress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

from ...replicated import all_gather
from .layout import WAITING, FlatLayout, find_buffer


__all__ = ["Group", "lay_out"]


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
    how = _choose(moves, moving, sharing, free_bytes, free_bytes + freed, process_group)
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
    moves: list[bool],
    moving: Sequence[Group],
    sharing: Sequence[Tensor],
    free: int,
    free_later: int,
    process_group: Any,
) -> str:
    """How, once all ranks have told what each would do alone, because "distributed" needs all of them.

    `free` bytes are there now, `free_later` once parameters have left their old memory.
    """
    flat_bytes = sum(group.layout.numel * group.params[0].element_size() for group in moving)
    separate_bytes = sum(param.nbytes for param in sharing)
    world_size = dist.get_world_size(process_group)
    part_bytes = flat_bytes // world_size + separate_bytes
    # Parameters of DeepSpeed's OptimizedLinear are not replicas.
    replicas = not any(hasattr(param, "ds_optim_param") for group in moving for param in group.params)
    has_room = free >= part_bytes and free_later >= part_bytes + flat_bytes
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
