"""Which elements of the tensors that a worker gets its own loaders read: its slices of them.

The loaders run as they are. What they are given are tensors whose class sees each function that is called with one;
and each operator of torch's is looked at, in case one gets the same memory by another tensor. A view reads nothing;
anything else reads all elements of what it is given. So a function that is not known costs bytes only.
"""

from __future__ import annotations

import gc
from bisect import bisect_right
from collections.abc import Sequence
from math import prod
from typing import Any, ClassVar, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map


Ranges = Sequence[Sequence[int]]
"""A box of a tensor: its first and last index, plus one, along each dimension."""

_LOOK = {
    *("size", "stride", "dim", "ndimension", "numel", "nelement", "element_size", "storage_offset", "is_contiguous"),
    *("is_floating_point", "is_complex", "get_device", "type", "__get__", "__len__", "__hash__"),
}
"""Functions that tell something of a tensor, and nothing of its values, if they return no tensor."""


class _WatchedRange(NamedTuple):
    """A tensor in a piece of memory, from byte `at` on; what is `there` has values."""

    at: int
    name: str
    shape: tuple[int, ...]
    itemsize: int
    there: Ranges


class Reads(TorchDispatchMode):
    """Records the reads of the tensors that :meth:`watched` gives, until :meth:`end`; loaders run inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self._memories: dict[int, tuple[StorageWeakRef, list[_WatchedRange]]] = {}  # by their addresses
        self._read: dict[str, Ranges] = {}
        self._class = type("Watched", (_Watched,), {"reads": self})

    def watched(
        self, tensors: Sequence[tuple[str, torch.Tensor]], there: Sequence[Ranges]
    ) -> list[tuple[str, torch.Tensor]]:
        """The tensors, to be given to loaders; of each, only the elements in the ranges `there` have values."""
        return [
            (name, self._watch(name, tensor, ranges)) for (name, tensor), ranges in zip(tensors, there, strict=True)
        ]

    def _watch(self, name: str, tensor: torch.Tensor, there: Ranges) -> torch.Tensor:
        if not tensor.numel():
            return tensor
        if not self.knows(tensor):
            storage = tensor.untyped_storage()
            self._memories[storage.data_ptr()] = StorageWeakRef(storage), []
        at = tensor.storage_offset() * tensor.itemsize
        given = _WatchedRange(at, name, tuple(tensor.shape), tensor.itemsize, there)
        self._memories[tensor.untyped_storage().data_ptr()][1].append(given)
        return tensor.as_subclass(self._class)

    def end(self) -> dict[str, Ranges]:
        """Return the ranges read, by tensor; the whole of a tensor to which somebody still refers."""
        gc.collect()
        for memory, tensors in self._memories.values():
            if not memory.expired():
                self._read.update({given.name: whole(given.shape) for given in tensors})
        self._memories.clear()
        return self._read

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            for each in tree_leaves((args, kwargs)):
                if isinstance(each, torch.Tensor) and self.knows(each):
                    self.note(each)
        return func(*args, **(kwargs or {}))

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether it lies in memory of a watched tensor, and not where such a one has been."""
        if tensor.layout != torch.strided:
            return False
        storage = tensor.untyped_storage()
        found = self._memories.get(storage.data_ptr())
        return found is not None and found[0] == StorageWeakRef(storage)

    def note(self, view: torch.Tensor) -> None:
        """All elements of `view` are read.

        Raises:
            RuntimeError: they are not there.
        """
        if not view.numel():
            return
        _, tensors = self._memories[view.untyped_storage().data_ptr()]
        first = view.storage_offset() * view.itemsize
        given = tensors[bisect_right(tensors, first, key=lambda each: each.at) - 1]
        ranges = _around(view, first - given.at, given)
        if any(one[0] < has[0] or has[1] < one[1] for has, one in zip(given.there, ranges, strict=True)):
            raise RuntimeError(
                f"{given.name}: the engine's loader reads {list(ranges)} of it. At the first update it read "
                f"{list(given.there)}, so no more was sent. Send to an engine whose ranks keep their parts of the "
                "model, or without `direct`."
            )
        before = self._read.get(given.name, ranges)
        self._read[given.name] = tuple(
            (min(one[0], other[0]), max(one[1], other[1])) for one, other in zip(before, ranges, strict=True)
        )


def whole(shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
    return tuple((0, size) for size in shape)


def _around(view: torch.Tensor, first: int, given: _WatchedRange) -> Ranges:
    """A box around the elements of a `view` that begins at byte `first` of a row-major tensor."""
    units = [prod(given.shape[dim + 1 :]) * given.itemsize for dim in range(len(given.shape))]
    begins = [first // unit % size for unit, size in zip(units, given.shape, strict=True)]
    steps = [0] * len(units)  # to the last index
    if units:
        steps[-1] = (view.itemsize - 1) // given.itemsize
    for size, stride in zip(view.shape, view.stride(), strict=True):
        stride *= view.itemsize
        if size > 1 and stride:
            dim = next((dim for dim, unit in enumerate(units) if stride % unit == 0), len(units) - 1)
            steps[dim] += -(-(size - 1) * stride // units[dim])
    found = tuple((begin, begin + step + 1) for begin, step in zip(begins, steps, strict=True))
    if all(end <= size for (_, end), size in zip(found, given.shape, strict=True)):
        return found
    last = first + sum((size - 1) * each for size, each in zip(view.shape, view.stride(), strict=True)) * view.itemsize
    return ((first // units[0], last // units[0] + 1), *whole(given.shape[1:]))  # it goes on in the next rows


class _Watched(torch.Tensor):
    reads: ClassVar[Reads]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        reads = cls.reads
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            tensors = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
            given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, cls) and reads.knows(each)]
            views = [each for each in tensors if reads.knows(each)]
            only_looks = not tensors and func.__name__ in _LOOK
            if not only_looks and not (views and len(given) == 1):
                for each in given:
                    reads.note(each)
            if not views:
                return result
            return tree_map(
                lambda each: each.as_subclass(cls) if isinstance(each, torch.Tensor) and reads.knows(each) else each,
                result,
            )
