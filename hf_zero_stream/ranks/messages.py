"""Objects between ranks, by collectives that are waited for in small steps, so that a dead rank ends the waiting."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


__all__ = ["Wait", "broadcast_object", "collective_device", "gather_objects"]

Wait = Callable[[Any], None]
"""Returns when a ``torch.distributed.Work`` is done, or raises."""


def gather_objects(value: Any, wait: Wait) -> list[Any]:
    """Every rank's `value`, in order of rank; as ``dist.all_gather_object``."""
    mine = _pickled(value)
    lengths = [torch.empty(1, dtype=torch.int64, device=mine.device) for _ in range(dist.get_world_size())]
    wait(dist.all_gather(lengths, torch.tensor([mine.numel()], device=mine.device), async_op=True))
    counts = [int(length) for length in lengths]
    padded = torch.zeros(max(counts), dtype=torch.uint8, device=mine.device)
    padded[: mine.numel()] = mine
    everyone = [torch.empty_like(padded) for _ in counts]
    wait(dist.all_gather(everyone, padded, async_op=True))
    return [_unpickled(data[:count]) for data, count in zip(everyone, counts, strict=True)]


def broadcast_object(value: Any, source: int, wait: Wait) -> Any:
    """Rank `source`'s `value`; as ``dist.broadcast_object_list``."""
    is_source = dist.get_rank() == source
    data = _pickled(value if is_source else None)
    length = torch.tensor([data.numel()], device=data.device)
    wait(dist.broadcast(length, source, async_op=True))
    if not is_source:
        data = torch.empty(int(length), dtype=torch.uint8, device=data.device)
    wait(dist.broadcast(data, source, async_op=True))
    return value if is_source else _unpickled(data)


def collective_device() -> torch.device:
    """Where the default group's collectives want their tensors."""
    if "gloo" in dist.get_backend():
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    return torch.device("cpu" if accelerator is None else accelerator.type, torch.accelerator.current_device_index())


def _pickled(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(collective_device())


def _unpickled(data: torch.Tensor) -> Any:
    return pickle.loads(data.cpu().numpy().tobytes())
