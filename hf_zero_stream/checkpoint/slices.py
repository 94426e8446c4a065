"""What stands for a checkpoint's tensors in a state dict: nothing has been read, as with safetensors' slices."""

from __future__ import annotations

from typing import Any

import torch

from .format import TensorEntry
from .index import CheckpointIndex
from .lazy import LazyTensor, Materialise, whole_meta
from .nodes import FileTensor, HostTensor, Node, View
from .safetensors import dtype_name


__all__ = ["AbsentSlice", "CheckpointSlice", "checkpoint_slices"]


class CheckpointSlice:
    """Stands for one checkpoint tensor in a state dict, as ``safetensors.safe_open(...).get_slice`` does.

    Indexing it gives a :class:`LazyTensor`; nothing is read.
    """

    __slots__ = ("_materialise", "_node", "_shape")

    def __init__(self, node: Node, shape: tuple[int, ...], materialise: Materialise) -> None:
        self._node = node
        self._shape = shape
        self._materialise = materialise

    def __getitem__(self, index: Any) -> torch.Tensor:
        tensor = LazyTensor(whole_meta(self._shape, self._node.dtype), self._node, self._materialise)
        return tensor if index is Ellipsis else tensor[index]

    def get_shape(self) -> list[int]:
        return list(self._shape)

    def get_dtype(self) -> str:
        """The dtype's name in the safetensors format, for instance ``"BF16"``."""
        return dtype_name(self._node.dtype)


class AbsentSlice:
    """Stands for a tensor that the checkpoint's index promises and no shard holds.

    Code that asks for it shows that the model wants it.

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


def checkpoint_slices(index: CheckpointIndex, materialise: Materialise) -> dict[str, CheckpointSlice]:
    """A state dict of lazy slices, one for each tensor of `index`."""

    def slice_of(entry: TensorEntry) -> CheckpointSlice:
        node = FileTensor(torch.Size(entry.shape).numel(), entry.dtype, entry)
        return CheckpointSlice(node, entry.shape, materialise)

    return {name: slice_of(entry) for name, entry in index.tensors.items()}
