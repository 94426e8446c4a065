"""What ``doctor`` and ``bench`` ask of DeepSpeed: its accelerator, its ops, and what its partitions hold."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder import all_ops
from torch import nn

from .zero3 import own_range


__all__ = ["compatible_ops", "get_accelerator", "partition_digest"]


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


def partition_digest(model: nn.Module) -> str | None:
    """A checksum of this rank's ZeRO-3 partitions without their padding; None if some are in swap files."""
    checksum = 0
    params: list[tuple[str, Any]] = sorted(model.named_parameters())
    for name, param in params:
        _, start, stop = own_range(param)
        part = param.ds_tensor.detach()[: stop - start]
        if part.numel() < stop - start:
            return None
        checksum = zlib.crc32(name.encode(), checksum)
        checksum = zlib.crc32(part.cpu().view(torch.uint8).numpy(), checksum)
    return f"{checksum:08x}"
