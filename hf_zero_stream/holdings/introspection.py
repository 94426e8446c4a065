"""Reads the attributes that DeepSpeed, FSDP2 and others leave on a model, without importing those packages.

DeepSpeed takes seconds to import, torch's FSDP2 tenths of a second. A feature that a model has no mark of stays out.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..errors import UnsupportedError
from ..registry import tool
from .own_names import modules, parameters


PACKED = "_hf_zero_stream_packed"
"""The attribute of a module with its packed weights; see :func:`packed_weights`."""

CONVERTED = "_hf_zero_stream_origin"
"""The attribute of a converted layer of experts that says what it was; see :mod:`...plugins.autoep.original`."""

LOADED_FROM = "_hf_zero_stream_loaded_from"
"""The attribute of a model with the path that it was loaded from, and arguments that say which checkpoint that is."""

LOADED_SHAPES = "_hf_zero_stream_loaded_shapes"
"""The attribute of a model with the shapes that its parameters had when they were loaded, by own names."""

CUT = "ds_autotp_universal_checkpoint_meta"
"""The attribute of a parameter of which DeepSpeed's AutoTP has left a part; see :mod:`..plugins.autotp.shards`."""


def instances_of(*kinds: type) -> list[Any]:
    """Objects of these classes that are in use: an object refers to its class, and the garbage collector knows it."""
    every = [*kinds]
    for kind in every:
        every += kind.__subclasses__()
    was_frozen = gc.get_freeze_count() > 0
    if was_frozen:  # the collector would not look at what gc.freeze() took out
        gc.unfreeze()
    try:
        if not any(type(referrer) in every for referrer in gc.get_referrers(*every)):
            return []
        gc.collect()  # an engine that was dropped lives on until then, with values that nobody trains any more
        return [referrer for referrer in gc.get_referrers(*every) if type(referrer) in every]
    finally:
        if was_frozen:
            gc.freeze()


def is_cut(param: Any) -> bool:
    """Whether DeepSpeed's AutoTP has cut `param`, so that ranks hold parts of it."""
    return hasattr(param, CUT) and not getattr(param, CUT)["conversion"]["replicated"]


def autotp_shards() -> Any:
    """:mod:`..plugins.autotp.shards`, which knows what parts of parameters are; else a MissingPluginError."""
    return tool("autotp_shards", "autotp", "a model that DeepSpeed's AutoTP has cut")


def whole_shape(tensor: Any) -> torch.Size:
    """The shape of a parameter of which this rank may hold a part."""
    if is_cut(tensor):
        return torch.Size(getattr(tensor, CUT)["conversion"]["original_shape"])
    return torch.Size(getattr(tensor, "ds_shape", tensor.shape))


_SIZES = {
    "get_model_parallel_world_size": "model parallelism",
    "get_tensor_model_parallel_world_size": "tensor parallelism",
    "get_slice_parallel_world_size": "tensor parallelism",
    "get_pipeline_model_parallel_world_size": "stages of a pipeline",
    "get_pipe_parallel_world_size": "stages of a pipeline",
}
"""What an `mpu` may say of its groups, under Megatron's names and DeepSpeed's own; one that has no such group may lack
the method.
"""


def unknown_shards_reason(trained: Any) -> str:
    """Why only DeepSpeed knows what the ranks of `trained` hold of its model; "" if it is no such engine.

    They may hold parts of it by an `mpu`, or as stages of a pipeline, which looks like plain data parallelism: each
    rank has tensors under all names of the model. So the engine is asked what its groups are.
    """
    engine: Any = getattr(sys.modules.get("deepspeed.runtime.engine"), "DeepSpeedEngine", ())
    if not isinstance(trained, engine):
        return ""
    if trained.autotp_size() > 1:
        reason: str = autotp_shards().unknown_reason(trained)
        return reason
    for name, kind in _SIZES.items():
        size = getattr(trained.mpu, name, lambda: 1)()
        if size > 1:
            return f"its mpu has {kind} over {size} ranks, and says nothing of what each parameter is a part of"
    return ""


def is_model_parallel(engine: Any) -> bool:
    """Whether ranks of a DeepSpeed engine hold parts of its model, known or not."""
    return engine.autotp_size() > 1 or bool(unknown_shards_reason(engine))


def refuse_unknown_shards(trained: Any, doing: str) -> None:
    """Raise an UnsupportedError (``{doing}: ...``) if only DeepSpeed knows what ranks hold of the model."""
    if why := unknown_shards_reason(trained):
        raise UnsupportedError(
            f"{doing}: expected an engine whose ranks have the same model; {why}. Use DeepSpeed's own "
            "engine.save_checkpoint and engine.load_checkpoint (inside streaming() too), or what gathers its parts."
        )


def has_partition(param: Any) -> bool:
    """Whether `param` is one of ZeRO-3's."""
    return hasattr(param, "ds_tensor")


def lacks_values(model: nn.Module) -> bool:
    """Whether ranks share the values of `model`, so that one rank alone has not got all of them."""
    is_shared = any(map(has_partition, parameters(model))) or is_sharded(model)
    return is_shared or is_packed(model) or has_converted_experts(model)


def has_gathered(model: nn.Module) -> bool:
    """Whether any of the model's ZeRO-3 parameters are inside a ``GatheredParameters`` now."""
    if not any(map(has_partition, parameters(model))):
        return False
    from .deepspeed.partitions import select_gathered

    return bool(select_gathered(parameters(model)))


def is_gathered_whole(model: nn.Module) -> bool:
    """Whether this rank has all values of a ZeRO-3 model, because the caller has gathered them."""
    if not has_gathered(model):
        return False
    from .deepspeed.partitions import partitioned_names

    return not partitioned_names(model)


