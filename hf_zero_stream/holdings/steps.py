"""The steps of optimizers: which memory each of them changes, and whether they can be seen coming."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from .introspection import has_partition, storage_of
from .own_names import parameters
from .training import Training


@dataclass(frozen=True)
class Steps:
    """What the steps of a training's optimizer change.

    A step is known by the ids of the tensors that it trains. A parameter that a mapping lacks may change at any step.

    Attributes:
        of_states: by the name of a parameter, the id of the tensor of which a step changes its masters and moments.
        of_values: by the name of a parameter, the id of the tensor of which a step changes its values in the model.
        storages: where the memory that training keeps begins: that of parameters, and of what the optimizer has.
        alive: those tensors; while they live, nothing else has their ids.
    """

    of_states: Mapping[str, int] = field(default_factory=dict)
    of_values: Mapping[str, int] = field(default_factory=dict)
    storages: frozenset[int] = frozenset()
    alive: tuple[torch.Tensor, ...] = ()

    @classmethod
    def of_training(cls, training: Training) -> Steps:
        of_states = {member.name: id(slot.values) for slot in training.slots for member in slot.members}
        # A step of one group of stages 1 and 2 is followed by an all-gather that changes the values of all.
        own = [slot for slot in training.slots if not slot.has_masters or training.copies_own_masters]
        of_values = {member.name: id(slot.values) for slot in own for member in slot.members}
        storages = frozenset(map(storage_of, _kept(training)))
        return cls(of_states, of_values, storages, tuple(slot.values for slot in training.slots))


def _kept(training: Training) -> Iterator[torch.Tensor]:
    for param in parameters(training.model):
        yield param.ds_tensor if has_partition(param) else param
    for slot in training.slots:
        yield slot.values
        yield from [value for value in slot.entries.values() if isinstance(value, torch.Tensor)]


def unseen_reason(optimizer: Any) -> str:
    """Why a step of `optimizer` may come without a call of torch's hooks before it; "" if none does."""
    kind = type(optimizer)
    if not isinstance(optimizer, torch.optim.Optimizer) or not getattr(kind.step, "hooked", False):
        return f"{kind.__name__}.step calls none of the hooks of torch.optim.Optimizer"
    groups = optimizer.param_groups
    if any(group.get("capturable") for group in groups):
        return f"{kind.__name__} is capturable, so that a CUDA graph may replay its steps without calling them"
    if any(group.get("use_muon") for group in groups):
        return "DeepSpeed changes the momentum of Muon before it calls step"
    return ""
