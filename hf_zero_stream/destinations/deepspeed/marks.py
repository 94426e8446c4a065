"""What DeepSpeed leaves on parameters, for code that must not import DeepSpeed, which takes seconds, to look at it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


def has_partition(param: Any) -> bool:
    """Whether `param` is one of ZeRO-3's."""
    return hasattr(param, "ds_tensor")


def has_gathered(model: nn.Module) -> bool:
    """Whether any of the model's ZeRO-3 parameters are inside a ``GatheredParameters`` now."""
    if not any(map(has_partition, model.parameters())):
        return False
    from .gathered import gathered

    return bool(gathered(model.parameters()))


def is_gathered_whole(model: nn.Module) -> bool:
    """Whether this rank has all values of a ZeRO-3 model, because the caller has gathered them."""
    if not has_gathered(model):
        return False
    from .gathered import not_in_full

    return not not_in_full(model)


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
