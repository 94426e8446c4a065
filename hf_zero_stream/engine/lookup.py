"""Looks up elements of a lazy tensor one by one: slow and simple, as a second opinion on planned reads.

Each element's place is followed through the nodes by index arithmetic, so that a fault in a load's boxes, reads or
copies would be seen. Most elements stay together in runs, which are kept as ranges.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from math import prod
from typing import TypeAlias

import torch

from ..checkpoint.format import TensorEntry
from ..checkpoint.nodes import Cat, Computed, Copy, FileTensor, HostTensor, Node, Pointwise, View, row_major_strides
from ..sources.base import ByteSource


Positions: TypeAlias = range | torch.Tensor
"""Positions in a flat buffer: consecutive, or int64 in any order."""

SEEK_BYTES = 512
"""A hole of at most this many bytes between two elements of a file is read through."""


class Lookup:
    """Looks up elements in the shards of a checkpoint; safe to use from several threads.

    `compute` gives the values of a view of a function's result (see :class:`.compute.Evaluator`): functions are
    evaluated as in a load, from inputs that are read again.
    """

    def __init__(self, source: ByteSource, compute: Callable[[View], torch.Tensor]) -> None:
        self._source = source
        self._compute = compute
        self._computing = threading.Lock()

    def values(self, view: View, at: Positions) -> torch.Tensor:
        """The elements `at` of `view`, which count in row-major order; 1-d, of its dtype, in host memory."""
        return self._of_node(view.node, _positions(view, at))

    def _of_node(self, node: Node, at: Positions) -> torch.Tensor:
        if not len(at):
            return torch.empty(0, dtype=node.dtype)
        match node:
            case FileTensor(entry=entry):
                return self._read(entry, at)
            case HostTensor(tensor=tensor):
                return tensor[at.start : at.stop] if isinstance(at, range) else tensor[at]
            case Copy(source=source):
                return self.values(source, at).to(node.dtype)
            case Cat():
                return self._of_cat(node, at)
            case Pointwise():
                return node.result(lambda arg: self.values(arg, at) if arg.sizes else self.values(arg, range(1))[0])
            case Computed():
                return self._of_function(node, at)
            case _:
                raise TypeError(f"a {type(node).__name__} has no values in files")

    def _of_cat(self, node: Cat, at: Positions) -> torch.Tensor:
        inner, total = prod(node.sizes[node.dim + 1 :]), node.sizes[node.dim]
        if isinstance(at, range) and prod(node.sizes[: node.dim]) == 1:  # the pieces lie one behind the other
            parts = []
            for piece, first in zip(node.pieces, node.starts, strict=False):
                begin = max(at.start, first * inner)
                end = min(at.stop, first * inner + piece.numel)
                if begin < end:
                    parts.append(self.values(piece, range(begin - first * inner, end - first * inner)))
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        at = _as_tensor(at)
        outer, along, inside = at // (total * inner), at // inner % total, at % inner
        number = torch.searchsorted(torch.tensor(node.starts), along, right=True) - 1
        values = torch.empty(len(at), dtype=node.dtype)
        for which in number.unique().tolist():
            chosen = number == which
            size, row = node.pieces[which].sizes[node.dim], along[chosen] - node.starts[which]
            values[chosen] = self.values(node.pieces[which], (outer[chosen] * size + row) * inner + inside[chosen])
        return values

    def _of_function(self, node: Node, at: Positions) -> torch.Tensor:
        begin, end = (at.start, at.stop) if isinstance(at, range) else (int(at.min()), int(at.max()) + 1)
        with self._computing:
            values = self._compute(View(node, (end - begin,), (1,), begin))
        return values if isinstance(at, range) else values[at - begin]

    def _read(self, entry: TensorEntry, at: Positions) -> torch.Tensor:
        if isinstance(at, range):
            return self._read_run(entry, at.start, at.stop)
        ordered, order = at.sort()
        jumps = ((ordered.diff() - 1) * entry.dtype.itemsize > SEEK_BYTES).nonzero().view(-1) + 1
        values = torch.empty(len(at), dtype=entry.dtype)
        for run, places in zip(ordered.tensor_split(jumps), order.tensor_split(jumps), strict=True):
            first = int(run[0])
            values[places] = self._read_run(entry, first, int(run[-1]) + 1)[run - first]
        return values

    def _read_run(self, entry: TensorEntry, start: int, stop: int) -> torch.Tensor:
        itemsize = entry.dtype.itemsize
        data = torch.empty((stop - start) * itemsize, dtype=torch.uint8)
        self._source.read_into(entry.shard, entry.start + start * itemsize, [memoryview(data.numpy())])
        return data.view(entry.dtype)


def _positions(view: View, at: Positions) -> Positions:
    """Where elements of `view`, counted in row-major order, lie in its node's buffer."""
    held = [(size, stride) for size, stride in zip(view.sizes, view.strides, strict=True) if size != 1]
    sizes = tuple(size for size, _ in held)
    if tuple(stride for _, stride in held) == row_major_strides(sizes):
        if isinstance(at, range):
            return range(at.start + view.offset, at.stop + view.offset)
        return at + view.offset
    index = _as_tensor(at)
    places = torch.full_like(index, view.offset)
    for size, stride in reversed(held):
        places += index % size * stride
        index = index // size
    return places


def _as_tensor(at: Positions) -> torch.Tensor:
    return torch.arange(at.start, at.stop) if isinstance(at, range) else at
