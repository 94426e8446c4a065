"""A model in use under DeepSpeed, partitioned or not, in training or not, and the fp32 values that follow its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus, is_zero_param
from torch import nn

from ...checkpoint.nodes import Computed, View
from ...errors import UnsupportedError
from ...holdings.deepspeed import partitions
from ...holdings.deepspeed.masters import masters_of
from ...holdings.deepspeed.partitions import gather, select_gathered
from ...holdings.holding import LocalShard
from ...holdings.own_names import named_parameters
from ...holdings.slots import VALUES, Member, Slot, memory_of
from ...ranks.coordinator import Coordinator
from ..base import Item
from ..fill import Targets, item_in
from . import zero3


class EngineMemory:
    """What DeepSpeed has of a model in use: partitions of ZeRO-3, and the masters that optimizers train."""

    def __init__(self, model: nn.Module, coordinator: Coordinator, *, with_masters: bool) -> None:
        """`with_masters` is false if the caller fills what ZeRO-3 trains in place of parameters."""
        self.device = partitions.local_device()
        self.is_partitioned = any(map(is_zero_param, model.parameters()))
        self.trains_partitions = any(getattr(param, "_z3_optimizer", None) is not None for param in model.parameters())
        self._model, self._coordinator, self._with_masters = model, coordinator, with_masters
        self._partitioned: list[Any] = []
        self._in_context: list[Any] = []
        self._swaps: list[tuple[Any, Item | torch.Tensor | None]] = []

    @cached_property
    def masters(self) -> Mapping[int, Sequence[tuple[Slot, Member]]]:
        """Where the masters lie that engines train in place of parameters, by these ones' ``id``."""
        named = named_parameters(self._model)
        params = {name: param for name, param in named if self._with_masters or not is_zero_param(param)}
        trained = masters_of(params, self._coordinator.rank, self._coordinator.world_size)
        return {id(params[name]): of_param for name, of_param in trained.items()}

    def fill(self, targets: Targets, name: str, param: Any, view: View, shard: LocalShard) -> None:
        """Have a parameter, or a partition of ZeRO-3, filled, and the fp32 masters that are trained in its place."""
        trained = self.masters.get(id(param), ())
        if not is_zero_param(param):
            _fill_whole(targets, name, param, view, shard, trained)
            return
        master = _master_partition(name, param, trained)
        self._partitioned.append(param)
        if master is not None:
            targets.add(name, master, view, shard)
        if getattr(param.ds_tensor, "final_location", None) == "nvme":
            item = item_in(shard, name, view, param.dtype, partial(getattr, param, "ds_tensor"))
            self._swaps.append((param, item if master is None else master))
        elif master is None:
            targets.add(name, param.ds_tensor, view, shard)
        else:
            targets.copy(param.ds_tensor, master)

    def fill_swapped(self, targets: Targets) -> None:
        """Have the swap files of all parameters that lie there filled."""
        if self._swaps:
            free_buffers = self._swaps[0][0].nvme_swapper.available_swap_in_buffers()
            targets.after += zero3.nvme().swap_batches(self._swaps, free_buffers)

    def begin(self) -> None:
        """Free full values that will be stale (small parameters', hpZ's copies): DeepSpeed gathers them again."""
        self._in_context = select_gathered(self._partitioned)
        for param in self._partitioned:
            if param.ds_status == ZeroParamStatus.AVAILABLE:
                param.partition()
            param.ds_secondary_tensor = None

    def finish(self) -> None:
        gather(self._coordinator, self._in_context)  # what a GatheredParameters around the load holds


def _fill_whole(
    targets: Targets, name: str, param: Any, view: View, shard: LocalShard, trained: Sequence[tuple[Slot, Member]]
) -> None:
    """Fill a parameter that is no partition, and the masters that are `trained` in its place."""
    filled, others = param, [(slot, member) for slot, member in trained if member.elements[0] < member.elements[1]]
    if others and others[0][1].is_whole:
        slot, member = others.pop(0)
        filled = memory_of(slot, member, VALUES) if slot.is_in_one_piece else slot.values
    flat = targets.flat(name, filled)
    targets.add(name, flat, view, shard, param)  # what AutoTP has cut is each rank's own
    if filled is not param:
        targets.copy(param.detach(), flat.view(param.shape))
    for slot, member in others:
        (start, stop), memory = member.elements, memory_of(slot, member, VALUES)
        if member.is_whole or _holds_exactly(param.dtype, view):
            targets.copy(memory, flat[start:stop])
        else:  # `param` gets rounded values
            part = shard._replace(copy=0, part=(stop - start, start, stop))
            targets.add(f"{name} (optimizer)", memory, view, part)


def _holds_exactly(dtype: torch.dtype, view: View) -> bool:
    """Whether `dtype` holds the values of `view` without rounding: the files' own values, of no wider dtype."""
    node = view.node
    if isinstance(node, Computed):
        return False
    inputs = list(node.inputs())
    if inputs:
        return all(_holds_exactly(dtype, source) for source in inputs)
    if node.dtype == dtype or not node.dtype.is_floating_point:
        return node.dtype == dtype
    own_info, source_info = torch.finfo(dtype), torch.finfo(node.dtype)
    return own_info.eps <= source_info.eps and own_info.max >= source_info.max


def _master_partition(name: str, param: Any, trained: Sequence[tuple[Slot, Member]]) -> torch.Tensor | None:
    """The fp32 partition that an engine trains for `param`, also if it was frozen since, with padding; or None."""
    if not trained:
        return None
    ((slot, member),) = trained
    if slot.is_swapped:
        raise UnsupportedError(
            f"The fp32 partition of {name} lies on NVMe (offload_optimizer.device: nvme), and cannot be loaded into "
            "while the engine is in use. Load before deepspeed.initialize, or use DeepSpeed's own checkpoints."
        )
    numel, _, _ = partitions.own_range(param)
    return slot.values.detach().view(-1)[member.first : member.first + numel]
