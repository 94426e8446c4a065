"""ZeRO-3: each parameter is partitioned over the ranks, on the device, in host memory or in swap files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import Init
from torch import nn

from ...checkpoint.nodes import View
from ...holdings.deepspeed import partitions
from ...holdings.holding import LocalShard
from ...planning.plan import Target, partition_range
from ...ranks.coordinator import Coordinator
from ...registry import tool
from ..base import Batch, Item
from ..fill import NewModel, Targets, buffer_on, item_in, requires_grad
from ..initialise import run_with_touched_parameters
from . import zero3


class Partitioned(NewModel):
    """The partitions of a model that is built under ZeRO-3; a plan may be without a config.

    If the caller is in a ``zero.Init``, that is `around`, and `ds_config` agrees with it.
    """

    into, trained_by = "ZeRO-3 partitions", "deepspeed"

    hides_zero3 = True
    takes_packed = True
    fills_missing = True

    def __init__(
        self,
        ds_config: Mapping[str, Any],
        coordinator: Coordinator,
        around: Init | None = None,
    ) -> None:
        super().__init__(coordinator)
        self.device = partitions.local_device()
        self._around = around
        self.stock_reader = "rank 0" if around is None else ""
        self._ds_config = ds_config
        self.fills_device = not zero3.offloads(ds_config)
        self._dtype = zero3.partition_dtype(ds_config) if ds_config else None
        self._model: nn.Module | None = None
        self._swapped: list[nn.Parameter] = []
        self._items: dict[int, Item] = {}
        self.file_swapper: Any = None
        """What a plug-in brings to read some partitions whenever they are needed, in place of this load."""

    def refuse_packed(self) -> None:
        zero3.refuse_packed(self._ds_config)

    def dtype(self, wanted: torch.dtype | None) -> torch.dtype | None:
        """The dtype of DeepSpeed's config, as in stock."""
        self._dtype = self._dtype or wanted
        return self._dtype

    def batches(self, model: nn.Module, missing: set[str], tied: set[str]) -> list[Batch]:
        """One batch of all that is neither quantised nor swapped to a disk; and further ones for those."""
        rank, world_size = self._coordinator.rank, self._coordinator.world_size
        if (self._ds_config.get("expert_parallel") or {}).get("enabled"):
            experts = tool("experts", "autoep", "expert_parallel")  # wants a DeepSpeed that has AutoEP
            experts.convert(model, self._ds_config, missing, rank, world_size, make_groups=not self.only_planned)
        self._model = model
        return super().batches(model, missing, tied)

    def _parameter(self, name: str, old: torch.Tensor) -> nn.Parameter:
        dtype = self._dtype if self._dtype is not None and old.is_floating_point() else old.dtype
        return zero3.placeholder(name, old.shape, dtype, self.device, requires_grad(old))

    def _buffer(self, old: torch.Tensor) -> torch.Tensor:
        return buffer_on(self.device, old)

    def _fill(self, targets: Targets, name: str, param: Any, view: View) -> None:
        shard = LocalShard.whole(param.shape)._replace(part=self._share(param))
        memory = partial(getattr, param, "ds_tensor")
        if view.node.joint_batches:
            targets.add_later(name, memory, param.dtype, view, shard)
        else:
            self._items[id(param)] = item_in(shard, name, view, param.dtype, memory)

    def _fill_rest(self, targets: Targets, model: nn.Module) -> None:
        items, self._items = self._items, {}
        if zero3.uses_nvme(self._ds_config):
            targets.after += self._swap_batches(model, items)
        if self.file_swapper is not None:
            self.into = self.file_swapper.take(model, items)
        targets.alone += items.values()

    def _swap_batches(self, model: nn.Module, items: dict[int, Item]) -> list[Batch]:
        """Move the parameters that PartitionedInit will swap from `items` into batches, before there is a swapper."""
        nvme = zero3.nvme()
        large = nvme.swap_from_bytes(self._ds_config)
        self._swapped = [
            param
            for param in filter(zero3.is_placeholder, model.parameters())
            if param.dtype == self._dtype and self._share(param)[0] * param.dtype.itemsize >= large
        ]
        swaps = [(param, items.pop(id(param), None)) for param in self._swapped]
        return nvme.swap_batches(swaps, nvme.free_buffers(self._ds_config)) if swaps else []

    def _share(self, param: Any) -> tuple[int, int, int]:
        place = zero3.place_in_group(param, self._coordinator.rank, self._coordinator.world_size)
        return partition_range(param.numel(), *place)

    def check(self, targets: Sequence[Target]) -> None:
        if zero3.uses_nvme(self._ds_config):
            zero3.nvme().refuse_wrong_settings(self._ds_config, targets)

    def begin(self) -> None:
        model, self._model = self._model, None
        assert model is not None
        zero3.PartitionedInit(model, self._ds_config, self._swapped, self._around, self.file_swapper)

    def initialise(self, initialise: Callable[[], None], module: nn.Module) -> None:
        run_with_touched_parameters(initialise, module, partitions.is_partitioned, self._fetched)

    def _fetched(self, touched: Sequence[Any]) -> AbstractContextManager[None]:
        # The checkpoint has nearly all parameters of nearly all models.
        return partitions.gathered_params(self._coordinator, touched) if touched else nullcontext()
