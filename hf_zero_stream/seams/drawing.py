"""Draws the random numbers that a model's ``__init__`` asks for on the meta device, where it gets none."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map


class DrawOnDevice(TorchDispatchMode):
    """Inside, what is drawn on the meta device is also drawn on `device`, as stock does there, and dropped."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and _is_on_meta((args, kwargs)):
            real_args, real_kwargs = tree_map(self._real, (args, kwargs))
            func(*real_args, **real_kwargs)
        return func(*args, **kwargs)

    def _real(self, value: Any) -> Any:
        """`value` on the device, if it is a tensor of the meta device or names that."""
        if isinstance(value, torch.Tensor) and value.is_meta:
            return torch.zeros(value.shape, dtype=value.dtype, device=self._device)
        return self._device if isinstance(value, torch.device) and value.type == "meta" else value


def _is_on_meta(values: Any) -> bool:
    return any(getattr(value, "is_meta", False) or value == torch.device("meta") for value in tree_leaves(values))
