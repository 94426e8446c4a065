"""The memory of what is in use: of a model, of what its optimizer keeps, of lazy parameters that turn real.

It may have been loaded or sharded by anybody. Each rank reads its own part into the memory that it has, so that
optimizers, FSDP2 and engines keep theirs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial, reduce
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from ..accelerators import collective_device
from ..checkpoint.nodes import View
from ..errors import LoadError, UnsupportedError
from ..holdings.fsdp import Managed, records_by_id, shard_of
from ..holdings.holding import LocalShard
from ..holdings.introspection import is_dtensor, is_sharded, lies_in_files, local_of, whole_shape
from ..holdings.own_names import named_buffers, named_parameters
from ..holdings.skeleton import LazyTraining, convert_lazy
from ..holdings.slots import Slot, entry_name, memory_of
from ..ranks.coordinator import Coordinator
from ..settings.config import StreamingConfig
from .base import Batch, Destination, Item, SourcedTensor, source_of
from .exchange import Sharing
from .fill import Targets, chunk_bytes, item_in, itself


if TYPE_CHECKING:
    from .deepspeed.live import EngineMemory


def _refuse_meta(name: str, tensor: torch.Tensor) -> None:
    if tensor.is_meta:
        raise LoadError(
            f"load_into: the model's {name} is on the meta device, without memory. Call "
            "model.to_empty(device=...) first."
        )


class LiveSources(NamedTuple):
    """The tensors of a model in use that are filled, by the checkpoint's names.

    `repeated`: other names of `parameters` that the model has tied, and for which the checkpoint has values too.
    """

    parameters: dict[str, SourcedTensor]
    buffers: dict[str, SourcedTensor]
    repeated: dict[str, SourcedTensor]


def sources_in(live_model: nn.Module, lazy_model: nn.Module, missing: set[str]) -> LiveSources:
    """Pair the tensors of `live_model` with those of the checkpoint, which are in `lazy_model`.

    Raises:
        LoadError: a tensor of `live_model` is not there, has another shape or no memory.
    """
    live: dict[str, Any] = dict(named_buffers(live_model, remove_duplicate=False))
    live.update(named_parameters(live_model, remove_duplicate=False))
    found = LiveSources({}, {}, {})
    seen: set[int] = set()
    for name, lazy in [*lazy_model.named_parameters(), *lazy_model.named_buffers()]:
        view = None if name in missing else source_of(lazy)
        if view is None:
            continue
        tensor = live.get(name)
        shape = None if tensor is None else whole_shape(tensor)
        if tensor is None or shape != lazy.shape:
            described = "no such tensor" if shape is None else tuple(shape)
            raise LoadError(
                f"load_into: the checkpoint's {name} has shape {tuple(lazy.shape)}, the model {described}. "
                "Load a checkpoint of the same architecture and sizes."
            )
        _refuse_meta(name, tensor)
        is_parameter = isinstance(tensor, nn.Parameter)
        kind = (found.repeated if id(tensor) in seen else found.parameters) if is_parameter else found.buffers
        kind[name] = (tensor, view)
        seen.add(id(tensor))
    return found


class SlotMemory(NamedTuple):
    """What a load fills of an optimizer's state, with lazy tensors of the names that :func:`entry_name` gives.

    Attributes:
        wanted: each slot, and the names of those of its elementwise states that are filled.
        whole: tensors that are filled as they are, by the names of lazy tensors of the same shapes.
    """

    wanted: Sequence[tuple[Slot, Sequence[str]]] = ()
    whole: Mapping[str, torch.Tensor] = {}


class LiveModel(Destination):
    """A model in use, and what is kept of it in `slots`.

    Of a sharded model each rank fills its shards, and what is not sharded; of a whole one, ranks read 1/N each, for
    all; of one of DeepSpeed's, partitions, and the masters that optimizers train.

    Raises a LoadError if a parameter of a model that is not sharded has no memory.
    """

    def __init__(
        self, model: nn.Module, coordinator: Coordinator, config: StreamingConfig, *, with_masters: bool = True
    ) -> None:
        """Without masters, what ZeRO-3 trains in place of parameters keeps its values."""
        self._model, self._coordinator = model, coordinator
        self.slots = SlotMemory()
        self.is_sharded = is_sharded(model)
        self._shares_reads = not (self.is_sharded and config.compares_values)
        self._chunk_bytes = 0
        self._engine: EngineMemory | None = None
        self._dtype: torch.dtype | None = None
        if self.is_sharded:
            self.into = "the shards of a model in use"
            self.device = next(local_of(param).device for param in model.parameters())
            return
        for name, param in model.named_parameters():
            _refuse_meta(name, param)
        self.into = "the memory of a model in use"
        self.device = torch.device("cpu") if coordinator.is_alone else collective_device()
        self._chunk_bytes = chunk_bytes(config, self.device)
        self.exchange_settings = ("staging_bytes",)
        if "deepspeed" in sys.modules:
            from .deepspeed.live import EngineMemory  # imports deepspeed, which takes seconds

            self._engine = EngineMemory(model, coordinator, with_masters=with_masters)
            self.device = self._engine.device
            self.hides_zero3 = self.fills_missing = self._engine.is_partitioned
            if self.hides_zero3:
                self.exchange_settings = ()
            # Without the rounding to the model's dtype, where fp32 partitions are trained.
            self._dtype = torch.float32 if self._engine.trains_partitions else None

    def dtype(self, wanted: torch.dtype | None) -> torch.dtype | None:
        if not self.hides_zero3:
            return None
        self._dtype = self._dtype or wanted
        return self._dtype

    @property
    def dtype_of_values(self) -> torch.dtype:
        """The dtype in which transformers can load values so that no parameter is rounded twice."""
        if self._engine is not None and self._engine.masters:
            return torch.float32
        if not self.is_sharded:
            return self._model.dtype
        dtypes = {param.dtype for param in self._model.parameters() if param.is_floating_point()}
        return reduce(torch.promote_types, dtypes)

    def batches(self, model: nn.Module, missing: set[str], tied: set[str]) -> list[Batch]:
        """Batches that fill the live model with the values of the lazy `model`, which stays as it is."""
        lazy, states = (model.model, model.states) if isinstance(model, LazyTraining) else (model, {})
        if self._chunk_bytes:
            sharing = Sharing(self._coordinator, room=self._chunk_bytes)
        else:
            sharing = Sharing(self._coordinator, hints=self.hints, trains_on=self.device.type)
        targets = Targets(self._coordinator, sharing if self._shares_reads else None)
        if lazy is not None:
            self._fill_model(targets, lazy, missing)
        self._fill_slots(targets, states)
        return targets.batches()

    @cached_property
    def _records(self) -> Mapping[int, Managed]:
        return records_by_id(self._model)

    def _fill_model(self, targets: Targets, lazy: nn.Module, missing: set[str]) -> None:
        if self._engine is not None:
            convert_lazy(self._model, lazy, missing)
        sources = sources_in(self._model, lazy, missing)
        if sources.repeated and not self.is_sharded:
            raise LoadError(
                f"load_into: the checkpoint has values for {', '.join(sources.repeated)} too, which the model has "
                "tied to parameters of other names. Save the checkpoint without them."
            )
        if in_files := [name for name, (param, _) in sources.parameters.items() if lies_in_files(param)]:
            raise UnsupportedError(
                f'{len(in_files)} parameters stay in the checkpoint\'s files (frozen_weights="files"), and cannot be '
                f"written to: {', '.join(in_files[:8])}. Leave them out, or load the model with them in memory."
            )
        for name, (param, view) in sources.parameters.items():
            self._fill(targets, name, param, view)
        if self._engine is not None:
            self._engine.fill_swapped(targets)
        targets.add_buffers(sources.buffers)
        for name, (param, view) in sources.repeated.items():
            targets.compare(name, local_of(param), view, self._shard_of(name, param))

    def _shard_of(self, name: str, param: Any) -> LocalShard:
        ranks = self._coordinator.rank, self._coordinator.world_size
        return shard_of(name, param, self._records.get(id(param)), *ranks)

    def _fill(self, targets: Targets, name: str, param: Any, view: View) -> None:
        shard = self._shard_of(name, param)
        if self._engine is not None:
            self._engine.fill(targets, name, param, view, shard)
        else:
            flat = targets.flat(name, local_of(param))
            targets.add(name, flat, view, shard, param, self._records.get(id(param)))

    def _fill_slots(self, targets: Targets, states: Mapping[str, Any]) -> None:
        views = {name: source_of(lazy) for name, lazy in states.items()}
        trained = [(key, member.name) for slot, keys in self.slots.wanted for key in keys for member in slot.members]
        if lacking := sorted({(key, name) for key, name in trained if views.get(entry_name(key, name)) is None}):
            key, _ = lacking[0]
            names = [name for other, name in lacking if other == key]
            raise LoadError(
                f"load_state: {key} of {len(names)} parameters that are trained are not there: "
                f"{', '.join(names[:8])}. Copy the state again, or train the same parameters as when it was saved."
            )
        for slot, keys in self.slots.wanted:
            items = [item for key in keys for item in self._fill_state(targets, slot, key, views)]
            if items:
                targets.after.append(_batch_inside(slot, items))
        whole = {name: (value, view) for name, value in self.slots.whole.items() if (view := views[name]) is not None}
        targets.add_buffers(whole)

    def _fill_state(self, targets: Targets, slot: Slot, key: str, views: Mapping[str, Any]) -> Iterable[Item]:
        """Have the state `key` of a slot filled; returns the items of one that is swapped."""
        record = self._records.get(id(slot.values))
        for member in slot.members:
            name, memory = f"{member.name} ({key})", partial(memory_of, slot, member, key)
            view, (start, stop) = views[entry_name(key, member.name)], member.elements
            copy = int(member.is_whole and member.start > 0)
            shard = LocalShard(member.box, copy, part=(stop - start, start, stop))
            if not slot.is_swapped and not slot.is_in_one_piece:  # as in channels_last: the parameter's own slot
                memory = partial(itself, targets.flat(name, local_of(slot.entries[key])))
            if slot.is_swapped:
                yield item_in(shard, name, view, torch.float32, memory)
            elif is_dtensor(slot.values) and view.sizes == member.box.shape:
                targets.add(name, memory(), view, shard, slot.values, record)
            else:
                targets.add_later(name, memory, slot.flat(key).dtype, view, shard)

    def begin(self) -> None:
        if self._engine is not None:
            self._engine.begin()

    def finish(self) -> None:
        if self._engine is not None:
            self._engine.finish()


def _batch_inside(slot: Slot, items: Sequence[Item]) -> Batch:
    """A batch whose memory is there while the slot is opened."""
    context = slot.opened(changes=True)

    def close() -> None:
        context.__exit__(None, None, None)

    return Batch(items, context.__enter__, close, is_temporary=True)
