"""A model in use under DeepSpeed, partitioned or not, in training or not, and the fp32 values that follow its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus, is_zero_param
from torch import nn

from ...checkpoint.nodes import Computed, View
from ...errors import UnsupportedError
from ...holdings.deepspeed import partitions
from ...holdings.deepspeed.engine import masters_of
from ...holdings.deepspeed.partitions import gather, select_gathered
from ...holdings.holding import cut_shard_of
from ...holdings.introspection import is_cut, lies_in_files
from ...holdings.own_names import named_parameters
from ...holdings.slots import VALUES, Member, Slot, memory_of
from ...planning.boxes import ParameterBox
from ...planning.plan import Target
from ...ranks.coordinator import Coordinator
from ...settings.config import StreamingConfig
from ..base import Batch, Item, SourcedTensor, flat_items, item_of, narrowed
from ..exchange import replica_batches
from ..live_memory import Copies, LiveWhole
from ..skeleton import convert_lazy
from . import zero3


class LiveModel(LiveWhole):
    """The memory of a model in use, ZeRO-3's or whole on every rank, and of the masters that optimizers train."""

    def __init__(
        self, model: nn.Module, coordinator: Coordinator, config: StreamingConfig, *, with_masters: bool = True
    ) -> None:
        """`with_masters` is false if the caller fills what ZeRO-3 trains in place of parameters."""
        super().__init__(model, coordinator, config)
        self.device = partitions.local_device()
        self._loaded: list[Any] = []
        self._in_context: list[Any] = []
        self.hides_zero3 = self.fills_missing = any(map(is_zero_param, model.parameters()))
        if self.hides_zero3:
            self.exchange_settings = ()
        params = {name: it for name, it in named_parameters(model) if with_masters or not is_zero_param(it)}
        trained = masters_of(params, coordinator.rank, coordinator.world_size)
        self.masters = {id(params[name]): of_param for name, of_param in trained.items()}
        """Where the masters lie that engines train in place of parameters, by these ones' ``id``."""
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
        if in_files := [name for name, (param, _) in parameters.items() if lies_in_files(param)]:
            raise UnsupportedError(
                f'{len(in_files)} parameters stay in the checkpoint\'s files (frozen_weights="files"), and cannot be '
                f"written to: {', '.join(in_files[:8])}. Leave them out, or load the model with them in memory."
            )
        filling = _Filling(flat_items(buffers), scattered)
        for name, (param, view) in parameters.items():
            trained = self.masters.get(id(param), ())
            if is_zero_param(param):
                filling.add_partition(name, param, view, _master_partition(name, param, trained))
            else:
                filling.add_whole(name, param, view, trained)
        batches = [Batch(filling.direct)]
        if filling.swaps:
            free_buffers = filling.swaps[0][0].nvme_swapper.available_swap_in_buffers()
            batches.extend(zero3.nvme().swap_batches(filling.swaps, free_buffers))
        batches.extend(replica_batches(filling.replicated, self._coordinator, self._chunk_bytes))
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
        box: ParameterBox | None = None
        if is_cut(param):
            box = cut_shard_of(name, param).box
            view = narrowed(view, box)
        target = Target(name, param.dtype if master is None else master.dtype, *partitions.own_range(param), box)
        if master is not None:
            self.direct.append(item_of(target, view, master))
        if getattr(param.ds_tensor, "final_location", None) == "nvme":
            item = Item(target, view, partial(getattr, param, "ds_tensor"))
            self.swaps.append((param, item if master is None else master))
        elif master is None:
            self.direct.append(item_of(target, view, param.ds_tensor))
        else:
            self.copies.append((param.ds_tensor, master))

    def add_whole(self, name: str, param: Any, view: View, trained: Sequence[tuple[Slot, Member]]) -> None:
        """Fill a parameter that is no partition, and the masters that are `trained` in its place."""
        shared, others = param, [(slot, member) for slot, member in trained if member.elements[0] < member.elements[1]]
        if others and others[0][1].is_whole:
            slot, member = others.pop(0)
            shared = memory_of(slot, member, VALUES) if slot.is_in_one_piece else slot.values
        flat, box = self.scattered.flat(name, shared), None
        if is_cut(param):
            part = cut_shard_of(name, param)
            box, view = part.box, narrowed(view, part.box)
            self.direct.append(item_of(part.target(name, shared.dtype), view, flat))
        else:
            self.replicated[name] = (flat, view)
        if shared is not param:
            self.copies.append((param.detach(), flat.view(param.shape)))
        for slot, member in others:
            (start, stop), memory = member.elements, memory_of(slot, member, VALUES)
            if member.is_whole or _holds_exactly(param.dtype, view):
                self.copies.append((memory, flat[start:stop]))
            else:  # `param` gets rounded values
                target = Target(f"{name} (optimizer)", memory.dtype, stop - start, start, stop, box)
                self.direct.append(item_of(target, view, memory))

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
