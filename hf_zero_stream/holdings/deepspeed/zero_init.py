"""A ``zero.Init`` that the caller of a load is in: suspended while a model is built, and asked how it partitions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.zero import partition_parameters
from deepspeed.runtime.zero.partition_parameters import Init, get_all_subclasses
from torch import nn

from ...errors import UnsupportedError
from ...registry import tool


_CONSTRUCTORS = ("tensor", "empty", "zeros", "ones", "full", "arange", "eye", "randn")
"""The functions of torch that ``zero.Init`` replaces."""


@contextmanager
def outside_zero_init() -> Iterator[None]:
    """Suspend a ``zero.Init`` that the caller is in: under it, torch's constructors give other dtypes and devices.

    What somebody has put in place of DeepSpeed's wrappers, or around them, is there during and after it. DeepSpeed
    itself would restore the ``__init__`` that it noted when a class was made, also where a decorator has replaced it
    since, as transformers' do in a modeling file that is first imported inside ``zero.Init``.
    """
    context = partition_parameters.top_level_context
    if context is None or not context.patched:
        yield
        return
    inits = {cls: vars(cls)["__init__"] for cls in get_all_subclasses(nn.Module) if "__init__" in vars(cls)}
    replaced = [(torch, name) for name in _CONSTRUCTORS] + [(nn.Module, "apply")]
    found = [(owner, name, getattr(owner, name)) for owner, name in replaced]
    # Inside a decorator's __init__, DeepSpeed's stays, and there it stays when zero.Init is left, too.
    context._post_init_method = lambda module: context.patched and type(context)._post_init_method(context, module)
    partition_parameters.shutdown_init_context()
    for cls, init in inits.items():
        if vars(cls)["__init__"] is not init and not _is_of_deepspeed(init):
            cls.__init__ = init
    try:
        yield
    finally:
        partition_parameters.restore_init_context()
        for owner, name, value in found:
            setattr(owner, name, value)


def _is_of_deepspeed(function: Any) -> bool:
    return getattr(function, "__globals__", None) is vars(partition_parameters)


def open_init() -> Init:
    """The ``zero.Init`` that the caller is in; of nested ones the outermost, which decides on all that they hold."""
    found: Init = partition_parameters.top_level_context
    return found


def config_of(around: Init, found: Mapping[str, Any]) -> dict[str, Any]:
    """The DeepSpeed config `found`, in which `around` decides on what it has decided already.

    Raises an UnsupportedError if it partitions in another way than over all ranks in DeepSpeed's dtype.
    """
    kind, ranks = type(around), dist.get_world_size()
    if kind is not Init:
        raise UnsupportedError(
            f"from_pretrained inside {kind.__name__}: expected zero.Init itself; got a subclass, which partitions in "
            "its own way. Load without streaming()."
        )
    if around.dp_world_size != ranks:
        raise UnsupportedError(
            f"from_pretrained inside zero.Init: expected a data_parallel_group of all {ranks} ranks; got one of "
            f"{around.dp_world_size}. All ranks load together: leave the group out."
        )
    if around.tensor_overrides != partition_parameters.DEFAULT_TENSOR_OVERRIDES:
        raise UnsupportedError(
            "from_pretrained inside zero.Init: expected it to set dtype and device of all parameters, as it does by "
            f"default; got tensor_overrides={around.tensor_overrides}. Leave them out."
        )
    zero = {
        **found.get("zero_optimization", {}),
        "stage": 3,
        "offload_param": _offload(around),
        "zero_quantized_weights": around.quantized_weights,
        "zero_quantized_nontrainable_weights": around.quantized_nontrainable_weights,
        "zero_hpz_partition_size": 1 if around.zero_param_process_group is None else around.num_ranks_in_param_group,
    }
    config = {
        **found,
        "zero_optimization": zero,
        "bf16": {**(found.get("bf16") or {}), "enabled": around.dtype == torch.bfloat16},
        "fp16": {**(found.get("fp16") or {}), "enabled": around.dtype == torch.float16},
    }
    config.pop("bfloat16", None)  # another name of bf16
    if around.quantized_initialization:
        config["weight_quantization"] = {"quantized_initialization": around.quantized_initialization}
    if around.param_swapper is not None:
        config["aio"] = around.param_swapper.aio_config
        tool("nvme", "nvme", "offload_param to NVMe").share_swapper(config, around.param_swapper)
    return config


def _offload(around: Init) -> dict[str, Any] | None:
    if around.param_swapper is not None:
        settings: dict[str, Any] = around.param_swapper.swap_config.model_dump()
        return settings
    if around.remote_device == around.local_device:
        return None
    return {"device": torch.device(around.remote_device).type, "pin_memory": around.pin_memory}
