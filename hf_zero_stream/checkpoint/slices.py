"""What stands for a checkpoint's tensors in a state dict before anything is read, like safetensors' slices."""

from __future__ import annotations

from typing import Any

import torch

from .index import CheckpointIndex
from .lazy import LazyTensor, Materialise
from .nodes import FileTensor, HostTensor, Node
from .safetensors import dtype_name


__all__ = ["AbsentSlice", "CheckpointSlice", "checkpoint_slices"]


class CheckpointSlice:
    """One tensor, like ``safetensors.safe_open(...).get_slice``; indexing it gives a :class:`LazyTensor`."""

    __slots__ = ("_materialise", "_node")

    def __init__(self, node: Node, materialise: Materialise) -> None:
        self._node = node
        self._materialise = materialise

    def __getitem__(self, index: Any) -> torch.Tensor:
        tensor = LazyTensor.whole(self._node, self._materialise)
        return tensor if index is Ellipsis else tensor[index]

    def get_shape(self) -> list[int]:
        return list(self._node.sizes)

    def get_dtype(self) -> str:
        return dtype_name(self._node.dtype)


class AbsentSlice(CheckpointSlice):
    """A tensor that the checkpoint's index promises and no shard holds; `is_wanted` once somebody indexed it."""

    def __init__(self) -> None:
        super().__init__(HostTensor.of(torch.empty(0, dtype=torch.float32)), lambda view: torch.empty(0))
        self.is_wanted = False

    def __getitem__(self, index: Any) -> torch.Tensor:
        self.is_wanted = True
        return super().__getitem__(...)  # empty: the load reports the missing tensor before the model is used


def checkpoint_slices(
    index: CheckpointIndex, materialise: Materialise, first_shard: int = 0
) -> dict[str, CheckpointSlice]:
    """A state dict of lazy slices of `index`, whose shards are numbered from `first_shard` on."""

    slices: dict[str, CheckpointSlice] = {}
    for name, entry in index.tensors.items():
        if first_shard:
            entry = entry._replace(shard=entry.shard + first_shard)
        slices[name] = CheckpointSlice(FileTensor(entry.shape, entry.dtype, entry), materialise)
    return slices
