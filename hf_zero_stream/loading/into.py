"""``load_into()`` streams a checkpoint into a model that exists already, partitioned or not, in training or not."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from ..bindings.install import shortening
from ..destinations.base import fill_whole, refuse_wrapped
from ..destinations.live import LiveModel
from ..engine.load import Load
from ..errors import ConfigError, UnsupportedError
from ..holdings import fsdp
from ..holdings.introspection import is_packed, local_of, refuse_unknown_shards
from ..holdings.own_names import fixed_names, named_buffers
from ..ranks.coordinator import expected_at, meeting
from ..ranks.rendezvous import LOAD
from ..reports.load import LoadReport
from ..reports.measures import collector_paused
from ..seams.building import computed_buffers
from ..seams.ds_config import settings_in_force
from ..seams.wrappers import unwrapped
from ..settings.config import refuse_settings
from ..sources.by_path import mounted_by_plugin
from .choice import refuse_sharding
from .dry_load import lazily_loaded_like
from .entrance import note_source
from .integration import finish_saves_into


logger = logging.get_logger(__name__)


@shortening
def load_into(model: Any, path: str | os.PathLike[str], *, strict: bool = True, **kwargs: Any) -> LoadReport:
    """Stream the checkpoint at `path` into `model`. All ranks must call it together, between steps.

    Every rank reads only the bytes of its partitions or DTensor shards, straight into their memory. Where a DeepSpeed
    optimizer trains fp32 values in place of the model's own, at any ZeRO stage, these get the checkpoint's values too,
    without rounding. The optimizer's other states stay as they are. Refresh afterwards what hf_zero_stream does not
    know: averages of weights, and master copies that another optimizer keeps.

    Settings are those of :class:`streaming` around the call.

    A sharded model (FSDP2, HSDP, tensor and expert parallelism) may come from anywhere; built on the meta device, it
    needs ``model.to_empty(device=...)`` before. Its buffers that are in no checkpoint get the values that transformers
    computes for them when it loads.

    Args:
        model: a transformers model, or what is around one: a DeepSpeed engine, DistributedDataParallel, the result
            of ``torch.compile``.
        path: a folder or the id of a repository, as for ``from_pretrained``.
        strict: raise if a key is missing, unexpected or of another shape. If false, what is missing stays as it is.
        kwargs: anything else that ``from_pretrained`` takes (``revision``, ``subfolder``, ``key_mapping``, ...).

    Returns:
        What every rank read.

    Raises:
        ConfigError: `model` is not one of transformers' (a PEFT model: pass ``get_base_model()``).
        UnsupportedError: its parameters are quantised tensors, or `kwargs` would shard them.
        UnsupportedError: the values that an optimizer trains cannot be reached; the message says what to do.
        HfZeroStreamError: on all ranks. Before anything is read: the checkpoint is not sound or does not fit, and
            `model` is as it was. In the middle of reading: some of its weights are new; load again.

    Examples:
        >>> engine, *_ = deepspeed.initialize(model=model, config=ds_config)
        >>> hf_zero_stream.load_into(engine, "checkpoints/best")
    """
    path = os.fspath(path)
    with expected_at(LOAD):
        refuse_settings(kwargs)
        refuse_sharding(path, kwargs)
        refuse_unknown_shards(model, "load_into")
        live_model = _inside(model)

    report = _fill(live_model, path, kwargs, strict=strict)
    note_source(live_model, path, kwargs)
    return report


@fixed_names()
@collector_paused()
def _fill(live_model: PreTrainedModel, path: str, kwargs: Mapping[str, Any], *, strict: bool) -> LoadReport:
    with expected_at(LOAD):
        config = replace(settings_in_force(), strict=strict)
        if is_packed(live_model):
            raise UnsupportedError(
                "load_into(model): the model's weights are packed as in the checkpoint that it was loaded from "
                "(keep_quantized). Load it anew with from_pretrained."
            )
        make_ready(live_model)
        with meeting(LOAD) as coordinator, ExitStack() as stack:
            finish_saves_into(path, config.read_from, coordinator)
            stack.enter_context(mounted_by_plugin(path, coordinator))
            memory = LiveModel(live_model, coordinator, config)
            load = Load(config, {}, coordinator, memory)
            with closing(load), load.memory, load.clock("total"), torch.no_grad():
                arguments = {"dtype": memory.dtype_of_values, **kwargs}
                lazy, missing, tied = lazily_loaded_like(live_model, path, load, **arguments)
                computed = computed_buffers(lazy) if memory.is_sharded else {}
                load.fill(lazy, missing, tied)
                # Buffers that no checkpoint has, where the model has memory for them.
                buffers = dict(named_buffers(live_model))
                for name, values in computed.items():
                    if name in buffers and buffers[name].shape == values.shape:
                        buffers[name].copy_(values)
            return load.finish(live_model, logger)


def make_ready(live_model: nn.Module) -> None:
    """Have the model's own parameters be there to be filled; an UnsupportedError if they cannot be."""
    fill_whole(live_model)
    fsdp.reshard(live_model)  # after a forward pass, FSDP2 may have gathered parameters in place of its own
    fsdp.join_ties(live_model)
    refuse_wrapped(
        [*((name, local_of(param)) for name, param in live_model.named_parameters()), *live_model.named_buffers()],
        "load_into(model)",
        "Load it anew with from_pretrained.",
    )


def _inside(model: Any) -> PreTrainedModel:
    """The transformers model inside an engine, what ``torch.compile`` returns, or any wrapper with a ``module``."""
    inner = unwrapped(model)
    while not isinstance(inner, PreTrainedModel):
        around, inner = inner, getattr(inner, "module", None)
        if not isinstance(inner, nn.Module):
            raise ConfigError(
                "load_into(model): expected a transformers model or the engine around one; got "
                f"{type(around).__name__}. Of a PEFT model, pass get_base_model()."
            )
    return inner
