"""Parameters that DTensor shards: FSDP2, HSDP, tensor and expert parallelism. Each rank reads its own local shards.

What several ranks hold, or hold columns of, they read for each other (:mod:`.sharing`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..checkpoint.lazy import LazyTensor
from ..checkpoint.nodes import Node
from ..holdings import fsdp
from ..holdings.fsdp import local_shard_of
from ..holdings.holding import LocalShard
from ..holdings.introspection import is_packed, local_of, packed_weights
from ..planning.boxes import ParameterBox
from ..ranks.coordinator import Coordinator
from ..registry import import_object
from .base import Batch, Destination, Item, allocating, buffer_on, flat_items, item_of, narrowed, replace_lazy
from .initialise import WholeParameters
from .sharing import Sharing


class DTensors(Destination):
    """The local shards of a model that was sharded on the meta device.

    Parameters that are not sharded, and buffers, are whole on every rank.

    Args:
        packing_unsupported_reason: why weights may not be packed; default: they may, where only FSDP2 shards them.
        shares_reads: ranks may read for each other what several hold, or hold columns of.
    """

    into, trained_by = "shards", "torch"

    takes_dtensors = fills_missing = True

    def __init__(
        self,
        coordinator: Coordinator,
        device: torch.device,
        *,
        packing_unsupported_reason: str = "",
        shares_reads: bool = False,
    ) -> None:
        self.device = device
        self.packing_unsupported_reason = packing_unsupported_reason or fsdp.no_byte_shards_reason()
        self.takes_packed = not self.packing_unsupported_reason
        self._shares_reads = shares_reads
        self._coordinator = coordinator
        self._sharded: dict[str, DTensor] = {}
        self._managed: dict[str, fsdp.Managed] = {}
        self._whole: WholeParameters | None = None

    def observe(self, model: nn.Module) -> None:
        named = model.named_parameters(remove_duplicate=False)
        self._sharded = {name: param for name, param in named if isinstance(param, DTensor)}
        self._managed = fsdp.managed_params(model)

    def batches(
        self, model: nn.Module, missing: set[str], tied: set[str], *, only_planned: bool = False
    ) -> list[Batch]:
        shards: dict[str, LocalShard] = {}
        device = torch.device("meta") if only_planned else self.device

        def parameter(name: str, old: torch.Tensor) -> nn.Parameter | None:
            sharded = self._sharded.get(name)
            has_values = not isinstance(old, LazyTensor) and not old.is_meta and name not in missing
            if has_values and (sharded is None or isinstance(old, DTensor)):
                return None
            if sharded is not None and sharded.shape != old.shape:  # it is packed
                sharded = fsdp.recut(self._managed[name], old.shape, old.dtype)
            param = old if sharded is None else sharded
            shards[name] = local_shard_of(name, param, self._managed.get(name), self._coordinator)
            nbytes = shards[name].box.numel * old.dtype.itemsize
            with allocating(name, nbytes, device, self._coordinator.rank):
                return self._new(name, sharded, shards[name].box, old, device)

        parameters, buffers, _ = replace_lazy(
            model, missing, tied, parameter=parameter, buffer=partial(buffer_on, device)
        )
        items: list[Item] = []
        joint: list[tuple[str, Node, Callable[[torch.Tensor], None]]] = []
        sharing = Sharing(self._coordinator, self.hints, self.trains_on or self.device.type, is_on=self._shares_reads)
        for name, (param, view) in parameters.items():
            local, shard = local_of(param), shards[name]
            if view.node.joint_batches:
                joint.append((name, view.node, partial(_copy_own_part, local, shard.box)))
                continue
            flat, sharded = local.view(-1), self._sharded.get(name, param)
            if not sharing.takes(name, flat, view, shard, sharded, self._managed.get(name)):
                items.append(item_of(shard.target(name, local.dtype), narrowed(view, shard.box), flat))
        self._whole = WholeParameters(model, shards, missing, self._coordinator)
        batches = [Batch([*items, *flat_items(buffers)]), *sharing.batches()]
        if joint:
            batches += import_object(joint[0][1].joint_batches)(joint, self._coordinator, self.device)
        return batches

    def _new(
        self, name: str, sharded: Any, box: ParameterBox, old: torch.Tensor, device: torch.device
    ) -> nn.Parameter:
        # transformers gives a parameter that the checkpoint lacks a gradient, even if the model has frozen it.
        requires_grad = old.requires_grad if isinstance(old, LazyTensor) else old.is_floating_point()
        if sharded is not None and name in self._managed and not device.type == "meta":
            return fsdp.new_shard(self._managed[name], old.dtype, requires_grad=requires_grad)
        local = torch.empty(box.sizes, dtype=old.dtype, device=device)
        if sharded is None:
            return nn.Parameter(local, requires_grad=requires_grad)
        return fsdp.with_local(sharded, local, requires_grad=requires_grad)

    def initialise(self, initialise: Callable[[], None], module: nn.Module) -> None:
        assert self._whole is not None
        self._whole.initialise(initialise, module)

    def complete(self, model: nn.Module) -> None:
        self._whole = None
        fsdp.adopt_ties(model)
        if not is_packed(model):
            return
        for name, managed in fsdp.managed_params(model).items():
            prefix, _, key = name.rpartition(".")
            if (packed := packed_weights(model.get_submodule(prefix)).get(key)) is not None:
                packed.computes_in = fsdp.computes_in(managed)


def _copy_own_part(local: torch.Tensor, box: ParameterBox, row: torch.Tensor) -> None:
    """Copy this rank's elements of `row`, all of a flat parameter's, into its shard."""
    (((start, stop),),) = box.intervals
    local.copy_(row[start:stop])
