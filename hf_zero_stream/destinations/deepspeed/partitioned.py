"""ZeRO-3: each parameter is partitioned over the ranks, on the device, in host memory or in swap files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import Init
from torch import nn

from ...checkpoint.lazy import LazyTensor
from ...checkpoint.nodes import Node
from ...holdings.deepspeed import partitions
from ...planning.plan import Target, partition_range
from ...ranks.coordinator import Coordinator
from ...registry import import_object, tool
from ..base import Batch, Destination, Item, buffer_on, flat_items, replace_lazy
from ..initialise import run_with_touched_parameters
from . import zero3


class Partitioned(Destination):
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
        self.device = partitions.local_device()
        self._around = around
        self.stock_reader = "rank 0" if around is None else ""
        self._ds_config = ds_config
        self.fills_device = not zero3.offloads(ds_config)
        self._coordinator = coordinator
        self._dtype = zero3.partition_dtype(ds_config) if ds_config else None
        self._model: nn.Module | None = None
        self._swapped: list[nn.Parameter] = []
        self.file_swapper: Any = None
        """What a plug-in brings to read some partitions whenever they are needed, in place of this load."""

    def refuse_packed(self) -> None:
        zero3.refuse_packed(self._ds_config)

    def dtype(self, wanted: torch.dtype | None) -> torch.dtype | None:
        """The dtype of DeepSpeed's config, as in stock."""
        self._dtype = self._dtype or wanted
        return self._dtype

    def batches(
        self, model: nn.Module, missing: set[str], tied: set[str], *, only_planned: bool = False
    ) -> list[Batch]:
        """One batch of all that is neither quantised nor swapped to a disk; and further ones for those."""
        rank, world_size = self._coordinator.rank, self._coordinator.world_size
        if (self._ds_config.get("expert_parallel") or {}).get("enabled"):
            experts = tool("experts", "autoep", "expert_parallel")  # wants a DeepSpeed that has AutoEP
            experts.convert(model, self._ds_config, missing, rank, world_size, make_groups=not only_planned)
        parameters, buffers, self.recast = replace_lazy(
            model, missing, tied, parameter=self._parameter, buffer=partial(buffer_on, self.device)
        )
        items: dict[int, Item] = {}
        joint: list[tuple[str, Node, Callable[[torch.Tensor], None]]] = []
        for name, (param, view) in parameters.items():
            if view.node.joint_batches:
                joint.append((name, view.node, partial(_copy_own_part, param)))
                continue
            target = Target(name, param.dtype, *self._share(param))
            items[id(param)] = Item(target, view, partial(getattr, param, "ds_tensor"))
        self._model = model
        swapped = self._swap_batches(model, items) if zero3.uses_nvme(self._ds_config) else []
        if self.file_swapper is not None:
            self.into = self.file_swapper.take(model, items)
        batches = [Batch([*items.values(), *flat_items(buffers)])]
        if joint:
            batches += import_object(joint[0][1].joint_batches)(joint, self._coordinator, self.device)
        return batches + swapped

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
        batches: list[Batch] = nvme.swap_batches(swaps, nvme.free_buffers(self._ds_config)) if swaps else []
        return batches

    def _share(self, param: Any) -> tuple[int, int, int]:
        place = zero3.place_in_group(param, self._coordinator.rank, self._coordinator.world_size)
        return partition_range(param.numel(), *place)

    def _parameter(self, name: str, param: torch.Tensor) -> nn.Parameter:
        dtype = self._dtype if self._dtype is not None and param.is_floating_point() else param.dtype
        requires_grad = param.requires_grad if isinstance(param, LazyTensor) else param.is_floating_point()
        return zero3.placeholder(name, param.shape, dtype, self.device, requires_grad)

    def check(self, targets: Sequence[Target]) -> None:
        if zero3.uses_nvme(self._ds_config):
            zero3.nvme().refuse_wrong_settings(self._ds_config, targets)

    def allocate(self) -> None:
        model, self._model = self._model, None
        assert model is not None
        zero3.PartitionedInit(model, self._ds_config, self._swapped, self._around, self.file_swapper)

    def initialise(self, initialise: Callable[[], None], module: nn.Module) -> None:
        run_with_touched_parameters(initialise, module, partitions.is_partitioned, self._fetched)

    def _fetched(self, touched: Sequence[Any]) -> AbstractContextManager[None]:
        if not touched:  # the checkpoint has nearly all parameters of nearly all models
            return nullcontext()
        from ...holdings.deepspeed.partitions import gathered_params

        return gathered_params(self._coordinator, touched)


def _copy_own_part(param: Any, row: torch.Tensor) -> None:
    """Copy this rank's elements of `row`, all of a parameter's, into its partition."""
    _, start, stop = partitions.own_range(param)
    param.ds_tensor[: stop - start].copy_(row[start:stop])
