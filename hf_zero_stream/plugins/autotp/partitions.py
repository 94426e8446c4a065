"""ZeRO-3 of what AutoTP has left: of each part a rank has its range, as one of the ranks that have the same part."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...plugin_api import (
    Batch,
    Coordinator,
    Deferral,
    Destination,
    Item,
    LazyTensor,
    LocalShard,
    Target,
    View,
    WritableParameter,
    copy_attributes,
    local_device,
    partition_range,
    zero3,
)


class CutPartitions(Destination):
    """The partitions of a lazy model that AutoTP has cut for an engine of ZeRO-3.

    The lazy parameters become the partitioned ones, and stay the same objects, to which optimizers may refer.

    Args:
        shard_of: what a parameter is a part of, for the digest; None: not known.
    """

    into = "ZeRO-3 partitions of the parts that AutoTP has cut"

    leaves_lazy = True  # those of other readers

    def __init__(
        self,
        reader: Deferral,
        coordinator: Coordinator,
        engine: Any,
        shard_of: Callable[[str, torch.Tensor], LocalShard | None],
    ) -> None:
        self.device = local_device()
        self.stock_reader = reader.stock_reader
        self.fills_device = not zero3.offloads(engine.config)
        self._reader, self._coordinator, self._engine, self._shard_of = reader, coordinator, engine, shard_of
        self._model: nn.Module
        self._placeholders: list[tuple[LazyTensor, torch.Tensor]] = []

    def batches(self, model: nn.Module, missing: set[str], tied: set[str]) -> list[Batch]:
        self._model, dtype = model, zero3.partition_dtype(self._engine.config)
        group = self._engine.mpu.get_data_parallel_group()
        place = dist.get_rank(group), dist.get_world_size(group)
        # Of what is whole on each rank, every such group of ranks has a copy.
        is_copy = dist.get_global_rank(group, 0) != 0
        items = []
        for name, param in model.named_parameters():
            if not isinstance(param, LazyTensor) or param.reader is not self._reader:
                continue
            node = param.node
            view = View.whole(node.unwritten) if isinstance(node, WritableParameter) else param.view_of_node
            own = dtype if param.is_floating_point() else param.dtype
            self._placeholders.append(
                (param, zero3.placeholder(name, param.shape, own, self.device, param.requires_grad))
            )
            shard = self._shard_of(name, param)
            box = None if shard is None or shard.box.is_whole else shard.box
            target = Target(name, own, *partition_range(param.numel(), *place), box, is_copy=is_copy and box is None)
            items.append(Item(target, view, partial(getattr, param, "ds_tensor")))
        return [Batch(items)]

    def begin(self) -> None:
        for param, placeholder in self._placeholders:
            param.become(placeholder)
            copy_attributes(placeholder, param)
        self._placeholders = []
        zero3.PartitionedInit(self._model, self._engine.config, (), mpu=self._engine.mpu)
