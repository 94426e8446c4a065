"""Batches in which the ranks quantise weights together: each reads and quantises 1/N of the values of every weight.

They gather what all have made, one weight after the other; each rank joins it and takes its own bytes. So a rank has
1/N of a batch's values, or of the bytes that are made of them, and the bytes of one weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import starmap
from typing import Any, NamedTuple

import torch

from ...plugin_api import Batch, Coordinator, Item, Target, all_gather, allocating, collective_device
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
        self._received = torch.empty(0)

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

    def _finish(self) -> None:
        made, failure = self._coordinator.run_on_all(self._quantised), None
        for weight in self._weights:
            parts = self._gathered(made.pop(0))
            try:
                if failure is None:
                    row = weight.node.joined(parts)
                    weight.node.record_quant_state(row)
                    weight.take(row)
            except Exception as error:  # raised now, it would leave others in the next collective
                failure = error
        self._received = torch.empty(0)
        # Of one with double scales a mean is a part, whose last digits may be others on another kind of device.
        states = [getattr(weight.node.quantisation, "state", None) for weight in self._weights]
        self._coordinator.require_same(states, failure)

    def _quantised(self) -> list[torch.Tensor]:
        """This rank's part of each weight, in a buffer for the longest part; values are freed one after the other."""
        world_size = self._coordinator.world_size
        where = self._device if self._coordinator.is_alone else collective_device()
        found = []
        for number, (name, node, _) in enumerate(self._weights):
            made = node.quantise(self._values[number])
            self._values[number] = torch.empty(0)
            with allocating(name, node.part_nbytes(world_size), where, self._coordinator.rank):
                buffer = torch.zeros(node.part_nbytes(world_size), dtype=torch.uint8, device=where)
            buffer[: made.numel()] = made
            found.append(buffer)
        if world_size > 1:
            nbytes = world_size * max(map(len, found))
            with allocating("one of the weights that are quantised", nbytes, where, self._coordinator.rank):
                self._received = torch.empty(nbytes, dtype=torch.uint8, device=where)
        return found

    def _gathered(self, made: torch.Tensor) -> Sequence[torch.Tensor]:
        """The parts of a weight that all ranks have made (all ranks)."""
        world_size = self._coordinator.world_size
        if world_size == 1:
            return [made]
        received = self._received[: world_size * len(made)]
        self._coordinator.run(all_gather, received, made)
        return received.split(len(made))
