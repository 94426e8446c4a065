"""A model in use under DeepSpeed, partitioned or not, in training or not, and the fp32 values that follow its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus, is_zero_param
from torch import nn

from ...bindings.table import refuse_lacking
from ...checkpoint.nodes import Computed, View
from ...errors import UnsupportedError
from ...holdings.deepspeed import partitions
from ...holdings.deepspeed.autotp_shards import autotp_shard_of
from ...holdings.deepspeed.held import is_trained_apart
from ...holdings.deepspeed.masters import ZENFLOW, Master, masters_of
from ...holdings.deepspeed.partitions import gather, select_gathered
from ...holdings.introspection import is_cut
from ...planning.plan import Target
from ...ranks.coordinator import Coordinator
from ...settings.config import StreamingConfig
from ..base import Batch, Item, SourcedTensor, flat_items, item_of, narrowed
from ..live_whole import Copies, LiveWhole
from ..replicated import exchange_batches
from ..skeleton import convert_lazy


refuse_lacking("load_into under ZeRO-3")


class LiveModel(LiveWhole):
    """The memory of a model in use, ZeRO-3's or whole on every rank, and of the masters that optimizers train."""

    def __init__(
        self, model: nn.Module, coordinator: Coordinator, config: StreamingConfig, *, with_masters: bool = True
    ) -> None:
        """`with_masters` is false if the caller fills what ZeRO-3 trains in place of parameters."""
        super().__init__(model, coordinator, config)
        self.device = partitions.local_device()
        self._with_masters = with_masters
        self._loaded: list[Any] = []
        self._in_context: list[Any] = []
        self.hides_zero3 = self.fills_missing = any(map(is_zero_param, model.parameters()))
        if self.hides_zero3:
            self.exchange_settings = ()
        self.masters = masters_of(param for param in model.parameters() if not is_zero_param(param))
        """The masters of optimizers of stages 0 to 2, by the parameter's ``id``."""
        # Without the rounding to the model's dtype, where fp32 partitions are trained.
        has_engine = any(getattr(param, "_z3_optimizer", None) is not None for param in model.parameters())
        self._dtype = torch.float32 if has_engine else None

    def dtype(self, wanted: torch.dtype | None) -> torch.dtype | None:
        if not self.hides_zero3:
            return None
        self._dtype = self._dtype or wanted
        return self._dtype

    def batches(
        self, model: nn.Module, missing: set[str], tied: set[str], *, only_planned: bool = False
    ) -> list[Batch]:
        """Batches that fill the live model with the values of the lazy `model`, which stays as it is."""
        convert_lazy(self._model, model, missing)
        parameters, buffers, scattered = self._sources(model, missing)
        self._loaded = [param for param, _ in parameters.values()]
        filling = _Filling(flat_items(buffers), scattered)
        for name, (param, view) in parameters.items():
            if is_zero_param(param):
                filling.add_partition(name, param, view, _master_partition(param) if self._with_masters else None)
            else:
                filling.add_whole(name, param, view, self.masters.get(id(param), ()))
        batches = [Batch(filling.direct)]
        if filling.swaps:
            from . import nvme

            free_buffers = filling.swaps[0][0].nvme_swapper.available_swap_in_buffers()
            batches.extend(nvme.swap_batches(filling.swaps, free_buffers))
        batches.extend(exchange_batches(filling.replicated, self._coordinator, self._chunk_bytes, self.device))
        return [*batches, Batch([], finish=filling.copy_all)] if filling.has_copies else batches

    def allocate(self) -> None:
        """Free full values that will be stale (small parameters', hpZ's copies): DeepSpeed gathers them again."""
        self._in_context = select_gathered(self._loaded)
        for param in filter(is_zero_param, self._loaded):
            if param.ds_status == ZeroParamStatus.AVAILABLE:
                param.partition()
            param.ds_secondary_tensor = None

    def finish(self) -> None:
        gather(self._coordinator, self._in_context)  # what a GatheredParameters around the load holds


@dataclass
class _Filling:
    """The ways in which the parameters of a live model get their values.

    Attributes:
        direct: items that this rank reads alone.
        scattered: gives memory in one piece to tensors that have none.
        swaps: parameters whose partitions lie in swap files, and what fills these.
        replicated: tensors that all ranks fill together; what AutoTP has cut is each rank's own.
        copies: (to, from), made when everything is read.
    """

    direct: list[Item]
    scattered: Copies
    swaps: list[tuple[Any, Item | torch.Tensor | None]] = field(default_factory=list)
    replicated: dict[str, SourcedTensor] = field(default_factory=dict)
    copies: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def add_partition(self, name: str, param: Any, view: View, master: torch.Tensor | None) -> None:
        """Fill a partition of ZeRO-3, and the fp32 `master` that is trained in its place, if there is one."""
        target = Target(name, param.dtype if master is None else master.dtype, *partitions.own_range(param))
        if master is not None:
            self.direct.append(item_of(target, view, master))
        if getattr(param.ds_tensor, "final_location", None) == "nvme":
            item = Item(target, view, partial(getattr, param, "ds_tensor"))
            self.swaps.append((param, item if master is None else master))
        elif master is None:
            self.direct.append(item_of(target, view, param.ds_tensor))
        else:
            self.copies.append((param.ds_tensor, master))

    def add_whole(self, name: str, param: Any, view: View, masters: Sequence[Master]) -> None:
        """Fill a parameter that is no partition, and the `masters` that are trained in its place."""
        shared = next((master.values for master in masters if master.is_whole), param)
        flat, box = self.scattered.flat(name, shared), None
        if is_cut(param):
            part = autotp_shard_of(name, param)
            box, view = part.box, narrowed(view, part.box)
            self.direct.append(item_of(part.target(name, shared.dtype), view, flat))
        else:
            self.replicated[name] = (flat, view)
        if shared is not param:
            self.copies.append((param.detach(), flat.view(param.shape)))
        for trained, start, stop, is_whole in masters:
            if is_whole or _holds_exactly(param.dtype, view):
                self.copies.append((trained, flat[start:stop]))
            else:  # `param` gets rounded values
                target = Target(f"{name} (optimizer)", trained.dtype, stop - start, start, stop, box)
                self.direct.append(item_of(target, view, trained))

    @property
    def has_copies(self) -> bool:
        return self.scattered.are_needed or bool(self.copies)

    def copy_all(self) -> None:
        self.scattered.copy()
        for to, values in self.copies:
            to.data.copy_(values)


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


def _master_partition(param: Any) -> torch.Tensor | None:
    """The fp32 partition that an engine trains for `param`, also if it was frozen since, as a view; or None."""
    if not is_trained_apart(param):
        return None
    optimizer = param._z3_optimizer
    if getattr(optimizer, "zenflow", False):
        raise UnsupportedError(ZENFLOW)
    group, _, _ = optimizer.grad_position[optimizer.get_param_id(param)]
    if optimizer._swappable_optimizer_subgroup(group):
        raise UnsupportedError(
            "The fp32 partitions lie on NVMe (offload_optimizer.device: nvme), and cannot be loaded into while the "
            "engine is in use. Load before deepspeed.initialize, or use DeepSpeed's own checkpoints."
        )
    master, _ = optimizer._get_fp32_opt_state_partition(param, release_swap_buffers=False)
    return master
