"""Partitions that live in DeepSpeed's swap files (``offload_param: {device: nvme}``), filled through its own buffers.

DeepSpeed's swapper owns `buffer_count` pinned buffers of `buffer_size` elements. A partition is read into one of them
and written to its file from there, so that host memory for parameters never exceeds those buffers. Half of them are
being written while the other half is read into.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from deepspeed.ops.op_builder import AsyncIOBuilder
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import AsyncPartitionedParameterSwapper
from deepspeed.runtime.swap_tensor.utils import MIN_AIO_BYTES
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadParamConfig
from deepspeed.runtime.zero.partition_parameters import PartitionedParamStatus

from ...errors import ConfigError, UnsupportedError, require_names
from ...plugin_api import Batch, Item, Target


require_names(
    "deepspeed",
    AsyncPartitionedParameterSwapper,
    *("get_buffer", "swappable_tensor", "swap_out_and_release", "synchronize_writes"),
    "remove_partition_and_release_buffers",
    purpose="offload_param to NVMe",
)

Swap = tuple[Any, Item | torch.Tensor | None]
"""A parameter whose partition goes to a swap file, and the item or the values that fill it; None: zeros."""

_swappers: WeakValueDictionary[tuple[Any, ...], AsyncPartitionedParameterSwapper] = WeakValueDictionary()


def refuse_wrong_settings(ds_config: Mapping[str, Any], targets: Sequence[Target]) -> None:
    """Refuse, before anything is read, settings over which DeepSpeed would fail in the middle."""
    if not AsyncIOBuilder().is_compatible(verbose=False):
        raise UnsupportedError(
            "offload_param.device is nvme, but DeepSpeed cannot build its asynchronous I/O here: install libaio "
            "(Debian: apt-get install libaio-dev) on every node."
        )
    buffer_size = DeepSpeedZeroOffloadParamConfig(**_offload(ds_config)).buffer_size
    largest = max(targets, key=lambda target: target.numel, default=None)
    if largest is not None and largest.numel > buffer_size:
        raise ConfigError(
            f"offload_param.buffer_size: expected at least {largest.numel} elements, the partition of {largest.name}; "
            f"got {buffer_size}. Raise it: DeepSpeed keeps offload_param.buffer_count such buffers in host memory."
        )


def swap_from_bytes(ds_config: Mapping[str, Any]) -> int:
    """DeepSpeed's limit: smaller partitions stay in host memory, as in stock."""
    return max(MIN_AIO_BYTES, (ds_config.get("aio") or {}).get("block_size", 0))


def free_buffers(ds_config: Mapping[str, Any]) -> int:
    """The number of free buffers that the swapper of a model of this config has, or will have."""
    shared = shared_swapper(ds_config)
    if shared is not None:
        return shared.available_swap_in_buffers()
    return DeepSpeedZeroOffloadParamConfig(**_offload(ds_config)).buffer_count


def shared_swapper(ds_config: Mapping[str, Any]) -> AsyncPartitionedParameterSwapper | None:
    """The swapper of a live model with the same settings, whose swap files a new swapper would delete, or None."""
    return _swappers.get(_identity(ds_config))


def share_swapper(ds_config: Mapping[str, Any], swapper: AsyncPartitionedParameterSwapper) -> None:
    """Let :func:`shared_swapper` find `swapper` as long as a model uses it."""
    _swappers[_identity(ds_config)] = swapper


def swap_batches(swaps: Sequence[Swap], buffers: int) -> list[Batch]:
    """Batches that fill swap files, each with as many partitions as fit into half of the swapper's free `buffers`."""
    size = max(1, buffers // 2)
    last = len(swaps) - size
    return [_swap_batch(swaps[i : i + size], is_last=i >= last) for i in range(0, len(swaps), size)]


def _swap_batch(swaps: Sequence[Swap], *, is_last: bool) -> Batch:
    params = [param for param, _ in swaps]

    def begin() -> None:
        swapper = params[0].nvme_swapper
        if swapper.available_swap_in_buffers() < len(params):
            swapper.synchronize_writes()
        for param, values in swaps:
            param.ds_tensor.data = swapper.get_buffer(param, param.ds_tensor.ds_numel).zero_().data
            param.ds_tensor.status = PartitionedParamStatus.AVAILABLE
            if isinstance(values, torch.Tensor):
                param.ds_tensor.copy_(values)

    def finish() -> None:
        swapper = params[0].nvme_swapper
        swapper.synchronize_writes()  # of the batch before
        swapper.swap_out_and_release(params, async_op=True, force_buffer_release=True)
        if is_last:
            swapper.synchronize_writes()

    return Batch([values for _, values in swaps if isinstance(values, Item)], begin, finish, is_temporary=True)


def _offload(ds_config: Mapping[str, Any]) -> Mapping[str, Any]:
    return ds_config.get("zero_optimization", {}).get("offload_param") or {}


def _identity(ds_config: Mapping[str, Any]) -> tuple[Any, ...]:
    settings = (_offload(ds_config), ds_config.get("aio") or {}, ds_config.get("bf16"), ds_config.get("fp16"))
    return tuple(repr(sorted((setting or {}).items())) for setting in settings)
