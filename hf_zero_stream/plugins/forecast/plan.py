"""``plan()``: what one rank of a world of any size will read, and the memory that it will need."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from importlib.util import find_spec
from math import prod
from typing import Any

import torch

from ...errors import ConfigError, UnsupportedError, VersionError
from ...plugin_api import (
    Coordinator,
    Load,
    LoadPlan,
    Tabular,
    buildable_config,
    bytes_text,
    collector_paused,
    config_without_auto,
    count_text,
    cuts_matrices,
    device_type,
    distributed_config_of,
    floating_dtype,
    is_pipeline,
    lazily_loaded,
    outside_zero_init,
    put_adapters_on,
    refuse_settings,
    refuse_sharding,
    settings_for,
    warn_of_open_dtype,
    wrapped,
)
from .footprint import ADAMW_COPIES, AdamW, MemoryFootprint
from .memory import model_memory


@dataclass(frozen=True)
class Forecast(Tabular):
    """The bytes that one rank will read, and the memory that it will need, in load and training (both computed)."""

    load: LoadPlan
    memory: MemoryFootprint

    def table(self) -> str:
        """The forecast for people to read: plain text in several lines of at most 80 columns."""
        plan, cost = self.load, self.load.cost
        reads = (
            f"Needs {bytes_text(cost.bytes_needed)} of {bytes_text(plan.checkpoint_bytes)}, and reads "
            f"{bytes_text(cost.bytes_read)} of {count_text(len(plan.shards), 'shard')} in "
            f"{count_text(cost.reads, 'read')}."
        )
        heading = f"PLAN OF RANK {plan.rank} OF {plan.world_size}"
        return "\n".join([heading, wrapped(reads), "", self.memory.table()])


def plan(
    path: str | os.PathLike[str],
    *,
    world_size: int,
    rank: int = 0,
    ds_config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    distributed_config: Any = None,
    dtype: torch.dtype | str | None = None,
    device: str | None = None,
    adamw: AdamW | None = None,
    lora: Any = None,
    **kwargs: Any,
) -> Forecast:
    """The load plan and the memory of one rank of a world of any size; needs no process group and reads no weights.

    The model is built on the meta device, and transformers' own renames and conversions run over tensors that carry
    only their layout, exactly as in a load.

    Args:
        path: a checkpoint's folder or the id of a repository, as for ``from_pretrained``.
        world_size: number of ranks that share the checkpoint.
        rank: the rank to plan for.
        ds_config: a DeepSpeed config (dict or path), for the dtype that DeepSpeed gives to parameters, for the memory
            that its engine needs and for our settings.
        distributed_config: transformers' ``DistributedConfig`` (or a dict of its fields), for a model that is sharded
            by FSDP2, tensor or expert parallelism in place of ZeRO-3.
        dtype: dtype of the parameters where `ds_config` is not given, or leaves it open (``"bf16": {"enabled":
            "auto"}``, which accelerate and the Trainer fill in); default: the checkpoint's own, and where `ds_config`
            leaves it open fp32, with a warning.
        device: type of the device that will train ("cuda", "cpu"), for ``memory``; default: this machine's.
        adamw: how torch's AdamW steps, for ``memory.step_peak``, where `ds_config` does not say it: "single" (tensor
            by tensor), "foreach", or "fused" (the Trainer's default). Default: what torch chooses, which is "foreach"
            on a GPU and "single" on a CPU.
        lora: adapters that are put on the loaded model, and trained alone, for ``memory``: PEFT's ``LoraConfig``, or a
            dict of its arguments. Under ZeRO-3, which partitions them, and with ``fsdp_size`` alone: on a model
            that is sharded already they are whole on every rank.
        kwargs: anything else that ``from_pretrained`` takes (``revision``, ``trust_remote_code``, ...).

    Raises:
        ConfigError: `rank` is not below `world_size`, the stage of `ds_config` is not 3, the sizes in
            `distributed_config` do not make up `world_size`, `adamw` is none of the three, or PEFT does not take
            `lora`.
        HfZeroStreamError: the checkpoint is not sound.
        RuntimeError: it does not fit its model (transformers' own error, after its LOAD REPORT).

    Examples:
        >>> forecast = hf_zero_stream.plan("Qwen/Qwen3-30B-A3B", world_size=64, rank=37)
        >>> forecast.load.cost.bytes_read, forecast.memory.held
        >>> forecast = hf_zero_stream.plan(
        ...     "deepseek-ai/DeepSeek-V3", world_size=512, rank=37, distributed_config={"fsdp_size": 64, "tp_size": 8}
        ... )
    """
    path = os.fspath(path)
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank: expected 0 <= rank < world_size ({world_size}); got {rank}")
    if adamw is not None and adamw not in ADAMW_COPIES:
        raise ConfigError(f"adamw: expected one of {', '.join(ADAMW_COPIES)}; got {adamw!r}")
    refuse_settings(kwargs)
    wanted = None if dtype == "auto" else floating_dtype(dtype)
    coordinator = Coordinator(rank, world_size, alone=True)
    if distributed_config is not None:
        kwargs["distributed_config"] = distributed_config
    _check_tp_plan(kwargs)
    if (sharding := distributed_config_of(kwargs)) is not None:
        if is_pipeline(sharding):
            raise UnsupportedError(
                f"plan(): expected pp_size 1; got {sharding.pp_size}. With pipeline parallelism ranks hold different "
                "models, which are not streamed."
            )
        _check_world(sharding, world_size)
        if ds_config is not None:
            raise ConfigError("plan(): expected ds_config or distributed_config; got both")
        if lora is not None and (sharding.fsdp_size or 1) != world_size:
            raise ConfigError(
                "plan(lora=...): expected ZeRO-3, or distributed_config with fsdp_size alone; got other sizes, for "
                "which PEFT would make adapters of the sizes of shards"
            )
        from ...plugin_api import DTensors  # imports torch's FSDP2
        from .fake_group import fake_group

        settings = settings_for({}, None)
        shards = DTensors(
            coordinator,
            torch.device("cpu"),
            packing_unsupported_reason=cuts_matrices(sharding),
            shares_reads=not settings.compares_values,
        )
        shards.trains_on = device or device_type()
        load = Load(settings, {}, coordinator, shards)
        with fake_group(rank, world_size):
            return _forecast(path, load, {"dtype": wanted or "auto", **kwargs}, shards.trains_on, adamw, lora)
    refuse_sharding(path, kwargs)
    if find_spec("deepspeed") is None:
        raise VersionError(
            "plan(): a plan for ZeRO-3 needs DeepSpeed, which is not installed. Install it, or plan for FSDP2: "
            "distributed_config={'fsdp_size': ...}, on the command line --fsdp."
        )
    from ...plugin_api import Partitioned  # imports deepspeed, which takes seconds

    found = {} if ds_config is None else _with_dtype(buildable_config(ds_config), wanted)
    if (stage := (found.get("zero_optimization") or {}).get("stage", 3)) != 3:
        raise ConfigError(f"plan(ds_config=...): expected zero_optimization.stage 3; got {stage!r}")
    config = config_without_auto(found) if found else {}
    destination = Partitioned(config, coordinator)
    load = Load(settings_for(found, None), config, coordinator, destination)
    trains_on = device or destination.device.type
    return _forecast(path, load, {"dtype": wanted or "auto", **kwargs}, trains_on, adamw, lora)


def _forecast(
    path: str, load: Load, arguments: Mapping[str, Any], device: str, adamw: AdamW | None, lora: Any
) -> Forecast:
    with closing(load), collector_paused(), outside_zero_init():
        model, missing, tied = lazily_loaded(path, load, **arguments)
        load.make_plan(model, missing, tied, only_planned=True)
        assert load.plan is not None

        engine, world_size = load.destination.trained_by, load.coordinator.world_size
        how = tied, engine, load.ds_config, world_size, load.config, device, adamw
        memory = model_memory(model, *how)
        if lora is not None:  # adapters are put on what has been loaded
            put_adapters_on(model, lora)
            memory = replace(model_memory(model, *how), load_peak=memory.load_peak)
        return Forecast(load.plan, memory)


def _check_tp_plan(kwargs: Mapping[str, Any]) -> None:
    config = kwargs.get("distributed_config")
    for given in (kwargs, config if isinstance(config, Mapping) else {}):
        if given.get("tp_plan") is not None and given.get("tp_size") is None:
            raise ConfigError("plan(tp_plan=...): expected tp_size too, which a launcher would announce; got none")


def _check_world(sharding: Any, world_size: int) -> None:
    sizes = {name: getattr(sharding, name, None) or 1 for name in ("dp_replicate_size", "fsdp_size", "tp_size")}
    if prod(sizes.values()) != world_size:
        product = " * ".join(f"{name} {size}" for name, size in sizes.items())
        raise ConfigError(f"world_size: expected {prod(sizes.values())}, which is {product}; got {world_size}")


def _with_dtype(ds_config: dict[str, Any], dtype: torch.dtype | None) -> dict[str, Any]:
    """The config with `dtype` in place of "auto"; without a `dtype`, "auto" counts as off, with a warning."""
    from ...plugin_api import zero3

    sections = zero3.undecided(ds_config)
    if sections and dtype is None:
        warn_of_open_dtype(sections, "Pass plan(dtype=...) for another.")
    enabled = {"torch.bfloat16": ("bf16", "bfloat16"), "torch.float16": ("fp16",)}
    names = enabled.get(str(dtype), ())
    return {**ds_config, **{name: {**ds_config[name], "enabled": name in names} for name in sections}}
