"""Inputs of :mod:`.footprint` from a model and a DeepSpeed config, by DeepSpeed's own parsers."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from deepspeed.runtime.config import DtypeEnum
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig
from torch import nn

from ...errors import ConfigError, refuse_unknown_version
from ...plugin_api import StreamingConfig, chunk_bytes, lies_in_files, own_names, tool, zero3
from . import wire
from .footprint import (
    HOST,
    AdamW,
    EngineSettings,
    MemoryFootprint,
    ParameterShape,
    adamw_copies,
    memory_footprint,
)
from .whole import footprint_of_whole


# The package has a function of the same name.
leaf_flags = importlib.import_module("deepspeed.utils.z3_leaf_module")

_RELIED_ON = (
    "sub_group_size",
    "reduce_bucket_size",
    "offload_param",
    "offload_optimizer",
    "leaf_module",
    "max_live_parameters",
    "max_reuse_distance",
    "prefetch_bucket_size",
    "overlap_comm",
    "use_multi_rank_bucket_allreduce",
)
_missing = [name for name in _RELIED_ON if name not in DeepSpeedZeroConfig.model_fields]
_missing += [name for name in ("apply_zero_leaf_module_config", "z3_leaf_module") if not hasattr(leaf_flags, name)]
refuse_unknown_version("deepspeed", _missing)

# Optimizers that are not like Adam, by their lower-case names in a DeepSpeed config: tensors that they keep for each
# parameter, and settings that each add one.
_STATES: dict[str, tuple[int, tuple[str, ...]]] = {
    "adagrad": (1, ()),
    "lion": (1, ()),
    "muon": (2, ()),  # its auxiliary Adam; a matrix has one less
    "musgd": (0, ("momentum",)),
    "rmsprop": (1, ("momentum", "centered")),
    "sgd": (0, ("momentum",)),
}


# Temporary tensors of the others in a step, and settings that each add one; from torch 2.13's ``torch/optim``.
_STEP_COPIES: dict[str, tuple[int, tuple[str, ...]]] = {
    "adagrad": (1, ("weight_decay",)),
    "lion": (0, ()),
    "rmsprop": (1, ("weight_decay",)),
    "sgd": (0, ("weight_decay", "nesterov")),
}


def model_footprint(
    model: nn.Module,
    ds_config: Mapping[str, Any],
    tied: set[str],
    world_size: int,
    config: StreamingConfig,
    device: str,
    adamw: AdamW | None,
) -> MemoryFootprint:
    """The memory that each rank needs for `model` under ZeRO-3, with partitions or placeholders (see ``zero3.py``).

    At stages 1 and 2 for a whole one, to which the engine gives the dtype of the config.

    An empty `ds_config` means DeepSpeed's defaults; `world_size` ranks share a parameter without a group of its own.
    `adamw` says how torch's AdamW steps, where the config leaves that open.
    """
    zero = _zero_config(ds_config, model)
    named, own = list(model.named_parameters(remove_duplicate=False)), own_names(model)
    placed = (param.dtype for name, param in named if own[name] not in tied and param.is_floating_point())
    is_whole = zero.stage in (1, 2)
    dtype = zero3.partition_dtype(ds_config) if is_whole else next(placed, torch.float32)
    parameters: list[ParameterShape] = []
    seen: set[int] = set()
    keeps_files, small = config.frozen_weights == "files" and not is_whole, zero.param_persistence_threshold
    for name, param in named:
        _, ranks = zero3.place_in_group(param, 0, world_size)
        # DeepSpeed leaves the dtype of adapters, which are put on a model after its load.
        takes_it = param.is_floating_point() and (is_whole or zero3.is_placeholder(param))
        own_dtype = dtype if takes_it else param.dtype
        is_tied = own[name] in tied or id(param) in seen
        if own[name] not in tied:  # a load has put the other end of the tie there
            seen.add(id(param))
        numel = getattr(param, "ds_numel", param.numel())
        is_frozen = not param.requires_grad or lies_in_files(param)
        in_files = keeps_files and is_frozen and numel > small
        parameters.append(ParameterShape(name, numel, own_dtype, not is_frozen, ranks, is_tied, in_files))
    with _errors_of_config():
        settings = _engine_settings(ds_config, zero, dtype, device, adamw)
    if parts := {param.name: param.partition_bytes for param in parameters if param.in_files and not param.tied}:
        arena: Any = config.frozen_bytes or tool("arena_bytes", "from_files")(parts)
        # What the plug-in tells DeepSpeed.
        settings = replace(settings, parameter_swap_bytes=arena, live_numel=0, prefetch_numel=0)
    buffer_bytes = sum(buffer.nbytes for buffer in model.buffers())
    if is_whole:
        return footprint_of_whole(
            parameters,
            settings,
            stage=int(zero.stage),
            shares_reads=config.share_reads,
            loaded_bytes=sum(param.nbytes for name, param in model.named_parameters() if own[name] not in tied),
            buffer_bytes=buffer_bytes,
            staging_bytes=config.staging_on(device),
            exchanged_bytes=2 * chunk_bytes(config, torch.device(device)),
        )
    return memory_footprint(
        parameters,
        settings,
        buffer_bytes=buffer_bytes,
        staging_bytes=config.staging_on(device),
        temporary_bytes=config.temporary_on(device),
        leaf_modules=_leaf_modules(model, zero),
    )


def wire_of_engine(
    model: nn.Module, ds_config: Mapping[str, Any], tied: set[str], world_size: int, *, in_files: bool = False
) -> dict[str, int]:
    """Bytes that each rank sends in a step of the engine, by what they are; arguments of :func:`model_footprint`.

    `in_files`: frozen weights stay in files, and nothing stays gathered.
    """
    zero, own = _zero_config(ds_config, model), own_names(model)
    params = [param for name, param in model.named_parameters() if own[name] not in tied]
    numels = [(getattr(param, "ds_numel", param.numel()), param.requires_grad) for param in params]
    dtype = zero3.partition_dtype(ds_config) if ds_config else next((param.dtype for param in params), torch.float32)
    numel, trained = sum(each for each, _ in numels), sum(each for each, is_trained in numels if is_trained)
    with _errors_of_config():
        gradients = trained * _itemsize(ds_config.get("communication_data_type"), dtype)
    traffic = wire.ZeroTraffic(
        quantised_weights=zero.zero_quantized_weights,
        quantised_gradients=zero.zero_quantized_gradients,
        secondary_ranks=zero.zero_hpz_partition_size,
        all_reduces=zero.use_multi_rank_bucket_allreduce,
        kept_numel=0 if in_files else zero.max_reuse_distance // 2,
        passes=ds_config.get("gradient_accumulation_steps", 1),
    )
    if zero.stage == 3:
        return wire.of_stage_3(numel, dtype.itemsize, gradients, world_size, traffic)
    return wire.of_stages_1_and_2(trained * dtype.itemsize, gradients, world_size, int(zero.stage), traffic)


def _engine_settings(
    ds_config: Mapping[str, Any], zero: DeepSpeedZeroConfig, dtype: torch.dtype, device: str, adamw: AdamW | None
) -> EngineSettings:
    """The settings of a config that matter for memory; without an optimizer there it is AdamW, as Trainer's is."""
    half = {**(ds_config.get("fp16") or {}), **(ds_config.get("bf16") or ds_config.get("bfloat16") or {})}
    gradient = (ds_config.get("data_types") or {}).get("grad_accum_dtype")
    masters_in_half = half.get("bf16_master_weights_and_grads") or half.get("fp16_master_weights_and_grads")
    master = dtype.itemsize if masters_in_half is True else torch.float32.itemsize
    bucket_numel = zero.reduce_bucket_size if zero.contiguous_gradients else 0
    parameters = zero.offload_param or DeepSpeedZeroOffloadParamConfig()
    optimizer = zero.offload_optimizer or DeepSpeedZeroOffloadOptimizerConfig(pin_memory=False)
    swap_numel = parameters.buffer_count * parameters.buffer_size if _device(parameters) == "nvme" else 0
    return EngineSettings(
        device=device,
        offload_param=_device(parameters),
        offload_optimizer=_device(optimizer),
        offload_ratio=optimizer.ratio,
        pinned_optimizer=optimizer.pin_memory,
        swap_from_bytes=_swap_from_bytes(ds_config, parameters, optimizer),
        parameter_swap_bytes=swap_numel * dtype.itemsize,
        optimizer_swap_buffers=optimizer.buffer_count,
        sub_group_size=zero.sub_group_size,
        reduce_bucket_bytes=bucket_numel * _itemsize(ds_config.get("communication_data_type"), dtype),
        gradient_itemsize=_itemsize(gradient, dtype),
        master_itemsize=master,
        state_bytes=_state_bytes(ds_config, _device(optimizer) != "none", half, master),
        step_copies=_step_copies(ds_config, device if _device(optimizer) == "none" else HOST, optimizer, adamw),
        secondary_ranks=zero.zero_hpz_partition_size,
        live_numel=max(zero.max_live_parameters, zero.max_reuse_distance),
        prefetch_numel=zero.prefetch_bucket_size,
        bucket_count=2 if zero.overlap_comm else 1,
    )


