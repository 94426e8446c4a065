"""``load_into()``: streaming a checkpoint into a model that exists already, partitioned or not, in training or not."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from ..checkpoint.nodes import Computed, View
from ..checkpoint.wrapped import refuse_wrapped
from ..config import StreamingConfig
from ..destinations.deepspeed import gathered, live, nvme, original_experts, zero3
from ..destinations.deepspeed.masters import masters_of
from ..destinations.homes import Sourced, exchange_batches, swap_batch, whole
from ..engine.reader import Batch, Item
from ..errors import ConfigError, LoadError, UnsupportedError
from ..planning.plan import Target
from ..ranks.coordinator import Coordinator, expected_at
from ..ranks.rendezvous import LOAD
from ..reports.load import LoadReport
from ..reports.memory import collector_paused
from ..seams import Session, Stopped, zero3_hidden
from ..seams.placement import refuse_sharding
from .integration import finish_saves_into, streaming
from .load import Load, source_of


__all__ = ["load_into"]

logger = logging.get_logger(__name__)


def load_into(
    model: Any, path: str, *, config: StreamingConfig | None = None, strict: bool = True, **kwargs: Any
) -> LoadReport:
    """Stream the checkpoint at `path` into `model`: a better one, one of another run, the weights of a peer.

    Every rank reads the bytes of its partitions and nothing else, straight into them. Where a DeepSpeed optimizer
    trains fp32 values in place of the model's own, at any ZeRO stage, these get the checkpoint's values too, and
    without rounding. The optimizer's other states stay as they are. All ranks must call it together, between steps.

    Master copies that another optimizer keeps, and averages of weights, are not known here: refresh them afterwards.

    Args:
        model: a transformers model, or what is around one: a DeepSpeed engine, DistributedDataParallel, the result
            of ``torch.compile``. Whether the engine or the model inside it is passed makes no difference.
        path: a folder or the id of a repository, as for ``from_pretrained``.
        config: our settings; default: from the environment.
        strict: raise if a key is missing, unexpected or of another shape. If false, what is missing stays as it is.
        kwargs: anything else that ``from_pretrained`` takes (``revision``, ``subfolder``, ``key_mapping``, ...).

    Returns:
        What every rank read.

    Raises:
        ConfigError: `model` is not one of transformers' (a PEFT model: pass ``get_base_model()``).
        UnsupportedError: its parameters are sharded (DTensor) or quantised tensors, or `kwargs` would shard them.
        UnsupportedError: the values that an optimizer trains cannot be reached; the message says what to do.
        HfZeroStreamError: on all ranks. Before anything is read: the checkpoint is not sound or does not fit, and
            `model` is as it was. In the middle of reading: some of its weights are new; load again.

    Example:
        >>> engine, *_ = deepspeed.initialize(model=model, config=ds_config)
        >>> hf_zero_stream.load_into(engine, "checkpoints/best")
    """
    with expected_at(LOAD):
        return _load_into(model, path, StreamingConfig.resolve(config, {}), strict, kwargs)


def _load_into(model: Any, path: str, config: StreamingConfig, strict: bool, kwargs: Mapping[str, Any]) -> LoadReport:
    live_model = _inside(model)
    if original_experts.expert_parts(live_model):
        raise UnsupportedError(
            "load_into(model): the model's experts were converted for expert parallelism when it was loaded. Load it "
            "anew with from_pretrained, or use DeepSpeed's checkpoints (engine.load_checkpoint)."
        )
    refuse_wrapped(
        [*live_model.named_parameters(), *live_model.named_buffers()],
        "load_into(model)",
        "Load it anew with from_pretrained(..., distributed_config=...).",
    )
    refuse_sharding(path, kwargs)
    coordinator = Coordinator.of_default_group()
    with coordinator.watched(LOAD), coordinator.reporting():
        finish_saves_into(path, config.read_from, coordinator)
        load = _LiveLoad(replace(config, strict=strict), live_model, coordinator)
        with streaming(), zero3_hidden(), load.memory, load.clock("total"), collector_paused(), torch.no_grad():
            _lazy_model(load, live_model, path, kwargs)
        return load.finish(live_model, logger)


def _inside(model: Any) -> PreTrainedModel:
    """The transformers model inside an engine, DistributedDataParallel or what torch.compile() returns."""
    inner = model
    while not isinstance(inner, PreTrainedModel):
        around, inner = inner, getattr(inner, "_orig_mod", None) or getattr(inner, "module", None)
        if not isinstance(inner, nn.Module):
            raise ConfigError(
                "load_into(model): expected a transformers model or the engine around one; got "
                f"{type(around).__name__}. Of a PEFT model, pass get_base_model()."
            )
    return inner


def _lazy_model(load: _LiveLoad, live_model: PreTrainedModel, path: str, kwargs: Mapping[str, Any]) -> None:
    # Where fp32 values are trained, they are loaded without rounding to the model's own dtype.
    dtype = torch.float32 if load.masters else live_model.dtype
    with Session(load, instead_of_placing=load.place, strict=load.config.strict) as session:
        try:
            type(live_model).from_pretrained(
                path, **{"config": copy.deepcopy(live_model.config), "dtype": dtype, **kwargs}
            )
        except Stopped:
            return
    raise LoadError(f"{path} cannot be streamed: {session.stock_reason or 'transformers loads it in another way'}.")


class _LiveLoad(Load):
    """A load whose destinations are there already."""

    def __init__(self, config: StreamingConfig, model: PreTrainedModel, coordinator: Coordinator) -> None:
        super().__init__(config, {}, coordinator, replicated=not any(map(live.is_zero_param, model.parameters())))
        self._live = model
        self.masters = masters_of(param for param in model.parameters() if not live.is_zero_param(param))
        """What optimizers of stages 0 to 2 train in place of parameters, by the parameter's ``id``."""
        # Without the rounding to the model's dtype, where fp32 partitions are trained.
        if any(getattr(param, "_z3_optimizer", None) is not None for param in model.parameters()):
            self.home.dtype(torch.float32)

    def place(self, model: nn.Module, missing: set[str], tied: set[str]) -> None:
        """Read this rank's bytes into the live model; `model` is the lazy one."""
        params, batches = self._planned(model, missing, lambda: self._prepare_live(model, missing))
        in_context = gathered.gathered(params)

        def begin() -> list[Batch]:
            live.step_back(param for param in params if live.is_zero_param(param))
            return batches

        self._filled(begin)
        gathered.gather_again(in_context)

    def _prepare_live(self, model: nn.Module, missing: set[str]) -> tuple[list[nn.Parameter], list[Batch]]:
        parameters, buffers = self._sources(model, missing)
        batches = self._batches(parameters, buffers)
        self.plan = self._reader.plan([item for batch in batches for item in batch.items])
        return [param for param, _ in parameters.values()], batches

    def _sources(self, model: nn.Module, missing: set[str]) -> tuple[dict[str, Sourced], dict[str, Sourced]]:
        parameters = {_without_adapters(name): param for name, param in self._live.named_parameters()}
        buffers = {_without_adapters(name): buffer for name, buffer in self._live.named_buffers()}
        of_parameters: dict[str, Sourced] = {}
        of_buffers: dict[str, Sourced] = {}
        for name, lazy in [*model.named_parameters(), *model.named_buffers()]:
            view = None if name in missing else source_of(lazy)
            if view is None:
                continue
            found = parameters.get(name, buffers.get(name))
            if found is None or live.shape_of(found) != lazy.shape:
                shape = "no such tensor" if found is None else tuple(live.shape_of(found))
                raise LoadError(
                    f"load_into: the checkpoint's {name} has shape {tuple(lazy.shape)}, the model {shape}. "
                    "Load a checkpoint of the same architecture and sizes."
                )
            if name in parameters:
                of_parameters[name] = (found, view)
            else:
                of_buffers[name] = (found.view(-1), view)
        return of_parameters, of_buffers

    def _batches(self, parameters: Mapping[str, Sourced], buffers: Mapping[str, Sourced]) -> list[Batch]:
        direct = list(zip(whole(buffers), (flat for flat, _ in buffers.values()), strict=True))
        partitions: dict[int, torch.Tensor] = {}
        sources: dict[int, Item] = {}
        in_memory: list[Any] = []
        in_swap_files: list[Any] = []
        replicated: dict[str, Sourced] = {}
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        for name, (param, view) in parameters.items():
            if not live.is_zero_param(param):
                self._replicate(name, param, view, replicated, direct, copies)
                continue
            swapped = getattr(param.ds_tensor, "final_location", None) == "nvme"
            (in_swap_files if swapped else in_memory).append(param)
            target = zero3.partition_target(name, param)
            master = live.master_partition(param)
            if master is not None:
                partitions[id(param)] = master
                direct.append(((replace(target, dtype=master.dtype), view), master))
            elif swapped:
                sources[id(param)] = (target, view)
            else:
                direct.append(((target, view), param.ds_tensor))

        def settle() -> None:
            for param in in_memory:
                if id(param) in partitions:
                    param.ds_tensor.data.copy_(partitions[id(param)])

        batches = [Batch([item for item, _ in direct], lambda: [tensor for _, tensor in direct], settle)]
        if in_swap_files:
            waves = nvme.swap_waves(in_swap_files, in_swap_files[0].nvme_swapper)
            batches.extend(swap_batch(wave, sources, partitions) for wave in waves)
        batches.extend(exchange_batches(replicated, self.coordinator, self.config.staging_bytes))

        def copy_all() -> None:
            for to, values in copies:
                to.copy_(values)

        return [*batches, Batch([], list, copy_all)] if copies else batches

    def _replicate(
        self,
        name: str,
        param: torch.Tensor,
        view: View,
        replicated: dict[str, Sourced],
        direct: list[tuple[Item, torch.Tensor]],
        copies: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        """Say how a parameter that every rank has whole is filled, and what an optimizer trains in its place.

        Args:
            replicated: gets what the ranks fill together.
            direct: gets what this rank reads for itself.
            copies: gets what is copied at the end, (to, from).
        """
        masters = self.masters.get(id(param), ())
        shared = next((master.values for master in masters if master.is_whole), param)
        replicated[name] = (shared, view)
        flat = shared.detach().view(-1)
        if shared is not param:
            copies.append((param.detach().view(-1), flat))
        for master in masters:
            if master.is_whole or _holds_exactly(param.dtype, view):
                copies.append((master.values, flat[master.start : master.stop]))
            else:  # `param` gets rounded values
                numel = master.stop - master.start
                target = Target(f"{name} (optimizer)", master.values.dtype, numel, master.start, master.stop)
                direct.append(((target, view), master.values))


def _without_adapters(name: str) -> str:
    """The name of a parameter or buffer before PEFT put an adapter around its module, or beside it."""
    return name.replace(".base_layer.", ".").replace(".original_module.", ".")


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
