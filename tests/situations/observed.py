"""What a rank sees of a training: a digest of each value, and the structure of the optimizer's state."""

import hashlib
from typing import Any

import torch
from torch.distributed.tensor import DTensor


def values_of(model: Any) -> dict[str, str]:
    """A digest of each parameter and persistent buffer, whole where it is sharded (all ranks)."""
    found = {name: _digest(_whole(param)) for name, param in model.named_parameters(remove_duplicate=False)}
    persistent = set(model.state_dict().keys())
    buffers = model.named_buffers(remove_duplicate=False)
    return found | {name: _digest(buffer) for name, buffer in buffers if name in persistent}


def _whole(param: torch.Tensor) -> torch.Tensor:
    if hasattr(param, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([param]):
            return param.data.clone()
    value = param.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value


def _digest(value: torch.Tensor) -> str:
    value = value.detach().cpu().contiguous().reshape(-1)
    return f"{value.dtype} {hashlib.sha1(value.view(torch.uint8).numpy()).hexdigest()[:12]}"


def optimizer_structure(optimizer: Any) -> list[Any]:
    """The entries of each group and of each parameter; tensors by their types and local shapes.

    Those of parameters are sorted: stage 3 empties the groups' lists of them.
    """
    while hasattr(optimizer, "optimizer"):  # of DeepSpeed or accelerate
        optimizer = optimizer.optimizer
    groups = [
        {name: _structure(value) for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
    states = [{name: _structure(value) for name, value in state.items()} for state in optimizer.state.values()]
    return [dict(sorted(group.items())) for group in groups] + sorted(
        (dict(sorted(state.items(), key=str)) for state in states if state), key=repr
    )


def _structure(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        local = value.to_local() if hasattr(value, "to_local") else value
        return f"{type(value).__name__} {local.dtype} {tuple(local.shape)}"
    if isinstance(value, dict):
        return {name: _structure(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [_structure(each) for each in value]
    return type(value).__name__, repr(value)