@contextmanager
def _errors_of_config() -> Iterator[None]:
    """Turn what values of a wrong kind raise into a ConfigError: the checkpoint is not to blame."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"ds_config: expected DeepSpeed's config; got one with {error}. Correct it.") from error


def _leaf_modules(model: nn.Module, zero: DeepSpeedZeroConfig) -> list[str]:
    """Names of the modules that ``deepspeed.initialize`` will gather whole; the flags are taken off again."""
    flagged = {id(module) for module in model.modules() if leaf_flags.z3_leaf_module(module)}
    found = leaf_flags.apply_zero_leaf_module_config(model, zero.leaf_module)
    names = [name for name, module in model.named_modules() if leaf_flags.z3_leaf_module(module)]
    for module in found:
        if id(module) not in flagged:
            leaf_flags.set_z3_leaf_module(module, False)
    return names


def _zero_config(ds_config: Mapping[str, Any], model: nn.Module) -> DeepSpeedZeroConfig:
    zero = dict(ds_config.get("zero_optimization") or {"stage": 3})
    hidden_size = _hidden_size(getattr(model, "config", None))
    if zero.get("reduce_bucket_size") == "auto" and hidden_size:
        zero["reduce_bucket_size"] = hidden_size**2  # as transformers and accelerate will fill it in
    return zero3.parsed(zero)


def _hidden_size(config: Any) -> int:
    """The hidden size by which transformers fills in "auto" (HfTrainerDeepSpeedConfig.trainer_config_finalize)."""
    for holder in (config, getattr(config, "text_config", None)):
        size = getattr(holder, "hidden_size", None) or max(getattr(holder, "hidden_sizes", None) or [0])
        if isinstance(size, int) and size:
            return size
    return 0


def _itemsize(name: str | None, default: torch.dtype) -> int:
    """Bytes of an element of the dtype that DeepSpeed calls `name` ("fp32", "bf16", ...)."""
    dtype: torch.dtype = DtypeEnum(name).value if name else default
    return dtype.itemsize


def _device(offload: Any) -> str:
    return str(getattr(offload.device, "value", offload.device))  # the default is no member of its enum


def _state_bytes(
    ds_config: Mapping[str, Any], is_offloaded: bool, half: Mapping[str, Any], master_itemsize: int
) -> int:
    """Bytes that the optimizer keeps for each element of a parameter."""
    section = ds_config.get("optimizer") or {}
    name, params = str(section.get("type", "AdamW")).lower(), section.get("params") or {}
    states, extras = _STATES.get(name, (2, ("amsgrad",)))
    states += sum(bool(params.get(extra)) for extra in extras)
    # DeepSpeed's Adam for the CPU keeps states in fp32 whatever it trains, unless it is told not to.
    on_cpu = is_offloaded and name in ("adam", "adamw") and not params.get("torch_adam")
    if on_cpu and not half.get("bf16_optimizer_states") and params.get("fp32_optimizer_states", True):
        return states * torch.float32.itemsize
    return states * master_itemsize


def _step_copies(ds_config: Mapping[str, Any], place: str, optimizer: Any, adamw: AdamW | None) -> int:
    """The number of temporary tensors in a step of the optimizer, each as large as the tensors stepped at once."""
    section, on_host = ds_config.get("optimizer"), _device(optimizer) != "none"
    name, params = str((section or {}).get("type", "AdamW")).lower(), (section or {}).get("params") or {}
    if name in _STEP_COPIES:
        copies, extras = _STEP_COPIES[name]
        return 0 if on_host and name == "adagrad" else copies + sum(bool(params.get(extra)) for extra in extras)
    if name in ("adam", "adamw"):
        # DeepSpeed's own are fused. It insists on them, and accelerate takes them, for an optimizer on the host.
        forced = on_host and ds_config.get("zero_force_ds_cpu_optimizer", True)
        if not params.get("torch_adam") and (section is not None or forced):
            return 0
        if params.get("fused"):
            return adamw_copies("fused", place)
        if params.get("foreach") is not None:
            return adamw_copies("foreach" if params["foreach"] else "single", place)
    return adamw_copies(adamw, place)


def _swap_from_bytes(ds_config: Mapping[str, Any], *offloads: Any) -> int:
    if "nvme" not in map(_device, offloads):
        return 0
    swap_from_bytes: int = zero3.nvme().swap_from_bytes(ds_config)
    return swap_from_bytes
