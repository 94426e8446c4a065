"""What ``doctor`` and ``bench`` ask of DeepSpeed: its accelerator, its ops, and what its partitions hold."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder import all_ops
from torch import nn

from .zero3 import local_device


__all__ = [
    "accelerator_name",
    "compatible_ops",
    "partition_bytes",
    "partition_digest",
    "synchronize",
    "use_local_device",
]


def accelerator_name() -> str:
    """The type of the accelerator, as torch names its devices."""
    return str(get_accelerator().device_name())


def compatible_ops() -> dict[str, bool]:
    """DeepSpeed's ops by name, and whether each could be compiled here or is installed already."""
    found = {}
    for name, builder in all_ops.ALL_OPS.items():
        try:
            found[name] = bool(builder.is_compatible(verbose=False))
        except Exception:  # builders that look for a compiler or a GPU raise whatever they please
            found[name] = False
    found.pop("deepspeed_not_implemented", None)  # stands for ops that do not exist for this accelerator
    return found


def use_local_device() -> None:
    """Make this rank's device the current one, for collectives too."""
    get_accelerator().set_device(local_device().index or 0)


def synchronize() -> None:
    """Wait for all work on the current device."""
    get_accelerator().synchronize()


def partition_bytes(model: nn.Module) -> int:
    """The size of this rank's ZeRO-3 partitions, with their padding."""
    return sum(param.ds_tensor.nbytes for param in model.parameters())


def partition_digest(model: nn.Module) -> str | None:
    """A checksum of this rank's ZeRO-3 partitions without their padding; None if some are in swap files."""
    checksum = 0
    params: list[tuple[str, Any]] = sorted(model.named_parameters())
    for name, param in params:
        part = param.ds_tensor
        used = max(0, min(part.ds_numel, param.ds_numel - part.ds_numel * param.ds_zero_partition_rank))
        if part.numel() < used:
            return None
        checksum = zlib.crc32(name.encode(), checksum)
        checksum = zlib.crc32(part.detach()[:used].cpu().view(torch.uint8).numpy(), checksum)
    return f"{checksum:08x}"
