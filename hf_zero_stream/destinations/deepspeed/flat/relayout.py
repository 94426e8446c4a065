"""Moving parameters into the flat buffers that ZeRO stage 1 or 2 is about to ask for.

The optimizer's groups may ask for another layout than the load chose: a parameter was frozen, weight decay made two
groups, a new head came in. One buffer, freed only as a whole, would then make DeepSpeed's own flatten, group by group,
need more device memory than in stock. So everything is moved before it starts, in the first way that has room:

1. ``recognised``: nothing has to be moved.
2. ``device``: copied on the device; needs as much free memory as the new buffers take.
3. ``distributed``: each of the N ranks copies its 1/N, the old parameters are freed, and the parts are all-gathered;
   needs 1/N of the memory. Right because DeepSpeed has just made parameters equal on all ranks.
4. ``host``: through host memory.

Ranks choose together (one small collective), because 3 needs all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

from ...replicated import all_gather
from .layout import WAITING, FlatLayout, find_buffer


__all__ = ["Group", "lay_out"]


class Group:
    """One optimizer group: its trainable, non-empty parameters in the order of DeepSpeed's flat buffer."""

    def __init__(self, params: Sequence[Tensor], layout: FlatLayout) -> None:
        self.params = params
        self.layout = layout
        self.shapes = [param.shape for param in params]
        self.dtype, self.device = params[0].dtype, params[0].device
        self.nbytes = layout.numel * self.dtype.itemsize
        """Bytes of the flat buffer."""

    def empty(self, numel: int) -> Tensor:
        """Memory for so many elements of the buffer."""
        return torch.empty(numel, dtype=self.dtype, device=self.device)

    def move_to(self, buffer: Tensor, values: Iterable[Tensor] = ()) -> None:
        """Make the parameters views of `buffer`, which holds their values, or gets these."""
        for value, (offset, numel) in zip(values, self.layout.places, strict=False):
            buffer.narrow(0, offset, numel).copy_(value.reshape(-1))
        for param, shape, (offset, numel) in zip(self.params, self.shapes, self.layout.places, strict=True):
            param.data = buffer.narrow(0, offset, numel).view(shape)
        WAITING.add(buffer, self.layout)


@torch.no_grad()
def lay_out(
    groups: Sequence[Group], frozen: Sequence[nn.Parameter], process_group: Any, free_bytes: Callable[[], int]
) -> str:
    """Make every group lie in a buffer of its own, so that DeepSpeed's flatten finds it; return how (all ranks).

    Args:
        groups: all groups of the optimizer, of one dtype each, on this rank's device.
        frozen: the model's other parameters. Those that share a buffer with parameters that leave it get storages of
            their own, or they would keep the whole buffer alive (unless they are the larger part of it).
        process_group: the ranks over which optimizer states are partitioned; parameters are equal on all of them.
    """
    wanted = [index for index, group in enumerate(groups) if find_buffer(group.params, group.layout) is None]
    moving = [groups[index] for index in wanted]
    freed, sharing = _vacated(moving, frozen)
    how = _choose(moving, wanted, freed, sharing, process_group, free_bytes())
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
    moving: Sequence[Group],
    wanted: list[int],
    freed: int,
    sharing: Sequence[nn.Parameter],
    process_group: Any,
    free: int,
) -> str:
    """The way that this rank takes, once all have told what each would do alone; `wanted`: which groups move."""
    flat_bytes = sum(group.nbytes for group in moving)
    separate_bytes = sum(param.nbytes for param in sharing)
    world_size = dist.get_world_size(process_group)
    part_bytes = flat_bytes // world_size + separate_bytes
    # Parameters of DeepSpeed's OptimizedLinear are not replicas.
    replicas = not any(hasattr(param, "ds_optim_param") for group in moving for param in group.params)
    can_distribute = world_size > 1 and replicas and free >= part_bytes and free + freed >= part_bytes + flat_bytes
    if not moving:
        how, can_distribute = "recognised", False
    else:
        how = "device" if free >= flat_bytes + separate_bytes else "host"
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, (how, can_distribute, wanted), group=process_group)
    short_of_room = any(theirs == "host" for theirs, _, _ in everyone)
    alike = all(can and theirs == wanted for _, can, theirs in everyone)
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
    _free(moving)
    for group in moving:
        buffer = group.empty(group.layout.numel)
        # As bytes: not every backend knows every dtype.
        all_gather(buffer.view(torch.uint8), parts.pop(0).view(torch.uint8), group=process_group)
        group.move_to(buffer)


def _through_host(moving: Sequence[Group], sharing: Sequence[nn.Parameter]) -> None:
    on_host = [[param.data.cpu() for param in group.params] for group in moving]
    separate = [param.data.cpu() for param in sharing]
    for param in sharing:
        param.data = torch.empty(0, dtype=param.dtype, device=param.device)
    _free(moving)
    for group, values in zip(moving, on_host, strict=True):
        group.move_to(group.empty(group.layout.numel), values)
    for param, value in zip(sharing, separate, strict=True):
        # On a CPU "the host" is the same memory, and the value still lies in the shared buffer.
        param.data = value.clone() if param.device == value.device else value.to(param.device)


def _free(moving: Sequence[Group]) -> None:
    for group in moving:
        for param in group.params:
            param.data = torch.empty(0, dtype=param.dtype, device=param.device)
    get_accelerator().empty_cache()


def _vacated(moving: Sequence[Group], frozen: Sequence[nn.Parameter]) -> tuple[int, list[nn.Parameter]]:
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
