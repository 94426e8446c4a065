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

from .config import StreamingConfig
from .coordination import Coordinator
from .errors import ConfigError, LoadError, UnsupportedError
from .homes import Sourced, exchange_batches, swap_batch, whole
from .integration import finish_saves_into, streaming
from .load import Load, source_of
from .memory import collector_paused
from .partition import gathered, live, nvme, original_experts, zero3
from .reading import Batch, Item
from .report import LoadReport
from .seams import Session, Stopped, zero3_hidden


__all__ = ["load_into"]

logger = logging.get_logger(__name__)


def load_into(
    model: Any, path: str, *, config: StreamingConfig | None = None, strict: bool = True, **kwargs: Any
) -> LoadReport:
    """Stream the checkpoint at `path` into `model`: a better one, one of another run, the weights of a peer.

    Every rank reads the bytes of its partitions and nothing else, straight into them. Where a ZeRO-3 engine trains
    the model, they go into its fp32 partitions first and from there, rounded, into those of 16 bit. The optimizer's
    other states stay as they are. All ranks must call it together, between steps.

    Args:
        model: a transformers model, or the DeepSpeed engine around one; ZeRO-3 or not.
        path: a folder or the id of a repository, as for ``from_pretrained``.
        config: our settings; default: from the environment.
        strict: raise if a key is missing, unexpected or of another shape. If false, what is missing stays as it is.
        kwargs: anything else that ``from_pretrained`` takes (``revision``, ``subfolder``, ``key_mapping``, ...).

    Returns:
        What every rank read.

    Raises:
        ConfigError: `model` is not one of transformers' (a PEFT model: pass ``get_base_model()``).
        HfZeroStreamError: on all ranks. Before anything is read: the checkpoint is not sound or does not fit, and
            `model` is as it was. In the middle of reading: some of its weights are new; load again.

    Example:
        >>> engine, *_ = deepspeed.initialize(model=model, config=ds_config)
        >>> hf_zero_stream.load_into(engine, "checkpoints/best")
    """
    live_model = getattr(model, "module", model)
    if not isinstance(live_model, PreTrainedModel):
        raise ConfigError(
            "load_into(model): expected a transformers model or the engine around one; got "
            f"{type(live_model).__name__}. Of a PEFT model, pass get_base_model()."
        )
    if original_experts.expert_parts(live_model):
        raise UnsupportedError(
            "load_into(model): the model's experts were converted for expert parallelism when it was loaded. Load it "
            "anew with from_pretrained, or use DeepSpeed's checkpoints (engine.load_checkpoint)."
        )
    coordinator = Coordinator.of_default_group()
    with coordinator.watched():
        try:
            finish_saves_into(path, coordinator)
            load = _LiveLoad(replace(StreamingConfig.resolve(config, {}), strict=strict), live_model, coordinator)
            with streaming(), zero3_hidden(), load.memory, load.clock("total"), collector_paused(), torch.no_grad():
                _lazy_model(load, live_model, path, kwargs)
                live.refresh_masters(model)
            return load.finish(live_model, logger)
        except BaseException as error:
            failure = coordinator.report(error)
            raise failure from (None if failure is error else error)


def _lazy_model(load: _LiveLoad, live_model: PreTrainedModel, path: str, kwargs: Mapping[str, Any]) -> None:
    with Session(load, instead_of_placing=load.place) as session:
        try:
            type(live_model).from_pretrained(
                path, **{"config": copy.deepcopy(live_model.config), "dtype": live_model.dtype, **kwargs}
            )
        except Stopped:
            return
    raise LoadError(f"{path} cannot be streamed: {session.stock_reason or 'transformers loads it in another way'}.")


class _LiveLoad(Load):
    """A load whose destinations are there already."""

    def __init__(self, config: StreamingConfig, model: PreTrainedModel, coordinator: Coordinator) -> None:
        super().__init__(config, {}, coordinator, replicated=not any(map(live.is_zero_param, model.parameters())))
        self._live = model
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
        parameters = dict(self._live.named_parameters())
        buffers = dict(self._live.named_buffers())
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
        masters: dict[int, torch.Tensor] = {}
        sources: dict[int, Item] = {}
        in_memory: list[Any] = []
        in_swap_files: list[Any] = []
        replicated: dict[str, Sourced] = {}
        for name, (param, view) in parameters.items():
            if not live.is_zero_param(param):
                replicated[name] = (param, view)
                continue
            swapped = getattr(param.ds_tensor, "final_location", None) == "nvme"
            (in_swap_files if swapped else in_memory).append(param)
            target = zero3.partition_target(name, param)
            master = live.master_partition(param)
            if master is not None:
                masters[id(param)] = master
                direct.append(((replace(target, dtype=master.dtype), view), master))
            elif swapped:
                sources[id(param)] = (target, view)
            else:
                direct.append(((target, view), param.ds_tensor))

        def settle() -> None:
            for param in in_memory:
                if id(param) in masters:
                    param.ds_tensor.data.copy_(masters[id(param)])

        batches = [Batch([item for item, _ in direct], lambda: [tensor for _, tensor in direct], settle)]
        if in_swap_files:
            waves = nvme.swap_waves(in_swap_files, in_swap_files[0].nvme_swapper)
            batches.extend(swap_batch(wave, sources, masters) for wave in waves)
        return [*batches, *exchange_batches(replicated, self.coordinator, self.config.staging_bytes)]
