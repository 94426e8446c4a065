"""Tensors whose values are not in their own memory: lazy, on the meta device, or wrapped around other tensors."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from ..errors import UnsupportedError
from .lazy import LazyTensor


def lacks_values(tensor: torch.Tensor) -> bool:
    """Whether `tensor`, or one that it holds, is lazy, on the meta device or not initialised."""
    if isinstance(tensor, (LazyTensor, UninitializedParameter, UninitializedBuffer)) or tensor.is_meta:
        return True
    if type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        return False
    flatten = getattr(tensor, "__tensor_flatten__", None)  # torch's own protocol for wrappers
    held = vars(tensor).values() if flatten is None else [getattr(tensor, name) for name in flatten()[0]]
    return any(lacks_values(value) for value in held if isinstance(value, torch.Tensor))


def refuse_wrapped(tensors: Iterable[tuple[str, torch.Tensor]], doing: str, instead: str) -> None:
    """Raise an UnsupportedError (``{doing}: ... {instead}``) for a wrapper tensor: its bytes are not its values."""
    for name, tensor in tensors:
        if hasattr(type(tensor), "__tensor_flatten__") and not isinstance(tensor, LazyTensor):
            raise UnsupportedError(
                f"{doing}: expected plain tensors or ZeRO partitions; {name} is a {type(tensor).__name__}, which "
                f"holds other tensors in its place. {instead}"
            )
