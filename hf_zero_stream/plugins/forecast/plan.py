"""``plan()``: what one rank of a world of any size will read, the memory that it will need, and what it will send."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from math import prod
from typing import Any

import torch

from ...errors import ConfigError, UnsupportedError, VersionError
from ...plugin_api import (
    Coordinator,
    Load,
    LoadPlan,
    Replicated,
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
from . import wire
from .activations import activations
from .footprint import ADAMW_COPIES, FILES, AdamW, MemoryFootprint
from .memory import model_memory


@dataclass(frozen=True)
class Forecast(Tabular):
    """The bytes that one rank will read, and the memory that it will need, in load and training (all computed).

    Attributes:
        wire: bytes that it sends in a step, by what they are (see :mod:`.wire`).
        activations: bytes of those of a micro-batch, "kept" and "checkpointed" (see :mod:`.activations`); empty
            without its tokens.
    """

    load: LoadPlan
    memory: MemoryFootprint
    wire: Mapping[str, int] = field(default_factory=dict)
    activations: Mapping[str, int] = field(default_factory=dict)

    def table(self) -> str:
        """The forecast for people to read: plain text in several lines of at most 80 columns."""
        plan, cost = self.load, self.load.cost
        reads = (
            f"Needs {bytes_text(cost.bytes_needed)} of {bytes_text(plan.checkpoint_bytes)}, and reads "
            f"{bytes_text(cost.bytes_read)} of {count_text(len(plan.shards), 'shard')} in "
            f"{count_text(cost.reads, 'read')}."
        )
        heading = f"PLAN OF RANK {plan.rank} OF {plan.world_size}"
        rows = [f"Sends {bytes_text(sum(self.wire.values()))} in a step: {_listed(self.wire)}"] if self.wire else []
        if self.activations:
            rows.append(f"Activations, estimated: {_listed(self.activations)}")
        return "\n".join([heading, wrapped(reads), "", self.memory.table(), *map(wrapped, rows)])


def _listed(parts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {bytes_text(nbytes)}" for name, nbytes in parts.items())


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
    tokens: int | None = None,
    **kwargs: Any,
) -> Forecast:
    """The load plan and the memory of one rank of a world of any size; needs no process group and reads no weights.

    At ZeRO's stages 1 and 2 each rank reads the whole checkpoint into host memory, as in stock; with ``share_reads``
    (in the config's section ``hf_zero_stream``) it reads a part of it, onto the device.

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
        tokens: of a micro-batch on one rank, for ``activations``, and for what tensor parallelism sends.
        kwargs: anything else that ``from_pretrained`` takes (``revision``, ``trust_remote_code``, ...).

    Raises:
        ConfigError: `rank` is not below `world_size`, the stage of `ds_config` is not 1 to 3, the sizes in
            `distributed_config` do not make up `world_size`, `adamw` is none of the three, PEFT does not take `lora`,
            or `tokens` is below 1 or the model's config lacks what activations are estimated from.
        UnsupportedError: `ds_config` has AutoTP or AutoEP at stage 1 or 2.
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
    if tokens is not None and tokens < 1:
        raise ConfigError(f"tokens: expected the tokens of a micro-batch, 1 or more; got {tokens}")
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
            how = shards.trains_on, adamw, lora, tokens, sharding.tp_size or 1
            forecast = _forecast(path, load, {"dtype": wanted or "auto", **kwargs}, *how)
        return replace(forecast, wire={**_wire_of_shards(forecast.memory, sharding), **forecast.wire})
    refuse_sharding(path, kwargs)
    if find_spec("deepspeed") is None:
        raise VersionError(
            "plan(): a plan for ZeRO-3 needs DeepSpeed, which is not installed. Install it, or plan for FSDP2: "
            "distributed_config={'fsdp_size': ...}, on the command line --fsdp."
        )
    from ...plugin_api import Partitioned  # imports deepspeed, which takes seconds

    found = {} if ds_config is None else _with_dtype(buildable_config(ds_config), wanted)
    if (stage := (found.get("zero_optimization") or {}).get("stage", 3)) not in (1, 2, 3):
        raise ConfigError(f"plan(ds_config=...): expected zero_optimization.stage 1, 2 or 3; got {stage!r}")
    config, settings = config_without_auto(found) if found else {}, settings_for(found, None)
    destination = Partitioned(config, coordinator)
    trains_on = device or destination.device.type
    load = Load(settings, config, coordinator, destination)
    _refuse_cut(config, stage)
    if stage < 3:
        readers = coordinator if settings.share_reads else Coordinator(0, 1, alone=True)
        load = Load(settings, config, coordinator, Replicated(readers, settings, torch.device("cpu")))
    return _forecast(path, load, {"dtype": wanted or "auto", **kwargs}, trains_on, adamw, lora, tokens)


def _refuse_cut(ds_config: Mapping[str, Any], stage: int) -> None:
    """Raise an UnsupportedError for whole models that the engine will cut, or convert."""
    asks = {
        "tensor_parallel.autotp_size": (ds_config.get("tensor_parallel") or {}).get("autotp_size", 1) not in (0, 1),
        "expert_parallel": stage < 3 and (ds_config.get("expert_parallel") or {}).get("enabled"),
    }
    for name in (name for name, asked in asks.items() if asked):
        raise UnsupportedError(
            f"plan(ds_config=...): {name} is not planned at stage {stage}. Leave it out for what each rank needs of "
            "the whole model, which is more."
        )


def _forecast(
    path: str,
    load: Load,
    arguments: Mapping[str, Any],
    device: str,
    adamw: AdamW | None,
    lora: Any,
    tokens: int | None,
    tp_ranks: int = 1,
) -> Forecast:
    with closing(load), collector_paused(), outside_zero_init():
        model, missing, tied = lazily_loaded(path, load, **arguments)
        load.make_plan(model, missing, tied, only_planned=True)
        assert load.plan is not None

        engine, world_size = load.destination.trained_by or "deepspeed", load.coordinator.world_size
        memory_of = partial(
            model_memory,
            tied=tied,
            engine=engine,
            ds_config=load.ds_config,
            world_size=world_size,
            config=load.config,
            device=device,
            adamw=adamw,
        )
        memory = memory_of(model)
        if lora is not None:  # adapters are put on what has been loaded
            put_adapters_on(model, lora)
            with_adapters = memory_of(model)  # only now it is known what is frozen
            is_in_memory = load.config.frozen_weights == "memory"
            memory = replace(with_adapters, load_peak=memory.load_peak) if is_in_memory else with_adapters
        sent, kept = dict[str, int](), dict[str, int]()
        if engine == "deepspeed":
            from .engine_memory import wire_of_engine  # imports deepspeed

            in_files = FILES in memory.partitions
            sent = wire_of_engine(model, load.ds_config, tied, world_size, in_files=in_files)
        if tokens is not None:
            kept = activations(model.config, tokens, tp_ranks)
            if tp_ranks > 1:
                text = model.config.get_text_config()
                sizes = text.hidden_size, text.num_hidden_layers, model.dtype.itemsize
                sent = {"tensor parallelism": wire.of_tensor_parallelism(tokens, *sizes, tp_ranks)}
        return Forecast(load.plan, memory, sent, kept)


def _wire_of_shards(memory: MemoryFootprint, sharding: Any) -> dict[str, int]:
    """What FSDP2 sends; empty with expert parallelism, where parameters have several groups of ranks."""
    if (getattr(sharding, "ep_size", None) or 1) > 1:
        return {}
    held, trained = sum(memory.partitions.values()), sum(memory.gradients.values())
    return wire.of_fsdp2(held, trained, sharding.fsdp_size or 1, sharding.dp_replicate_size or 1)


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
