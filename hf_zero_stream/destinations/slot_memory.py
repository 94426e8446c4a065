"""Memory of an optimizer's states for each element (see :mod:`..holdings.slots`), which a resume fills."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ..errors import LoadError
from ..holdings.slots import Slot, entry_name, memory_of
from ..planning.plan import Target
from .base import Batch, Destination, Item, flat_items, narrowed, source_of


class SlotMemory(Destination):
    """Elementwise states of slots, which a checkpoint of the same parameters fills.

    Args:
        wanted: each slot, and the names of those of its states that are filled.
        whole: tensors that are filled as they are, by the names of lazy parameters of the same shapes.
    """

    def __init__(
        self,
        wanted: Sequence[tuple[Slot, Sequence[str]]],
        device: torch.device,
        *,
        whole: Mapping[str, torch.Tensor],
        hides_zero3: bool,
    ) -> None:
        self.device, self.hides_zero3, self._wanted, self._whole = device, hides_zero3, wanted, whole

    def batches(
        self, model: nn.Module, missing: set[str], tied: set[str], *, only_planned: bool = False
    ) -> list[Batch]:
        """Batches that fill the slots with lazy parameters of the names that :func:`entry_name` gives."""
        views = {name: source_of(param) for name, param in model.named_parameters()}
        trained = [(key, member.name) for slot, keys in self._wanted for key in keys for member in slot.members]
        if lacking := sorted({(key, name) for key, name in trained if views.get(entry_name(key, name)) is None}):
            key, _ = lacking[0]
            names = [name for other, name in lacking if other == key]
            raise LoadError(
                f"load_state: {key} of {len(names)} parameters that are trained are not there: "
                f"{', '.join(names[:8])}. Copy the state again, or train the same parameters as when it was saved."
            )
        items = [(slot, [item for key in keys for item in _items(slot, key, views)]) for slot, keys in self._wanted]
        whole = {
            name: (value.view(-1), view) for name, value in self._whole.items() if (view := views[name]) is not None
        }
        opened = [item for slot, of_slot in items if not slot.is_swapped for item in of_slot]
        in_memory = Batch([*flat_items(whole), *opened])
        return [in_memory, *(_batch_inside(slot, of_slot) for slot, of_slot in items if slot.is_swapped)]


def _items(slot: Slot, key: str, views: Mapping[str, Any]) -> Iterator[Item]:
    for member in slot.members:
        start, stop = member.held
        view = views[entry_name(key, member.name)]
        # Converted parameters are already cut to the box.
        box = None if member.box.is_whole or view.sizes != member.box.shape else member.box
        target = Target(
            f"{member.name} ({key})",
            torch.float32 if slot.is_swapped else slot.flat(key).dtype,
            stop - start,
            start,
            stop,
            box,
            is_copy=member.is_whole and member.start > 0,
        )
        memory = partial(memory_of, slot, member, key)
        yield Item(target, view if box is None else narrowed(view, box), memory)


def _batch_inside(slot: Slot, items: Sequence[Item]) -> Batch:
    """A batch whose memory is there while the slot is opened."""
    context = slot.opened(changes=True)

    def close() -> None:
        context.__exit__(None, None, None)

    return Batch(items, context.__enter__, close, is_temporary=True)
