"""A model in use that DTensor shards: FSDP2, HSDP, tensor and expert parallelism, loaded or sharded by anybody.

Each rank reads its own local shards into the memory that they have, so that optimizers and FSDP2 keep theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial, reduce

import torch
from torch import nn

from ..errors import LoadError
from ..holdings import fsdp
from ..holdings.introspection import local_of
from ..holdings.shards import local_shard_of
from ..ranks.coordinator import Coordinator
from .base import Batch, Destination, Item, SourcedTensor, flat_items, item_of, narrowed
from .live_whole import live_sources


class LiveShards(Destination):
    """The memory of a sharded model in use; parameters that are not sharded, and buffers, are whole on every rank."""

    into = "the shards of a model in use"

    def __init__(self, model: nn.Module, coordinator: Coordinator) -> None:
        self._model = model
        self._coordinator = coordinator
        self.device = next(local_of(param).device for param in model.parameters())
        dtypes = {param.dtype for param in model.parameters() if param.is_floating_point()}
        self.widest_dtype = reduce(torch.promote_types, dtypes, next(iter(dtypes)))
        """The dtype in which values can be loaded so that no parameter is rounded twice."""

    def batches(
        self, model: nn.Module, missing: set[str], tied: set[str], *, only_planned: bool = False
    ) -> list[Batch]:
        """Batches that fill the live model with the values of the lazy `model`, which stays as it is."""
        sources = live_sources(self._model, model, missing)
        managed = fsdp.records_by_id(self._model)
        items: list[Item] = []
        for name, (param, view) in sources.parameters.items():
            shard, local = local_shard_of(name, param, managed.get(id(param)), self._coordinator), local_of(param)
            flat = sources.copies.flat(name, local)
            items.append(item_of(shard.target(name, local.dtype), narrowed(view, shard.box), flat))
        again = [self._comparison(name, sourced, managed) for name, sourced in sources.repeated.items()]
        return [Batch([*items, *flat_items(sources.buffers)], finish=sources.copies.copy), *again]

    def _comparison(self, name: str, sourced: SourcedTensor, managed: Mapping[int, fsdp.Managed]) -> Batch:
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
