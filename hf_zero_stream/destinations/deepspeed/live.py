"""A model that is in use, partitioned or not, in training or not: where its values are, and what follows new ones."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus, is_zero_param
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch import nn

from ...checkpoint.nodes import Computed, View
from ...errors import UnsupportedError, refuse_unknown_version
from ...holdings.deepspeed import partitions
from ...holdings.deepspeed.autotp_shards import autotp_shard_of
from ...holdings.deepspeed.gathered import gather, select_gathered
from ...holdings.deepspeed.held import is_trained_apart
from ...holdings.deepspeed.masters import ZENFLOW, masters_of
from ...holdings.marks import is_cut
from ...planning.plan import Target
from ...ranks.coordinator import Coordinator
from ...settings.config import StreamingConfig
from ..base import Batch, Item, Sourced, flat_items, item_of, narrowed
from ..live_whole import LiveWhole
from ..replicated import exchange_batches
from ..skeleton import convert_lazy


_RELIED_ON = ("_get_fp32_opt_state_partition", "_swappable_optimizer_subgroup", "get_param_id")
_missing = [name for name in _RELIED_ON if not hasattr(DeepSpeedZeroOptimizer_Stage3, name)]
refuse_unknown_version("deepspeed", [f"DeepSpeedZeroOptimizer_Stage3.{name}" for name in _missing])


class LiveModel(LiveWhole):
    """The memory that a model in use has, ZeRO-3's or whole on every rank, and what optimizers train in its place."""

    def __init__(
        self, model: nn.Module, coordinator: Coordinator, config: StreamingConfig, *, with_masters: bool = True
    ) -> None:
        """Without masters, what ZeRO-3 trains in place of parameters keeps its values: the caller fills it."""
        super().__init__(model, coordinator, config)
        self.device = partitions.local_device()
        self._with_masters = with_masters
        self._loaded: list[Any] = []
        self._in_context: list[Any] = []
        self.hides_zero3 = self.fills_missing = any(map(is_zero_param, model.parameters()))
        if self.hides_zero3:
            self.exchange_settings = ()
        self.masters = masters_of(param for param in model.parameters() if not is_zero_param(param))
        """What optimizers of stages 0 to 2 train in place of parameters, by the parameter's ``id``."""
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
        """Those that fill the live model; the lazy `model` says what with, and stays as it is."""
        convert_lazy(self._model, model, missing)
        parameters, buffers, scattered = self._sources(model, missing)
        self._loaded = [param for param, _ in parameters.values()]
        direct = flat_items(buffers)
        swapped: list[tuple[Any, Item | torch.Tensor | None]] = []
        replicated: dict[str, Sourced] = {}  # filled by all ranks together; what AutoTP has cut is each rank's own
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []  # (to, from), when everything is read
        for name, (param, view) in parameters.items():
            if is_zero_param(param):
                master = _master_partition(param) if self._with_masters else None
                target = Target(name, param.dtype if master is None else master.dtype, *partitions.own_range(param))
                if master is not None:
                    direct.append(item_of(target, view, master))
                if getattr(param.ds_tensor, "final_location", None) == "nvme":
                    item = Item(target, view, partial(getattr, param, "ds_tensor"))
                    swapped.append((param, item if master is None else master))
                elif master is None:
                    direct.append(item_of(target, view, param.ds_tensor))
                else:
                    copies.append((param.ds_tensor, master))
                continue
            masters = self.masters.get(id(param), ())
            shared = next((master.values for master in masters if master.is_whole), param)
            flat, box = scattered.flat(name, shared), None
            if is_cut(param):
                part = autotp_shard_of(name, param)
                box, view = part.box, narrowed(view, part.box)
                direct.append(item_of(part.target(name, shared.dtype), view, flat))
            else:
                replicated[name] = (flat, view)
            if shared is not param:
                copies.append((param.detach(), flat.view(param.shape)))
            for trained, start, stop, is_whole in masters:
                if is_whole or _holds_exactly(param.dtype, view):
                    copies.append((trained, flat[start:stop]))
                else:  # `param` gets rounded values
                    target = Target(f"{name} (optimizer)", trained.dtype, stop - start, start, stop, box)
                    direct.append(item_of(target, view, trained))

        batches = [Batch(direct)]
        if swapped:
            from . import nvme

            batches.extend(nvme.swap_batches(swapped, swapped[0][0].nvme_swapper.available_swap_in_buffers()))
        batches.extend(exchange_batches(replicated, self._coordinator, self._chunk_bytes, self.device))

        def copy_all() -> None:
            scattered.copy()
            for to, values in copies:
                to.data.copy_(values)

        return [*batches, Batch([], finish=copy_all)]

    def allocate(self) -> None:
        """Free full values, which will be old (small parameters', hpZ's copies): DeepSpeed gathers them again."""
        self._in_context = select_gathered(self._loaded)
        for param in filter(is_zero_param, self._loaded):
            if param.ds_status == ZeroParamStatus.AVAILABLE:
                param.partition()
            param.ds_secondary_tensor = None

    def finish(self) -> None:
        gather(self._coordinator, self._in_context)  # what a GatheredParameters around the load holds


def _holds_exactly(dtype: torch.dtype, view: View) -> bool:
    """Whether a tensor of `dtype` holds what `view` has without rounding: the files' own values, of no wider dtype."""
    node = view.node
    if isinstance(node, Computed):
        return False
    inputs = list(node.inputs())
    if inputs:
        return all(_holds_exactly(dtype, source) for source in inputs)
    if node.dtype == dtype or not node.dtype.is_floating_point:
        return node.dtype == dtype
    mine, theirs = torch.finfo(dtype), torch.finfo(node.dtype)
    return mine.eps <= theirs.eps and mine.max >= theirs.max


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
