"""The partitions of ZeRO-3's parameters: which elements are this rank's, their values, and which are in full now.

Those are in full that a ``GatheredParameters`` holds, and those that initialisation touches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero import partition_parameters
from deepspeed.runtime.zero.partition_parameters import (
    PartitionedParamStatus,
    ZeroParamStatus,
    is_zero_param,
)
from torch import nn

from ... import accelerators
from ...bindings.install import override_methods
from ...planning.plan import partition_range
from ...ranks.coordinator import Coordinator
from ...settings.config import announced_local_rank


def own_range(param: Any) -> tuple[int, int, int]:
    """(elements of one partition, first own element, one past the last own) of a ZeRO-3 parameter."""
    group = param.ds_process_group
    return partition_range(param.ds_numel, dist.get_rank(group), dist.get_world_size(group))


def is_partitioned(value: Any) -> bool:
    """Whether `value` is a ZeRO-3 parameter whose full values are not in memory now."""
    return getattr(value, "ds_status", None) == ZeroParamStatus.NOT_AVAILABLE


@contextmanager
def open_partition(param: Any) -> Iterator[torch.Tensor]:
    """The values of this rank's partition, without padding, read into memory for a while if in a swap file."""
    _, start, stop = own_range(param)
    is_swapped = param.ds_tensor.status == PartitionedParamStatus.NOT_AVAILABLE
    if is_swapped:
        param.nvme_swapper.swap_in([param], async_op=False)
    try:
        yield param.ds_tensor.detach().view(-1)[: stop - start]
    finally:
        if is_swapped:
            param.nvme_swapper.remove_partition_and_release_buffers([param])


def partitions_equal(first: Any, second: Any, coordinator: Coordinator) -> bool:
    """Whether two partitioned parameters hold the same values on every rank; nothing is gathered (all ranks)."""

    def are_equal() -> bool:
        with open_partition(first) as mine, open_partition(second) as theirs:
            return torch.equal(mine, theirs.to(mine.dtype))

    return first.ds_shape == second.ds_shape and all(coordinator.gather_results(are_equal))


def local_device() -> torch.device:
    """The device on which this rank consumes parameters."""
    accelerator = get_accelerator()
    if not accelerators.is_accelerator(torch.device(accelerator.device_name())):
        return torch.device(accelerator.device_name(announced_local_rank()))
    # A launcher may show each rank its own device alone.
    found = accelerators.device_of_rank(accelerator.device_name(), announced_local_rank())
    assert found is not None  # a local rank is given
    return found


_DEPTH = getattr(partition_parameters, "DS_Z3_GATHERED_PARAM_CONTEXT_DEPTH_ATTR", None)
"""The attribute in which DeepSpeed counts the contexts around a parameter; earlier versions do not."""


def select_gathered(params: Iterable[Any]) -> list[Any]:
    """Select the `params` inside a ``GatheredParameters`` now: their values may differ from those of partitions."""
    available = [param for param in params if is_zero_param(param) and param.ds_status == ZeroParamStatus.AVAILABLE]
    if _DEPTH is not None:
        return [param for param in available if getattr(param, _DEPTH, 0) > 0]
    # Small ones are in full between steps anyway, and their full values are up to date: all are taken, or none.
    return available if any(not param.ds_persist for param in available) else []


def differs_from_partition(param: Any) -> bool:
    """Whether this rank's elements of a parameter in full are others than those of its partition.

    Small parameters are in full between two steps, for every forward pass. Code that writes into one of them, such as
    a merge of adapters, writes into no partition: the next step or gather would bring the partition's values back.
    """
    if not is_zero_param(param) or param.ds_status != ZeroParamStatus.AVAILABLE:
        return False
    partition = param.ds_tensor
    if partition.status == PartitionedParamStatus.NOT_AVAILABLE or _is_quantised(param):
        return False
    _, start, stop = own_range(param)
    full = param.detach().contiguous().view(-1)[start:stop].to(partition.device)
    kept = partition.detach().view(-1)[: stop - start]
    return full.dtype != kept.dtype or not torch.equal(full.view(torch.uint8), kept.view(torch.uint8))


def _is_quantised(param: Any) -> bool:
    """Whether gathering rounds: qwZ's full values are others than the partitions' anyway."""
    offload = getattr(getattr(param, "_z3_optimizer", None), "parameter_offload", None)
    return hasattr(param.ds_tensor, "ds_quant_scale") or bool(getattr(offload, "zero_quantized_weights", False))


def gather(coordinator: Coordinator, params: Sequence[Any]) -> None:
    """Have DeepSpeed bring `params` in full to all ranks; raises a PeerError if a rank dies (all ranks)."""
    with override_methods(comm, **{name: partial(_run, coordinator, getattr(comm, name)) for name in _GATHERS}):
        # One by one: of several gathers DeepSpeed 0.18 waits only for the last, and gloo ends them in any order:
        # another one could still write over values that are new.
        for param in params:
            param.all_gather(param_list=[param])


_GATHERS = ("all_gather_into_tensor", "all_gather")
"""The collectives by which DeepSpeed gathers one parameter."""


def _run(coordinator: Coordinator, collective: Callable[..., Any], *args: Any, group: Any, async_op: bool) -> None:
    """Run a collective of DeepSpeed's, which on a GPU would wait for a dead rank until NCCL's time-out is over."""
    assert not async_op
    coordinator.run(collective, *args, group=group)


def partitioned_names(model: nn.Module) -> list[str]:
    """Names of the parameters whose full values are not here."""
    return [
        name
        for name, param in model.named_parameters()
        if is_zero_param(param) and param.ds_status != ZeroParamStatus.AVAILABLE
    ]


def whole_value(param: Any) -> torch.Tensor:
    """All values of a ZeRO-3 parameter, in a memory of their own (all ranks)."""
    with partition_parameters.GatheredParameters([param]):
        return param.detach().clone()


@contextmanager
def gathered_module(module: nn.Module) -> Iterator[None]:
    """Inside, the ZeRO-3 parameters of `module` are in full, and what they are changed to stays (all ranks).

    If a ``GatheredParameters`` has any of them, what becomes of them is its matter.
    """
    params = list(filter(is_zero_param, module.parameters()))
    if not params or select_gathered(params):
        yield
        return
    with gathered_params(Coordinator.of_default_group(), params):
        yield


@contextmanager
def gathered_params(coordinator: Coordinator, params: Sequence[Any]) -> Iterator[None]:
    """``GatheredParameters(modifier_rank=0)``, which fails on 0-dimensional ones; an exception changes nothing.

    Raises a PeerError if a rank dies.
    """
    params = sorted({id(param): param for param in params}.values(), key=lambda param: param.ds_id)
    gather(coordinator, params)
    is_updated = False
    try:
        yield
        for param in params:
            if dist.get_world_size(param.ds_process_group) > 1:
                values = param.data.contiguous().view(-1)
                source = dist.get_global_rank(param.ds_process_group, 0)
                coordinator.run(dist.broadcast, values.view(torch.uint8), source, group=param.ds_process_group)
                param.data = values.view(param.ds_shape)
        is_updated = True
    finally:
        if params:
            params[0].partition(param_list=params, has_been_updated=is_updated)
