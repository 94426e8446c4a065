"""A model in use, what an optimizer keeps of it, and which tensors of a checkpoint are for either.

What DTensor shards (FSDP2, HSDP, tensor and expert parallelism) may have been loaded or sharded by anybody. Each rank
reads its own local shards into the memory that they have, so that optimizers and FSDP2 keep theirs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
from torch import nn

from ..accelerators import collective_device
from ..errors import LoadError
from ..holdings.fsdp import Managed, local_shard_of, records_by_id
from ..holdings.introspection import local_of, whole_shape
from ..holdings.own_names import named_buffers, named_parameters
from ..ranks.coordinator import Coordinator
from ..settings.config import StreamingConfig
from .base import Batch, Destination, Item, SourcedTensor, flat_items, item_of, narrowed, source_of
from .exchange import replica_batches
from .replicated import chunk_bytes
from .sharing import Sharing


class LiveWhole(Destination):
    """The memory of the model's parameters and buffers; ranks share the reading, and exchange what they have read."""

    into = "the memory of a model in use"

    exchange_settings: Sequence[str] = ("staging_bytes",)

    def __init__(self, model: nn.Module, coordinator: Coordinator, config: StreamingConfig) -> None:
        self._model = model
        self._coordinator = coordinator
        self.device = torch.device("cpu") if coordinator.is_alone else collective_device()
        self._chunk_bytes = chunk_bytes(config, self.device)

    def batches(
        self, model: nn.Module, missing: set[str], tied: set[str], *, only_planned: bool = False
    ) -> list[Batch]:
        """Batches that fill the live model with the values of the lazy `model`, which stays as it is."""
        parameters, buffers, copies = self._sources(model, missing)
        flat = {name: (copies.flat(name, param), view) for name, (param, view) in parameters.items()}
        exchanged = replica_batches(flat, self._coordinator, self._chunk_bytes)
        copied = [Batch([], finish=copies.copy)] if copies.are_needed else []
        return [Batch(flat_items(buffers)), *exchanged, *copied]

    def _sources(
        self, model: nn.Module, missing: set[str]
    ) -> tuple[Mapping[str, SourcedTensor], Mapping[str, SourcedTensor], Copies]:
        """The first of :func:`live_sources`; a LoadError for values of both ends of a tie, too."""
        parameters, buffers, copies, repeated = live_sources(self._model, model, missing)
        if repeated:
            raise LoadError(
                f"load_into: the checkpoint has values for {', '.join(repeated)} too, which the model has tied to "
                "parameters of other names. Save the checkpoint without them."
            )
        return parameters, buffers, copies


