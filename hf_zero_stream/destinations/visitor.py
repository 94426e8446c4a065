"""A destination that keeps no values: they pass through one bounded buffer, and a function sees each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import nn

from ..planning.plan import Target
from .base import Batch, Destination, Item, source_of


Visit = Callable[[str, int, torch.Tensor], None]
"""A function of a name, the number of the first element, and flat values, which are gone afterwards."""


class Visitor(Destination):
    """Calls `visit` with one of `parts` equal parts of all elements of a lazy model, in the order of its tensors.

    Args:
        part: the number of this part.
        buffer_bytes: size of the buffer.
    """

    into = "nothing: they are only looked at"
    hides_zero3 = True

    def __init__(self, visit: Visit, part: int, parts: int, buffer_bytes: int) -> None:
        self._visit, self._part, self._parts, self._buffer_bytes = visit, part, parts, buffer_bytes

    def dtype(self, wanted: torch.dtype | None) -> torch.dtype | None:
        return wanted

    def batches(
        self, model: nn.Module, missing: set[str], tied: set[str], *, only_planned: bool = False
    ) -> list[Batch]:
        """Batches that use the buffer one after the other."""
        batches: list[Batch] = []
        items: list[Item] = []
        nbytes = 0
        for item in self._items(model):
            if items and nbytes + item.target.nbytes > self._buffer_bytes:
                batches.append(self._batch(items))
                items, nbytes = [], 0
            items.append(item)
            nbytes += item.target.nbytes
        return [*batches, self._batch(items)] if items else batches

    def _items(self, model: nn.Module) -> Iterator[Item]:
        """Yield this part, in pieces that fit into the buffer; the memory of each comes with its batch."""
        named = [*model.named_parameters(), *model.named_buffers()]
        views = {name: view for name, tensor in named if (view := source_of(tensor)) is not None}
        total = sum(view.numel for view in views.values())
        first, last = (total * number // self._parts for number in (self._part, self._part + 1))
        before = 0
        for name, view in views.items():
            dtype = view.node.dtype
            start, stop = max(first - before, 0), min(last - before, view.numel)
            before += view.numel
            step = max(1, self._buffer_bytes // dtype.itemsize)
            for begin in range(start, stop, step):
                end = min(stop, begin + step)
                yield Item(Target(name, dtype, end - begin, begin, end), view, torch.Tensor)

    def _batch(self, items: list[Item]) -> Batch:
        memory: dict[int, torch.Tensor] = {}

        def begin() -> None:
            memory.update(
                {number: torch.empty(it.target.numel, dtype=it.target.dtype) for number, it in enumerate(items)}
            )

        def finish() -> None:
            for number, it in enumerate(items):
                self._visit(it.target.name, it.target.start, memory.pop(number))

        placed = [Item(it.target, it.view, partial(memory.__getitem__, number)) for number, it in enumerate(items)]
        return Batch(placed, begin, finish, is_temporary=True)
