"""Tensors that a checkpoint's index promises and no shard holds: who asks for one shows that the model wants it."""

from __future__ import annotations

from typing import Any

import torch

from .lazy import LazyTensor
from .nodes import HostTensor, View


__all__ = ["AbsentSlice"]


class AbsentSlice:
    """Stands in a state dict for a tensor that is not there, as :class:`.lazy.CheckpointSlice` for one that is.

    Attributes:
        is_wanted: whether its values were asked for.
    """

    def __init__(self) -> None:
        self.is_wanted = False

    def __getitem__(self, index: Any) -> torch.Tensor:
        """An empty tensor; whoever asks has a fault reported that is better than what becomes of this."""
        self.is_wanted = True
        return LazyTensor.of(View.whole(HostTensor.of(torch.empty(0)), (0,)), _nothing)

    def get_shape(self) -> list[int]:
        return [0]

    def get_dtype(self) -> str:
        return "F32"


def _nothing(view: View) -> torch.Tensor:
    return torch.empty(view.sizes, dtype=view.node.dtype)