def is_inside_zero_init() -> bool:
    """Whether the caller is in a ``deepspeed.zero.Init``, under which every new model is ZeRO-3's."""
    partition_parameters = sys.modules.get("deepspeed.runtime.zero.partition_parameters")
    return getattr(partition_parameters, "top_level_context", None) is not None


@contextmanager
def keeping_groups(model: nn.Module) -> Iterator[None]:
    """Inside, parameters may be replaced by others; the process groups that the model's `__init__` gave them stay."""
    given = {name: vars(param).get("ds_zero_partition_process_group") for name, param in model.named_parameters()}
    yield
    for name, group in given.items():
        if group is not None:
            model.get_parameter(name).ds_zero_partition_process_group = group


def accelerator_state() -> Any:
    """Return accelerate's shared state of the ``Accelerator`` that has been made; None without one."""
    state = sys.modules.get("accelerate.state")
    return state.AcceleratorState() if state is not None and state.AcceleratorState._shared_state else None


def is_sharded(model: nn.Module) -> bool:
    """Whether any parameter of `model` is a DTensor, also if FSDP2 has put a gathered one in its place for now."""
    return shards_modules(model) or any(map(is_dtensor, parameters(model)))


def shards_modules(model: nn.Module) -> bool:
    """Whether FSDP2 shards any module of `model`."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    return any(isinstance(module, kind) for module in modules(model))


def is_inside_fsdp2(model: nn.Module) -> bool:
    """Whether FSDP2 may shard `model`, a module of it, or one around it: that one's hooks are on its modules."""
    return any(module._state_dict_pre_hooks for module in modules(model))


def is_dtensor(tensor: Any) -> bool:
    if type(tensor) in (torch.Tensor, nn.Parameter):  # as nearly all are
        return False
    return isinstance(tensor, getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ()))


def local_of(param: torch.Tensor) -> torch.Tensor:
    """The memory of `param`, or of its local shard."""
    return local_tensor(param).detach()


def storage_of(param: torch.Tensor) -> int:
    """The address of that memory's storage, in which other tensors may lie too; 0 if it has none to be named."""
    local = local_tensor(param)
    return local.untyped_storage().data_ptr() if local.layout == torch.strided else 0


def local_tensor(param: Any) -> torch.Tensor:
    """`param`, or its local shard, itself: a view of it costs more than what is asked of thousands of them."""
    local: torch.Tensor = param._local_tensor if is_dtensor(param) else param
    return local


def is_packed(model: nn.Module) -> bool:
    """Whether any weights of `model` are packed."""
    return any(PACKED in vars(module) for module in modules(model))


def packed_weights(module: nn.Module) -> Mapping[str, Any]:
    """The packed weights of `module` itself, by the names of its parameters, which are frozen and of bytes.

    Each has the `dtype` of its values; `computes_in`, another one if FSDP2 would gather the values in it; and
    `padding_bytes`, which are of no tensor of the checkpoint.
    """
    found: Mapping[str, Any] = vars(module).get(PACKED, {})
    return found


def has_converted_experts(model: nn.Module) -> bool:
    """Whether DeepSpeed's expert parallelism has converted a layer of `model`."""
    return any(CONVERTED in vars(module) for module in modules(model))


def with_original_experts(model: nn.Module, entries: dict[str, Any]) -> dict[str, Any]:
    """A state dict's `entries`, those of converted layers under the names and in the layouts that they had before."""
    if not has_converted_experts(model):
        return entries
    found: dict[str, Any] = tool("experts", "autoep").with_original_experts(model, entries)
    return found


def whole_of(name: str, buffer: torch.Tensor) -> torch.Tensor:
    """The values of `buffer`, which may be a DTensor that each rank has in full.

    Raises:
        UnsupportedError: ranks hold different parts of it.
    """
    placements: Any = getattr(buffer, "placements", ()) if is_dtensor(buffer) else ()
    if not all(placement.is_replicate() for placement in placements):
        raise UnsupportedError(
            f"{name}: expected that each rank has this buffer in full; its placements are {placements}. "
            "Redistribute it to Replicate first."
        )
    return local_of(buffer)


def is_streamed(model: Any) -> bool:
    """Whether a load of ours has made `model`."""
    return bool(getattr(getattr(model, "streaming_report", None), "streamed", False))


def is_dequantised(model: Any) -> bool:
    """Whether `model` has no quantizer any more, and what one has left: conversions, or transformers' word for it."""
    if getattr(model, "hf_quantizer", None) is not None:
        return False
    conversions = getattr(model, "_weight_conversions", None) or ()
    return vars(model).get("is_quantized") is False or any(map(ops_of_quantizer, conversions))


def forget_quantizer(model: Any) -> None:
    """Take off a dequantised `model` what a quantizer has left; a MissingPluginError if nothing here can."""
    if is_dequantised(model):
        tool("forget_quantizer", "packed", "saving a model that was dequantised")(model)


def ops_of_quantizer(conversion: Any) -> list[Any]:
    """The operations of a conversion of transformers' that a quantizer has put there."""
    return [op for op in getattr(conversion, "operations", ()) if hasattr(op, "hf_quantizer")]


def lies_in_files(param: Any) -> bool:
    """Whether a frozen parameter's values stay in the checkpoint's files: a plug-in reads them when they are used."""
    return getattr(param, "_hf_zero_stream_in_files", False)


def is_adapted(model: Any) -> bool:
    """Whether of `model` only adapters are saved: by ``peft.get_peft_model``, or transformers' ``add_adapter``."""
    return is_peft_model(model) or getattr(model, "_hf_peft_config_loaded", False)


def is_peft_model(model: Any) -> bool:
    """Whether `model` is one that ``peft.get_peft_model`` returned."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)
