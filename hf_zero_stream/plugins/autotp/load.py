"""Models that ``from_pretrained`` leaves lazy until ``deepspeed.initialize`` cuts them.

DeepSpeed cuts with its own code, which meets lazy tensors: what it keeps of a parameter is a view of the checkpoint's
tensors, whatever it has done to get there, and has no memory. Then each rank reads what is kept of each, and ranks
read for each other what DeepSpeed has left whole. Under ZeRO-3 each reads its partition of what is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from ...errors import UnsupportedError
from ...plugin_api import (
    LOAD,
    Coordinator,
    Deferral,
    Destination,
    InPlace,
    LazyTensor,
    Load,
    LocalShard,
    ParameterBox,
    StreamingConfig,
    chunk_bytes,
    collective_device,
    deferrals_of,
    expected_at,
    fill_whole,
    installed,
    is_cut,
    materialise_written,
    meeting,
    will_be_flattened,
)
from . import CUT_LATER


def load_for_autotp(config: StreamingConfig, coordinator: Coordinator) -> Load:
    """A load that leaves a model's parameters lazy, until DeepSpeed cuts them."""
    deferral = Deferral(config, until="deepspeed.initialize() cuts it by AutoTP")
    installed(CUT_LATER).while_alive(deferral)
    return deferral.load(coordinator, "DeepSpeed's AutoTP cuts matrices, and knows nothing of packed ones")


def apply_partitioning(original: Callable[..., Any], self: Any, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Have DeepSpeed cut a lazy model, and read this rank's parts (all ranks)."""
    deferrals = deferrals_of(model)
    if not deferrals:
        return original(self, model, *args, **kwargs)
    with expected_at(LOAD), meeting(LOAD) as coordinator:
        if self.zero_optimization_stage() == 3 and _zero(self).get("zero_hpz_partition_size", 1) > 1:
            raise UnsupportedError(
                "zero_hpz_partition_size: DeepSpeed gathers weights from ranks that follow each other, and under "
                "tensor_parallel.autotp_size these have other parts of them. Leave one of the two settings out."
            )
        for other in deferrals[1:] if _is_partitioned_here(self) else ():  # ZeRO-3 partitions all at once
            other.fill_whole(model)
        materialise_written(model.parameters())
        of_ranks = coordinator.all_gather(set(_lazy(model)))
        if any(lazy != of_ranks[0] for lazy in of_ranks):  # some ranks have used it
            fill_whole(model)
        nodes = {id(param): param.node for param in _lazy(model).values()}
        result = original(self, model, *args, **kwargs)
        # What DeepSpeed has touched on any rank may be a part.
        whole = {name for name, param in _lazy(model).items() if nodes.get(id(param)) is param.node}
        whole.intersection_update(*coordinator.all_gather(whole))
        owners = {deferral: deferral.detach(model) for deferral in deferrals}
        will_be_flattened(model, self.zero_optimization_stage())
        device, held = collective_device(), partial(_held, coordinator)
        for deferral in deferrals:
            chunk = chunk_bytes(deferral.config, device)
            destination: Destination = InPlace(deferral, coordinator, device, whole, chunk, held)
            destination.into, destination.stock_reader = "the parts that AutoTP has cut", deferral.stock_reader
            if _is_partitioned_here(self):
                from .partitions import CutPartitions  # imports deepspeed

                destination = CutPartitions(deferral, coordinator, self, held)
            report: Any = deferral.fill(model, coordinator, destination)
            for owner in owners[deferral]:
                owner.streaming_report = report
        return result


def _is_partitioned_here(engine: Any) -> bool:
    """Whether ZeRO-3 partitions parts before they are read. For swap files DeepSpeed does it afterwards."""
    is_swapped = (_zero(engine).get("offload_param") or {}).get("device") == "nvme"
    return engine.zero_optimization_stage() == 3 and not is_swapped


def _zero(engine: Any) -> dict[str, Any]:
    return engine.config.get("zero_optimization") or {}


def _held(coordinator: Coordinator, name: str, param: torch.Tensor) -> LocalShard | None:
    """Return the local shard of parameter `name` that the lazy `param` is; None if DeepSpeed's map does not say."""
    if not is_cut(param):
        return LocalShard(ParameterBox.whole(param.shape), coordinator.rank, coordinator.world_size)
    from .shards import shard_of  # imports deepspeed

    try:
        return shard_of(name, param)
    except UnsupportedError:
        return None


def _lazy(model: nn.Module) -> dict[str, LazyTensor]:
    return {name: param for name, param in model.named_parameters() if isinstance(param, LazyTensor)}
