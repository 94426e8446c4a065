"""What modules keep beside parameters and buffers: a state dict has it, and a training state has no place for it."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

import torch
from torch import nn

from ..errors import UnsupportedError
from ..holdings.marks import is_packed
from .base import quantised_modules


__all__ = ["keeps_packing", "refuse_module_entries"]


def refuse_module_entries(model: nn.Module) -> None:
    """Raise an UnsupportedError if a state dict of `model` has anything but parameters and buffers.

    That is what ``get_extra_state`` of a module returns, or what code of its own adds; scales of FP8 layers, for
    instance. Quantised layers add how their weights are packed; these are frozen, and the checkpoint has them.
    """
    quantised = tuple(f"{prefix}." for prefix, _ in quantised_modules(model))
    known: set[Any] = set()
    for named in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        for name, tensor in named:
            known |= {name, id(tensor)}
    entries = model.state_dict(keep_vars=True).items()
    unknown = [
        key
        for key, value in entries
        if key not in known and id(value) not in known and not _is_empty(value) and not key.startswith(quantised)
    ]
    if unknown:
        raise UnsupportedError(
            f"{type(model).__name__}.state_dict() has {len(unknown)} entries that are neither parameters nor buffers: "
            f"{', '.join(unknown[:8])}. A training state has no place for them. Keep them in buffers, or use the "
            "checkpoints of DeepSpeed or accelerate."
        )


def keeps_packing(model: nn.Module) -> bool:
    """Whether quantised layers of `model` add how their weights are packed to a state dict."""
    return is_packed(model) or getattr(model, "hf_quantizer", None) is not None


def _is_empty(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 0
    return value is None or (isinstance(value, Sized) and not len(value))
