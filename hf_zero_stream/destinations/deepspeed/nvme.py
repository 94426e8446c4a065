"""Partitions that live in DeepSpeed's swap files (``offload_param: {device: nvme}``), filled through its own buffers.

DeepSpeed's swapper owns `buffer_count` pinned buffers of `buffer_size` elements. A partition is read into one of them
and written to its file from there, so that host memory for parameters never exceeds those buffers. Half of them are
being written while the other half is read into.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import torch
from deepspeed.ops.op_builder import AsyncIOBuilder
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import (
    AsyncPartitionedParameterSwapper,
    PartitionedParamStatus,
)
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadParamConfig, OffloadDeviceEnum

from ...errors import ConfigError, UnsupportedError
from ...planning.plan import Target
from ...versions import refuse_unknown_version


__all__ = [
    "SwapWave",
    "expect_swap",
    "partitions_in_memory",
    "refuse_wrong_settings",
    "share_swapper",
    "shared_swapper",
    "swap_waves",
    "uses_nvme",
]

_RELIED_ON = (
    "get_buffer",
    "swappable_tensor",
    "swap_out_and_release",
    "synchronize_writes",
    "remove_partition_and_release_buffers",
)
_missing = [name for name in _RELIED_ON if not hasattr(AsyncPartitionedParameterSwapper, name)]
refuse_unknown_version("deepspeed", [f"AsyncPartitionedParameterSwapper.{name}" for name in _missing])

_swappers: WeakValueDictionary[tuple[Any, ...], AsyncPartitionedParameterSwapper] = WeakValueDictionary()


def uses_nvme(ds_config: Mapping[str, Any]) -> bool:
    """Whether partitions of this config are offloaded to NVMe."""
    return _offload(ds_config).get("device") == OffloadDeviceEnum.nvme


def refuse_wrong_settings(ds_config: Mapping[str, Any], targets: Sequence[Target]) -> None:
    """Refuse, before anything is read, what DeepSpeed would only fail over in the middle.

    Raises:
        UnsupportedError: DeepSpeed's asynchronous I/O cannot be built here.
        ConfigError: a partition does not fit into a swap buffer.
    """
    if not uses_nvme(ds_config):
        return
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


def shared_swapper(ds_config: Mapping[str, Any]) -> AsyncPartitionedParameterSwapper | None:
    """The swapper of an earlier model with the same settings that is still alive, or None.

    A new one would empty the folder of swap files, and with it the partitions of that model (a teacher, a reference).
    """
    return _swappers.get(_identity(ds_config))


def share_swapper(ds_config: Mapping[str, Any], swapper: AsyncPartitionedParameterSwapper) -> None:
    """Let :func:`shared_swapper` find `swapper` as long as a model uses it."""
    _swappers[_identity(ds_config)] = swapper


def expect_swap(param: Any, numel: int, swapper: AsyncPartitionedParameterSwapper) -> bool:
    """Whether a partition of `numel` elements goes to a swap file; then its ``ds_tensor`` is made, without memory.

    As in stock, partitions under DeepSpeed's limit of 1 MiB stay in host memory; so do those of another dtype than the
    swapper's, which stock would write with the wrong size.
    """
    if param.dtype != swapper.dtype or not swapper.swappable_tensor(numel=numel):
        return False
    param.ds_tensor = torch.empty(0, dtype=param.dtype)
    param.ds_tensor.requires_grad = False
    param.ds_tensor.ds_numel = numel
    param.ds_tensor.status = PartitionedParamStatus.NOT_AVAILABLE
    param.ds_tensor.final_location = OffloadDeviceEnum.nvme
    return True


class SwapWave:
    """Partitions that are in the swapper's buffers at the same time.

    Args:
        params: ZeRO-3 parameters for which :func:`expect_swap` was true.
        swapper: theirs.
        is_last: no wave follows.
    """

    def __init__(self, params: Sequence[Any], swapper: AsyncPartitionedParameterSwapper, *, is_last: bool) -> None:
        self.params = params
        self._swapper = swapper
        self._is_last = is_last

    def begin(self) -> list[torch.Tensor]:
        """Buffers for the partitions; they are zero."""
        if self._swapper.available_swap_in_buffers() < len(self.params):
            self._swapper.synchronize_writes()
        for param in self.params:
            param.ds_tensor.data = self._swapper.get_buffer(param, param.ds_tensor.ds_numel).zero_().data
            param.ds_tensor.status = PartitionedParamStatus.AVAILABLE
        return [param.ds_tensor for param in self.params]

    def settle(self) -> None:
        """Begin to write the partitions to their files, once those of the wave before are there.

        The last wave waits until its own are there.
        """
        self._swapper.synchronize_writes()
        self._swapper.swap_out_and_release(list(self.params), async_op=True, force_buffer_release=True)
        if self._is_last:
            self._swapper.synchronize_writes()


def swap_waves(params: Sequence[Any], swapper: AsyncPartitionedParameterSwapper) -> list[SwapWave]:
    """`params` in waves of half the swapper's buffers."""
    size = max(1, swapper.available_swap_in_buffers() // 2)
    return [
        SwapWave(params[begin : begin + size], swapper, is_last=begin + size >= len(params))
        for begin in range(0, len(params), size)
    ]


@contextmanager
def partitions_in_memory(params: Sequence[Any]) -> Iterator[None]:
    """Read the partitions of `params` from their swap files, where they are there, for code that looks at them."""
    swapped = [param for param in params if param.ds_tensor.status == PartitionedParamStatus.NOT_AVAILABLE]
    for param in swapped:
        param.nvme_swapper.swap_in([param], async_op=False)
    try:
        yield
    finally:
        for param in swapped:
            param.nvme_swapper.remove_partition_and_release_buffers([param])


def _offload(ds_config: Mapping[str, Any]) -> Mapping[str, Any]:
    return ds_config.get("zero_optimization", {}).get("offload_param") or {}


def _identity(ds_config: Mapping[str, Any]) -> tuple[Any, ...]:
    settings = (_offload(ds_config), ds_config.get("aio") or {}, ds_config.get("bf16"), ds_config.get("fp16"))
    return tuple(repr(sorted((setting or {}).items())) for setting in settings)
