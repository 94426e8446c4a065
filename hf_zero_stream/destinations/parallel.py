"""The memory of new models: whole on every rank, or shards (FSDP2, HSDP, tensor and expert parallelism)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..accelerators import free_bytes, is_accelerator
from ..checkpoint.lazy import LazyTensor
from ..checkpoint.nodes import View
from ..errors import UnsupportedError
from ..holdings import fsdp
from ..holdings.holding import LocalShard
from ..holdings.introspection import is_packed, local_of, packed_weights
from ..ranks.coordinator import Coordinator
from ..registry import has_tool, tool
from ..settings.config import StreamingConfig
from .base import Batch, allocating
from .exchange import Sharing
from .fill import NewModel, Targets, buffer_on, chunk_bytes, requires_grad
from .initialise import WholeParameters


_HOST = torch.device("cpu")


class Replicated(NewModel):
    """Plain data parallelism: every rank has all of every parameter; each reads 1/N of it, for all.

    Parameters are in host memory, as in stock; those of a model that an engine of DeepSpeed is going to move to the
    device are there at once, if it has room.

    Args:
        config: bounds the buffers of all ranks together, through which they exchange what they read.
        device: on which this rank will train, and where these buffers are if collectives want them there.
        stage: of ZeRO, of the engine that will train the model; None: there is none.
    """

    into = "whole models that ranks read for each other"
    stock_reader = "each rank"

    exchange_settings = ("staging_bytes",)

    def __init__(
        self,
        coordinator: Coordinator,
        config: StreamingConfig,
        device: torch.device = _HOST,
        stage: int | None = None,
    ) -> None:
        super().__init__(coordinator)
        self.device, self._stage = device, stage
        self._chunk_bytes = chunk_bytes(config, device)
        self._parameters_on = _HOST

    def batches(self, model: nn.Module, missing: set[str], tied: set[str]) -> list[Batch]:
        if self._stage is not None:
            if is_accelerator(self.device):
                needed = sum(param.nbytes for param in model.parameters() if isinstance(param, LazyTensor))
                if free_bytes(self.device) >= needed + self._chunk_bytes:
                    self._parameters_on = self.device
            will_be_flattened(model, self._stage)
        return super().batches(model, missing, tied)

    def _parameter(self, name: str, old: torch.Tensor) -> nn.Parameter | None:
        if not isinstance(old, LazyTensor):
            return None
        with allocating(name, old.nbytes, "the host", self._coordinator.rank):
            on = torch.device("meta") if self.only_planned else self._parameters_on
            values = torch.empty(old.shape, dtype=old.dtype, device=on)
        return nn.Parameter(values, requires_grad=old.requires_grad)

    def _new_targets(self) -> Targets:
        how: Any = {"room": self._chunk_bytes, "only_planned": self.only_planned}
        return Targets(self._coordinator, Sharing(self._coordinator, **how))

    def _fill(self, targets: Targets, name: str, param: Any, view: View) -> None:
        targets.add(name, param.detach().view(-1), view, LocalShard.whole(param.shape), param)


def will_be_flattened(model: nn.Module, stage: int) -> None:
    """Tell the plug-in that spares engines a second copy, if it is there, that one of this ZeRO stage gets `model`."""
    if stage in (1, 2) and has_tool("flat"):
        tool("flat", "flat")(model)


class DTensors(NewModel):
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
        super().__init__(coordinator)
        self.device = self._memory_on = device
        self.packing_unsupported_reason = packing_unsupported_reason or fsdp.no_byte_shards_reason()
        self.takes_packed = not self.packing_unsupported_reason
        self._shares_reads = shares_reads
        self._missing: set[str] = set()
        self._sharded: dict[str, DTensor] = {}
        self._managed: dict[str, fsdp.Managed] = {}
        self._shards: dict[str, LocalShard] = {}
        self._whole: WholeParameters | None = None

    def observe(self, model: nn.Module) -> None:
        named = model.named_parameters(remove_duplicate=False)
        self._sharded = {name: param for name, param in named if isinstance(param, DTensor)}
        self._managed = fsdp.managed_params(model)

    def batches(self, model: nn.Module, missing: set[str], tied: set[str]) -> list[Batch]:
        self._memory_on, self._missing = torch.device("meta") if self.only_planned else self.device, missing
        batches = super().batches(model, missing, tied)
        self._whole = WholeParameters(model, self._shards, missing, self._coordinator)
        return batches

    def _parameter(self, name: str, old: torch.Tensor) -> nn.Parameter | None:
        sharded = self._sharded.get(name)
        has_values = not isinstance(old, LazyTensor) and not old.is_meta and name not in self._missing
        if has_values and (sharded is None or isinstance(old, DTensor)):
            return None
        if sharded is not None and sharded.shape != old.shape:  # it is packed
            sharded = fsdp.recut(self._managed[name], old.shape, old.dtype)
        param = old if sharded is None else sharded
        ranks = self._coordinator.rank, self._coordinator.world_size
        self._shards[name] = fsdp.shard_of(name, param, self._managed.get(name), *ranks)
        box = self._shards[name].box
        with allocating(name, box.numel * old.dtype.itemsize, self._memory_on, self._coordinator.rank):
            if sharded is not None and name in self._managed and not self._memory_on.type == "meta":
                return fsdp.new_shard(self._managed[name], old.dtype, requires_grad=requires_grad(old))
            local = torch.empty(box.sizes, dtype=old.dtype, device=self._memory_on)
            if sharded is None:
                return nn.Parameter(local, requires_grad=requires_grad(old))
            return fsdp.with_local(sharded, local, requires_grad=requires_grad(old))

    def _buffer(self, old: torch.Tensor) -> torch.Tensor:
        return buffer_on(self._memory_on, old)

    def _new_targets(self) -> Targets:
        how: Any = {"hints": self.hints, "trains_on": self.trains_on or self.device.type}
        sharing = Sharing(self._coordinator, **how) if self._shares_reads else None
        return Targets(self._coordinator, sharing, self.device)

    def _fill(self, targets: Targets, name: str, param: Any, view: View) -> None:
        flat = local_of(param).view(-1)
        targets.add(name, flat, view, self._shards[name], param, self._managed.get(name))

    def initialise(self, initialise: Callable[[], None], module: nn.Module) -> None:
        assert self._whole is not None
        self._whole.initialise(initialise, module)

    def complete(self, model: nn.Module) -> None:
        self._whole = None
        self._refuse_other_ties(model)
        fsdp.join_ties(model)
        if not is_packed(model):
            return
        for name, managed in self._managed.items():
            prefix, _, key = name.rpartition(".")
            if (packed := packed_weights(model.get_submodule(prefix)).get(key)) is not None:
                packed.computes_in = fsdp.computes_in(managed)

    def _refuse_other_ties(self, model: nn.Module) -> None:
        """Raise an UnsupportedError where ties are not those that the model was sharded with.

        Of one that has ended, FSDP2 would compute with one end in both places. Of one whose ends were cut apart, hooks
        of tensor parallelism, and FSDP2's records, would take one end for a part of the other.
        """
        of_record: dict[int, tuple[str, nn.Parameter]] = {}
        of_param: dict[int, tuple[str, str]] = {}
        for name, param in model.named_parameters(remove_duplicate=False):
            managed = self._managed.get(name)
            first, end = of_record.setdefault(id(managed or param), (name, param))
            if end is not param:
                raise UnsupportedError(
                    f"The config ties {first} and {name}, and the checkpoint has other values for each. FSDP2 has "
                    "sharded them as one parameter. Pass tie_word_embeddings=False, which keeps both."
                )
            shape, cuts = fsdp.cut_of(name, self._sharded.get(name, param), managed)
            if managed is None:  # nobody computes with an earlier shape
                shape = [*param.shape]
            parts = " and then ".join(f"{cut.parts} parts along dimension {cut.dim}" for cut in cuts)
            was = f"of shape {shape}, cut into {parts or '1 part'}"
            first, other = of_param.setdefault(id(param), (name, was))
            if was != other:
                raise UnsupportedError(
                    f"The config ties {first} and {name}. Before, {first} was {other}, and {name} {was}. The model "
                    "would compute with one as with a part of the other. Pass a tp_plan that cuts both alike "
                    '("embedding_rowwise" for the embedding, "colwise_gather_output" for the output layer), or '
                    "tie_word_embeddings=False."
                )
