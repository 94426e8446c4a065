"""What a load into a training fills: a model in use, what an optimizer keeps of it, or both together."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from ..errors import LoadError
from ..holdings.fsdp import Managed
from ..holdings.holding import LocalShard
from ..holdings.introspection import is_dtensor, is_sharded
from ..holdings.slots import Slot, entry_name, memory_of
from ..planning.plan import Target
from ..ranks.coordinator import Coordinator
from ..settings.config import StreamingConfig
from .base import Batch, Destination, Item, flat_items, narrowed, source_of
from .live_memory import LiveShards, LiveWhole
from .sharing import Sharing


def live_destination(
    model: nn.Module, coordinator: Coordinator, config: StreamingConfig, *, with_masters: bool = True
) -> Destination:
    """The destination for the values of `model`: in shards, in ZeRO's partitions, or whole on every rank.

    Without masters, what ZeRO-3 trains in place of parameters keeps its values. Raises a LoadError if a parameter has
    no memory.
    """
    if is_sharded(model):
        return LiveShards(model, coordinator, shares_reads=not config.compares_values)
    if without_memory := [name for name, param in model.named_parameters() if param.is_meta]:
        raise LoadError(
            f"load_into: the model's {without_memory[0]} is on the meta device, without memory. Call "
            "model.to_empty(device=...) first."
        )
    if "deepspeed" not in sys.modules:
        return LiveWhole(model, coordinator, config)
    from .deepspeed.live import LiveModel  # imports deepspeed, which takes seconds

    return LiveModel(model, coordinator, config, with_masters=with_masters)


class SlotMemory(Destination):
    """Elementwise states of slots, which a checkpoint of the same parameters fills.

    Args:
        wanted: each slot, and the names of those of its states that are filled.
        whole: tensors that are filled as they are, by the names of lazy parameters of the same shapes.
        records: FSDP2's records of parameters, by the ``id`` of each.
        shares_reads: ranks read for each other what several hold.
    """

    def __init__(
        self,
        wanted: Sequence[tuple[Slot, Sequence[str]]],
        device: torch.device,
        coordinator: Coordinator,
        *,
        whole: Mapping[str, torch.Tensor],
        records: Mapping[int, Managed],
        hides_zero3: bool,
        shares_reads: bool,
    ) -> None:
        self.device, self.hides_zero3, self._wanted, self._whole = device, hides_zero3, wanted, whole
        self._coordinator, self._records, self._shares_reads = coordinator, records, shares_reads

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
        sharing = Sharing(self._coordinator, self.hints, self.device.type, is_on=self._shares_reads)
        items: list[tuple[Slot, list[Item]]] = []
        for slot, keys in self._wanted:
            own = [key for key in keys if not self._is_taken(sharing, slot, key, views)]
            items.append((slot, [item for key in own for item in _items(slot, key, views)]))
        whole = {
            name: (value.view(-1), view) for name, value in self._whole.items() if (view := views[name]) is not None
        }
        opened = [item for slot, of_slot in items if not slot.is_swapped for item in of_slot]
        in_memory = Batch([*flat_items(whole), *opened])
        swapped = [_batch_inside(slot, of_slot) for slot, of_slot in items if slot.is_swapped]
        return [in_memory, *sharing.batches(), *swapped]

    def _is_taken(self, sharing: Sharing, slot: Slot, key: str, views: Mapping[str, Any]) -> bool:
        """Whether ranks read together a state of a slot: of a DTensor, which is cut as that is."""
        if not is_dtensor(slot.values):
            return False
        (member,) = slot.members
        view, shard = views[entry_name(key, member.name)], LocalShard(member.box, 0, 1)
        if view.sizes != member.box.shape:  # it is cut already
            return False
        memory, record = memory_of(slot, member, key), self._records.get(id(slot.values))
        return sharing.takes(f"{member.name} ({key})", memory, view, shard, slot.values, record)


def _items(slot: Slot, key: str, views: Mapping[str, Any]) -> Iterator[Item]:
    for member in slot.members:
        start, stop = member.elements
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


class LazyParts(nn.Module):
    """The lazy models of several memories, as one, each with its missing and its tied names."""

    def __init__(self, parts: Sequence[tuple[nn.Module, set[str], set[str]]]) -> None:
        super().__init__()
        self.parts = parts

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        return chain.from_iterable(lazy.named_parameters(*args, **kwargs) for lazy, _, _ in self.parts)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        return chain.from_iterable(lazy.named_buffers(*args, **kwargs) for lazy, _, _ in self.parts)


class Together(Destination):
    """These `memories`, of which each is filled by its own part of :class:`LazyParts`."""

    def __init__(self, memories: Sequence[Destination]) -> None:
        self._memories = memories
        self.device, self.into = memories[0].device, memories[0].into
        self.hides_zero3 = any(memory.hides_zero3 for memory in memories)
        self.fills_missing = any(memory.fills_missing for memory in memories)
        self.exchange_settings = [*chain.from_iterable(memory.exchange_settings for memory in memories)]

    def batches(
        self, model: nn.Module, missing: set[str], tied: set[str], *, only_planned: bool = False
    ) -> list[Batch]:
        assert isinstance(model, LazyParts)
        for memory in self._memories:
            memory.hints = self.hints
        pairs = zip(self._memories, model.parts, strict=True)
        return [*chain.from_iterable(memory.batches(*part, only_planned=only_planned) for memory, part in pairs)]

    def check(self, targets: Sequence[Target]) -> None:
        for memory in self._memories:
            memory.check(targets)

    def allocate(self) -> None:
        for memory in self._memories:
            memory.allocate()

    def finish(self) -> None:
        for memory in self._memories:
            memory.finish()
