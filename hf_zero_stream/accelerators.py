"""The accelerator of this machine, of whatever kind: streams, memory, random numbers, and collectives between ranks.

Only this module asks torch about accelerators, and it asks for none by name. ``torch.accelerator`` has what all kinds
have in common; the module of each kind, ``torch.cuda`` for instance, the rest.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .errors import ConfigError
from .settings.config import announced_local_rank, announces_local_rank


# The older name warns in newer versions of torch.
all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


def kind() -> str | None:
    """The type of the accelerator that this process can use, "cuda" for instance; None without one.

    A build of torch for CUDA names CUDA also where there is no GPU, or no driver.
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    # No ranks talk to each other through the memory of Apple's GPUs, and transformers leaves these aside too.
    return None if found is None or found.type == "mps" else found.type


def is_accelerator(device: torch.device) -> bool:
    """Whether `device` has memory of its own, and works beside the host."""
    return device.type not in ("cpu", "meta")


def device_count() -> int:
    """How many accelerators this process can use."""
    return torch.accelerator.device_count()


def device_of_rank(kind: str, local_rank: int | None) -> torch.device | None:
    """The device of this `kind` that a rank uses; None if nothing tells.

    The current one, where somebody has chosen it or there is no other, else that of the rank's number on its host.
    """
    count, current = device_count(), torch.accelerator.current_device_index()
    if current == 0 and count > 1:  # torch begins with the first, on every rank
        if local_rank is None:
            return None
        current = local_rank if local_rank < count else current
    return torch.device(kind, current)


def serves(kind: str) -> bool:
    """Whether collectives of the default group take tensors of devices of this `kind` from where they are.

    A group may have a backend for each kind of device (``cuda:nccl,cpu:gloo``); gloo copies all through the host.
    """
    backends = dict(pair.split(":") for pair in dist.get_backend_config().split(","))
    return backends.get(kind, "gloo") != "gloo"


def collective_device() -> torch.device:
    """The device on which the default group's collectives need their tensors; the host if there is no group.

    Raises a ConfigError if nothing says which of several GPUs is this rank's.
    """
    type_ = kind() if dist.is_initialized() else None
    if type_ is None or not serves(type_):
        return torch.device("cpu")
    bound: torch.device | None = dist.group.WORLD.bound_device_id
    if bound is not None:
        return bound
    is_known = announces_local_rank() or dist.get_world_size() == 1
    device = device_of_rank(type_, announced_local_rank() if is_known else None)
    if device is None:
        raise ConfigError(
            f"Nothing says which of the {device_count()} devices is that of rank "
            f"{dist.get_rank()}: no launcher announces its local rank (LOCAL_RANK), and the current device is the "
            f"first. Call torch.{type_}.set_device(...) before the load, or "
            f'init_process_group(device_id=torch.device("{type_}", ...)).'
        )
    return device


def on_device(device: torch.device) -> AbstractContextManager[None]:
    """Inside, `device` is the current one, if it is an accelerator.

    Afterwards the one from before is again, if this process has used that at all: to make it current would give it a
    context, which takes hundreds of megabytes, by every rank of this host.
    """
    return torch.accelerator.device_index(device.index) if is_accelerator(device) else nullcontext()


def near_cores(device: torch.device) -> frozenset[int]:
    """This process's cores on the NUMA node of an accelerator; empty if that is all of them, or if nothing tells.

    From where Linux lists a PCI device's cores (``local_cpulist``), by the device's address there.
    """
    if device.type != "cuda":
        return frozenset()
    try:
        found = torch.cuda.get_device_properties(device)
        address = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
        with open(f"{_PCI_DEVICES}/{address}/local_cpulist", encoding="ascii") as file:
            parts = [part.partition("-") for part in file.read().strip().split(",")]
        near = {core for first, _, last in parts for core in range(int(first), int(last or first) + 1)}
    except (OSError, AttributeError, ValueError):
        return frozenset()
    own = os.sched_getaffinity(0)
    return frozenset(near & own) if near & own != own else frozenset()


_PCI_DEVICES = "/sys/bus/pci/devices"


def stream(device: torch.device) -> torch.Stream:
    """The stream of `device` that this thread gives work to."""
    return torch.accelerator.current_stream(device)


class SideStream(NamedTuple):
    """A stream of a device beside that one, for copies; threads hold the lock while temporary memory of theirs lives.

    So such memory exists once for each stream, however many threads there are.
    """

    stream: torch.Stream
    lock: threading.Lock


SIDE_STREAMS = 2
"""While one copies, the other casts."""


@cache
def side_streams(device: torch.device) -> tuple[SideStream, ...]:
    """The side streams of `device`.

    All threads and all operations share them, because torch's allocator keeps memory for each stream apart.
    """
    return tuple(SideStream(torch.Stream(device), threading.Lock()) for _ in range(SIDE_STREAMS))


def on_side_stream(device: torch.device) -> AbstractContextManager[object]:
    """Inside, this thread gives its work to a side stream of `device`, if that is an accelerator."""
    return side_streams(device)[0].stream if is_accelerator(device) else nullcontext()


def sleeping_event(device: torch.device) -> torch.Event:
    """A mark of work of `device`; a thread that waits for it sleeps, where others would keep a core busy."""
    return torch.Event(device, blocking=True)


def synchronise(devices: Iterable[torch.device]) -> None:
    """Block until the accelerators among `devices` have done what this thread gave to their current streams.

    Not until they have done all: a collective of somebody else, whose ranks do not come, must not hold this one.
    """
    for device in {device for device in devices if is_accelerator(device)}:
        event = sleeping_event(device)
        event.record(stream(device))
        event.synchronize()


def pinned(nbytes: int) -> torch.Tensor:
    """Page-locked memory of the host, uint8, which an accelerator copies from and to by itself.

    torch takes such memory in powers of two, and keeps it for its next use.
    """
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in host memory: those of an accelerator in pinned memory, four times as fast as in other."""
    if not is_accelerator(tensor.device):
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    synchronise([tensor.device])
    return host


def used_bytes(device: torch.device) -> int:
    """Memory of `device` that tensors of this process have now; 0 of the host."""
    return torch.get_device_module(device).memory_allocated(device) if is_accelerator(device) else 0


def peak_bytes(device: torch.device) -> int:
    """The most of that since the process began, or since somebody reset it; 0 of the host."""
    return torch.get_device_module(device).max_memory_allocated(device) if is_accelerator(device) else 0


def reserved_bytes(device: torch.device) -> int:
    """Memory of `device` that torch's allocator has taken, in use or kept for later; 0 of the host."""
    return torch.get_device_module(device).memory_reserved(device) if is_accelerator(device) else 0


def free_bytes(device: torch.device) -> int:
    """Memory of this accelerator that no process uses; of the current one, if `device` has no index."""
    return torch.get_device_module(device).mem_get_info(device)[0]


def random_state(kind: str) -> torch.Tensor:
    """The state of the random numbers of the current device of this `kind`."""
    return torch.get_device_module(kind).get_rng_state()


def set_random_state(kind: str, state: torch.Tensor) -> None:
    torch.get_device_module(kind).set_rng_state(state)


def settle(tensors: Iterable[torch.Tensor]) -> None:
    """Block until the current streams of the accelerators on which `tensors` are have done what they were given.

    Threads do not share the caller's stream. Without this, they might read values that are not there yet.
    """
    synchronise(tensor.device for tensor in tensors)
