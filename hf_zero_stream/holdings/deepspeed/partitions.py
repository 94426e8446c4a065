"""The partitions of ZeRO-3's parameters: which elements are this rank's, and their values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partition_parameters import PartitionedParamStatus, ZeroParamStatus

from ... import accelerators
from ...planning.boxes import ParameterBox
from ...planning.plan import partition_range
from ...ranks.coordinator import Coordinator
from ...settings.config import announced_local_rank


def own_range(param: Any) -> tuple[int, int, int]:
    """(elements of one partition, first own element, one past the last own) of a ZeRO-3 parameter."""
    group = param.ds_process_group
    return partition_range(param.ds_numel, dist.get_rank(group), dist.get_world_size(group))


def box_of(param: Any) -> ParameterBox:
    """Return the box of the whole model's parameter that a ZeRO-3 parameter is: all of it, or some ranks' experts."""
    return getattr(param, "_hf_zero_stream_box", None) or ParameterBox.whole(param.ds_shape)


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
    same = first.ds_shape == second.ds_shape
    if same:
        with open_partition(first) as mine, open_partition(second) as theirs:
            same = torch.equal(mine, theirs.to(mine.dtype))
    verdict = torch.tensor(int(same), device=local_device())
    coordinator.run(dist.all_reduce, verdict, dist.ReduceOp.MIN)
    return bool(verdict.item())


def local_device() -> torch.device:
    """The device on which this rank consumes parameters."""
    accelerator = get_accelerator()
    if not accelerators.is_accelerator(torch.device(accelerator.device_name())):
        return torch.device(accelerator.device_name(announced_local_rank()))
    # A launcher may show each rank its own device alone.
    found = accelerators.device_of_rank(accelerator.device_name(), announced_local_rank())
    assert found is not None  # a local rank is given
    return found