class Copies:
    """Tensors whose elements do not lie one after the other: they are read elsewhere, and copied when all is read."""

    def __init__(self) -> None:
        self._pending: list[tuple[str, torch.Tensor, torch.Tensor]] = []

    def flat(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The memory of `tensor`, flat, or memory that :meth:`copy` copies into it."""
        tensor = tensor.detach()
        if tensor.is_contiguous():
            return tensor.view(-1)
        values = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        self._pending.append((name, tensor, values))
        return values.view(-1)

    @property
    def are_needed(self) -> bool:
        return bool(self._pending)

    def copy(self) -> None:
        """Raises a LoadError if elements that are one in memory (``expand``) were to get different values."""
        for name, tensor, values in self._pending:
            # Torch writes nothing into what is expanded; its first row is all that has memory.
            rows = tuple(slice(0, 1 if stride == 0 else None) for stride in tensor.stride())
            tensor[rows].copy_(values[rows])
            if not torch.equal(tensor.contiguous().view(-1).view(torch.uint8), values.view(-1).view(torch.uint8)):
                raise LoadError(
                    f"load_into: the model's {name} is expanded: its strides are {tensor.stride()}, and some of its "
                    "elements are one in memory. The checkpoint has different values for them. Clone it first."
                )


class LiveSources(NamedTuple):
    """The tensors to fill, by the checkpoint's names.

    Attributes:
        buffers: flat.
        copies: of buffers that are not in one piece.
        repeated: other names of `parameters` that the model has tied, and for which the checkpoint has values too.
    """

    parameters: Mapping[str, SourcedTensor]
    buffers: Mapping[str, SourcedTensor]
    copies: Copies
    repeated: Mapping[str, SourcedTensor]


def live_sources(live_model: nn.Module, lazy_model: nn.Module, missing: set[str]) -> LiveSources:
    """Pair the tensors of `live_model` with those of the checkpoint, which are in `lazy_model`.

    Raises:
        LoadError: a tensor of `live_model` is not there, has another shape or no memory.
    """
    live: dict[str, Any] = dict(named_buffers(live_model, remove_duplicate=False))
    live.update(named_parameters(live_model, remove_duplicate=False))
    parameters: dict[str, SourcedTensor] = {}
    buffers: dict[str, SourcedTensor] = {}
    repeated: dict[str, SourcedTensor] = {}
    copies = Copies()
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
        if tensor.is_meta:
            raise LoadError(
                f"load_into: the model's {name} is on the meta device, without memory. Call "
                "model.to_empty(device=...) first."
            )
        if not isinstance(tensor, nn.Parameter):
            buffers[name] = (copies.flat(name, tensor), view)
        elif id(tensor) in seen:
            repeated[name] = (tensor, view)
        else:
            seen.add(id(tensor))
            parameters[name] = (tensor, view)
    return LiveSources(parameters, buffers, copies, repeated)


class LiveShards(Destination):
    """The memory of a sharded model in use; parameters that are not sharded, and buffers, are whole on every rank."""

    into = "the shards of a model in use"

    def __init__(self, model: nn.Module, coordinator: Coordinator, *, shares_reads: bool) -> None:
        self._model = model
        self._coordinator = coordinator
        self._shares_reads = shares_reads
        self.device = next(local_of(param).device for param in model.parameters())
        dtypes = {param.dtype for param in model.parameters() if param.is_floating_point()}
        self.widest_dtype = reduce(torch.promote_types, dtypes, next(iter(dtypes)))
        """The dtype in which values can be loaded so that no parameter is rounded twice."""

    def batches(
        self, model: nn.Module, missing: set[str], tied: set[str], *, only_planned: bool = False
    ) -> list[Batch]:
        """Batches that fill the live model with the values of the lazy `model`, which stays as it is."""
        sources = live_sources(self._model, model, missing)
        managed = records_by_id(self._model)
        sharing = Sharing(self._coordinator, self.hints, self.device.type, is_on=self._shares_reads)
        items: list[Item] = []
        for name, (param, view) in sources.parameters.items():
            record, local = managed.get(id(param)), local_of(param)
            shard = local_shard_of(name, param, record, self._coordinator)
            flat = sources.copies.flat(name, local)
            if not sharing.takes(name, flat, view, shard, param, record):
                items.append(item_of(shard.target(name, local.dtype), narrowed(view, shard.box), flat))
        again = [self._comparison(name, sourced, managed) for name, sourced in sources.repeated.items()]
        copied = Batch([], finish=sources.copies.copy)
        return [Batch([*items, *flat_items(sources.buffers)]), *sharing.batches(), copied, *again]

    def _comparison(self, name: str, sourced: SourcedTensor, managed: Mapping[int, Managed]) -> Batch:
        """Read the other end of a tie into memory of its own, and compare it with what the parameter has by then."""
        param, view = sourced
        shard, local = local_shard_of(name, param, managed.get(id(param)), self._coordinator), local_of(param)
        values: list[torch.Tensor] = []

        def compare() -> None:
            if not torch.equal(values.pop().view(torch.uint8), local.contiguous().view(-1).view(torch.uint8)):
                raise LoadError(
                    f"load_into: the model has {name} tied to another parameter, and the checkpoint has other values "
                    "for each. Load it anew with from_pretrained, or untie them (tie_word_embeddings=False)."
                )

        target, part = replace(shard.target(f"{name} (tied)", local.dtype), is_copy=True), narrowed(view, shard.box)
        begin = partial(_append_memory, values, local)
        return Batch([Item(target, part, lambda: values[-1])], begin=begin, finish=compare, is_temporary=True)


def _append_memory(values: list[torch.Tensor], like: torch.Tensor) -> None:
    values.append(torch.empty(like.numel(), dtype=like.dtype, device=like.device))
