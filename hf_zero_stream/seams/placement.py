"""Finds the loads that are left to transformers: their weights go to places that hf_zero_stream does not fill."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers.integrations import is_fsdp_enabled

from ..errors import UnsupportedError


__all__ = ["builds_without_memory", "refuse_sharding", "sharding_argument", "why_elsewhere"]

_SIZES = ("tp_size", "fsdp_size", "dp_replicate_size", "pp_size")


def sharding_argument(kwargs: Mapping[str, Any]) -> str:
    """The argument of ``from_pretrained`` by which transformers shards the model; "" if it will not."""
    for name in ("tp_plan", "tp_size", "device_mesh"):
        if kwargs.get(name) is not None:
            return name
    if (config := kwargs.get("distributed_config")) is None:
        return ""
    if isinstance(config, Mapping):
        asks = config.get("tp_plan") is not None or any(config.get(size) not in (None, 1) for size in _SIZES)
    else:
        # Before transformers 5.14 a config may have no sizes, and a model is sharded whenever one is given.
        asks = any(getattr(config, size, None) != 1 for size in _SIZES)
    return "distributed_config" if asks else ""


def why_elsewhere(kwargs: Mapping[str, Any]) -> str:
    """Why ranks outside ZeRO-3 cannot share the reading of a load; "" if they can."""
    for name in ("device_map", "state_dict"):
        if kwargs.get(name) is not None:
            return f"{name}= is given"
    if is_fsdp_enabled():
        return "FSDP_CPU_RAM_EFFICIENT_LOADING is set, which loads on rank 0"
    if torch.get_default_device().type != "cpu":
        return f"torch's default device is {torch.get_default_device()}"
    return "accelerate's init_empty_weights() keeps no weights" if builds_without_memory() else ""


def builds_without_memory() -> bool:
    """Whether accelerate's ``init_empty_weights()`` is active, under which every parameter becomes a meta tensor."""
    return torch.nn.Module.register_parameter.__module__.startswith("accelerate.")


def refuse_sharding(path: str, kwargs: Mapping[str, Any]) -> None:
    """Raise an UnsupportedError if transformers would shard the model that is to be streamed or planned."""
    if sharding := sharding_argument(kwargs):
        raise UnsupportedError(
            f"{path}: {sharding}= shards the model by transformers' own code, and sharded models are not streamed "
            "yet. Leave it out, or load with from_pretrained."
        )
