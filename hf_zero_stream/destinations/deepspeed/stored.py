"""What a rank holds of the parameters that are saved: partitions, fp32 masters, replicas, gathered values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import is_zero_param
from deepspeed.utils import safe_get_local_fp32_param
from torch import nn

from ...errors import UnsupportedError
from ...planning.plan import partition_range
from ..holding import Holding
from . import nvme
from .gathered import gathered
from .live import is_trained_apart
from .masters import Master, masters_of
from .original_experts import expert_parts, part_name
from .zero3 import own_range


__all__ = ["holdings"]


def holdings(model: nn.Module, *, masters: bool, rank: int, world_size: int) -> dict[str, Holding]:
    """What this rank holds of each parameter of `model`; names of one tied parameter have one and the same holding.

    Under expert parallelism an expert parameter has a name for each part of the experts, of which a rank holds one.

    Args:
        masters: the fp32 values that an optimizer trains, where there are any, in place of the model's own.
        rank: this rank.
        world_size: number of ranks that save together.

    Raises:
        UnsupportedError: masters are wanted, and cannot be reached, or values are gathered in 16 bit that may not be
            theirs any more; the message says what to do.
    """
    in_context = {id(param) for param in gathered(model.parameters())}
    found: dict[int, Holding] = {}
    by_name: dict[str, Holding] = {}
    parts = expert_parts(model)
    replaced = masters_of(param for param in model.parameters() if not is_zero_param(param)) if masters else {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if id(param) not in found:
            of_param = _master(param, replaced.get(id(param)), rank, world_size) if masters else None
            if id(param) in in_context:
                if of_param is not None:
                    raise UnsupportedError(
                        f"dtype=torch.float32 inside GatheredParameters: the values of {name} are gathered in "
                        f"{param.dtype}, and the fp32 values that the optimizer trains may be others. Save after the "
                        "context, or without dtype."
                    )
                of_param = _gathered(param)
            found[id(param)] = of_param or _own(param, rank, world_size)
        origin = parts.get(id(param))
        if origin is None:
            by_name[name] = found[id(param)]
            continue
        for part in range(origin.parts):
            own = found[id(param)]
            by_name[part_name(name, part)] = own if part == origin.part else _others(own.shape, own.dtype)
    return by_name


def _others(shape: torch.Size, dtype: torch.dtype) -> Holding:
    """What only other ranks hold."""
    return Holding(shape, dtype, 0, 0, False, False, lambda: _ready(torch.empty(0, dtype=dtype)))


def _gathered(param: Any) -> Holding:
    """All of a ZeRO-3 parameter; each rank gives the elements of its partition."""
    _, start, stop = own_range(param)
    return Holding(
        torch.Size(param.ds_shape), param.dtype, start, stop, True, False, lambda: _ready(_flat(param)), True
    )


def _own(param: Any, rank: int, world_size: int) -> Holding:
    """The values that the model computes with."""
    if not is_zero_param(param):
        _, start, stop = partition_range(param.numel(), rank, world_size)
        return Holding(param.shape, param.dtype, start, stop, True, False, lambda: _ready(_flat(param)))
    _, start, stop = own_range(param)

    @contextmanager
    def partition() -> Iterator[torch.Tensor]:
        with nvme.partitions_in_memory([param]):
            yield param.ds_tensor.detach().view(-1)[: stop - start]

    shape, swapped = torch.Size(param.ds_shape), param.ds_tensor.final_location == "nvme"
    return Holding(shape, param.dtype, start, stop, False, swapped, partition)


def _master(param: Any, trained: Sequence[Master] | None, rank: int, world_size: int) -> Holding | None:
    """The fp32 values that an optimizer trains for `param`, or None if the model's own are all there is.

    Args:
        trained: what an optimizer of stages 0 to 2 trains of it on this rank; None if there is no such optimizer.
    """
    if param.dtype == torch.float32:
        return None
    if is_zero_param(param):
        if not is_trained_apart(param):
            return None
        _, start, stop = own_range(param)

        @contextmanager
        def of_partition() -> Iterator[torch.Tensor]:
            with _requiring_grad(param):  # DeepSpeed gives nothing for one that was frozen since
                values = safe_get_local_fp32_param(param)
            yield values.detach().view(-1)[: stop - start]

        return Holding(torch.Size(param.ds_shape), torch.float32, start, stop, False, True, of_partition)
    if trained is None:
        return None
    if not trained:  # all of it is trained by other ranks
        return _others(param.shape, torch.float32)
    master = trained[0]
    start, stop = master.start, master.stop
    if master.is_whole:
        _, start, stop = partition_range(param.numel(), rank, world_size)
    values = master.values
    return Holding(param.shape, values.dtype, start, stop, master.is_whole, False, lambda: _ready(values))


@contextmanager
def _requiring_grad(param: torch.Tensor) -> Iterator[None]:
    before = param.requires_grad
    param.requires_grad = True
    try:
        yield
    finally:
        param.requires_grad = before


def _flat(param: torch.Tensor) -> torch.Tensor:
    return param.detach().contiguous().view(-1)


@contextmanager
def _ready(values: torch.Tensor) -> Iterator[torch.Tensor]:
    yield values
