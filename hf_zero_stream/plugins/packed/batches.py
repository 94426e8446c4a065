"""Batches in which the ranks quantise weights together: each reads and quantises 1/N of the values of every weight.

One rank joins what all have made of a weight and sends it to all, each of which takes its own bytes. So a rank has
1/N of a batch's values, the bytes of those weights that it joins, and the bytes of one weight that is being sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import starmap
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ...plugin_api import Batch, Coordinator, Item, Target, allocating, collective_device
from .quantised_rows import Quantised


VALUES_BYTES = 64 * 2**20
"""Most bytes of values that a rank has at one time, but for weights whose part alone is larger; equal on all ranks."""


class ToQuantise(NamedTuple):
    """A weight that is quantised while it is loaded; `take` is called with all of its bytes (uint8, flat)."""

    name: str
    node: Quantised
    take: Callable[[torch.Tensor], None]


def quantising_batches(
    weights: Sequence[tuple[str, Any, Callable[[torch.Tensor], None]]], coordinator: Coordinator, device: torch.device
) -> Iterator[Batch]:
    """Batches that fill `weights` (see :class:`ToQuantise`); the values are on `device` when they are quantised."""
    group: list[ToQuantise] = []
    nbytes = 0
    for weight in starmap(ToQuantise, weights):
        source = weight.node.source
        part = weight.node.part(0, coordinator.world_size)[0] * source.node.dtype.itemsize
        if group and nbytes + part > VALUES_BYTES:
            yield _BatchGroup(group, coordinator, device).batch()
            group, nbytes = [], 0
        group.append(weight)
        nbytes += part
    if group:
        yield _BatchGroup(group, coordinator, device).batch()


class _BatchGroup:
    """The weights of one batch."""

    def __init__(self, weights: Sequence[ToQuantise], coordinator: Coordinator, device: torch.device) -> None:
        self._weights = weights
        self._coordinator = coordinator
        self._device = device
        self._values: list[torch.Tensor] = []

    def batch(self) -> Batch:
        rank, world_size = self._coordinator.rank, self._coordinator.world_size
        items = []
        for number, (name, node, _) in enumerate(self._weights):
            _, start, stop = node.part(rank, world_size)
            target = Target(name, node.source.node.dtype, stop - start, start, stop)
            items.append(Item(target, node.source, partial(self._memory, number)))
        begin = partial(self._begin, [item.target for item in items])
        return Batch(items, begin, self._finish, is_collective=True, is_temporary=True)

    def _begin(self, targets: Sequence[Target]) -> None:
        nbytes = sum(target.nbytes for target in targets)
        names = f"the values of {targets[0].name} and {len(targets) - 1} other weights, to quantise them,"
        with allocating(names, nbytes, self._device, self._coordinator.rank):
            self._values = [torch.empty(each.numel, dtype=each.dtype, device=self._device) for each in targets]

    def _memory(self, number: int) -> torch.Tensor:
        return self._values[number]

    def _joins(self, number: int) -> int:
        """The rank that joins the weight `number`: each joins some."""
        return number % self._coordinator.world_size

    def _finish(self) -> None:
        # Only what cannot fail stands between agreements: a rank that raised would leave others in a collective.
        coordinator = self._coordinator
        made = coordinator.run_on_all(self._quantised)
        gathered = [self._gathered(number, each) for number, each in enumerate(made)]
        del made
        rows = coordinator.run_on_all(partial(self._joined, gathered))
        for number, weight in enumerate(self._weights):
            row = self._sent(number, weight.node, rows.pop(number, None))
            weight.node.record_quant_state(row)
            weight.take(row)

    def _quantised(self) -> list[torch.Tensor]:
        """This rank's part of each weight, in a buffer for the longest part; values are freed one after the other."""
        where = self._device if self._coordinator.is_alone else collective_device()
        found = []
        for number, (name, node, _) in enumerate(self._weights):
            made = node.quantise(self._values[number])
            self._values[number] = torch.empty(0)
            longest = node.part_nbytes(self._coordinator.world_size)
            with allocating(name, longest, where, self._coordinator.rank):
                buffer = torch.zeros(longest, dtype=torch.uint8, device=where)
            buffer[: made.numel()] = made
            found.append(buffer)
        return found

    def _gathered(self, number: int, made: torch.Tensor) -> list[torch.Tensor]:
        """Gather the parts of a weight that all ranks have made, on the rank that joins it; others return nothing."""
        world_size, joins = self._coordinator.world_size, self._joins(number)
        if world_size == 1:
            return [made]
        parts = [torch.empty_like(made) for _ in range(world_size)] if joins == self._coordinator.rank else None
        self._coordinator.run(dist.gather, made, parts, joins)
        return parts or []

    def _joined(self, gathered: Sequence[list[torch.Tensor]]) -> dict[int, torch.Tensor]:
        """The weights that this rank joins, by number; frees the parts."""
        rows = {}
        for number, parts in enumerate(gathered):
            if parts:
                rows[number] = self._weights[number].node.joined(parts)
                parts.clear()
        return rows

    def _sent(self, number: int, node: Quantised, row: torch.Tensor | None) -> torch.Tensor:
        """All bytes of a weight: `row` on the rank that has joined it, and sends it to the others."""
        if self._coordinator.world_size > 1:
            if row is None:
                assert node.weight is not None
                row = torch.empty(node.weight.row_bytes, dtype=torch.uint8, device=collective_device())
            self._coordinator.run(dist.broadcast, row, self._joins(number))
        assert row is not None
        return row
