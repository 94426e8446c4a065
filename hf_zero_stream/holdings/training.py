"""The training of a model: an optimizer and its slots, a scheduler, a loss scaler, counters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ..bindings import history
from ..ranks.coordinator import Coordinator
from . import fsdp
from .slots import Slot, is_number, slots_of_parameters


STEPS = "global_steps"
"""The counter that every training has: how many steps the optimizer has made."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """A model, and what trains it.

    Attributes:
        optimizer: has the groups, and the state of the `slots`.
        scheduler: None if there is none.
        scaler_state: what the loss scaler keeps; None if there is none.
        set_scaler_state: puts another in its place.
        counters: numbers of steps, samples, ..., by name.
        set_counters: puts other numbers in their place.
        is_between_steps: False in the middle of accumulating gradients.
        replacing_state: a context in which the state may be replaced (all ranks).
        batch_size: samples in a step of all ranks; None if it is not known.
        device: where this rank trains.
        copy_masters: brings new masters, inside `replacing_state`, into the model (all ranks).
        can_copy_masters: whether that can be done.
        copies_own_masters: a step of a slot's tensor is followed by a copy into the values of its members, and of no
            other parameters.
        unseen_steps: why steps may come that nothing announces; "" if none does.
        editors: objects with public methods, of these names, that change values in place between steps.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    slots: Sequence[Slot]
    scheduler: Any = None
    scaler_state: Mapping[str, Any] | None = None
    set_scaler_state: Callable[[Mapping[str, Any]], object] = lambda state: None
    counters: Mapping[str, int] = field(default_factory=dict)
    set_counters: Callable[[Mapping[str, int]], None] = lambda counters: None
    is_between_steps: bool = True
    replacing_state: Callable[[], AbstractContextManager[object]] = nullcontext
    batch_size: int | None = None
    device: torch.device = torch.device("cpu")
    copy_masters: Callable[[], object] = lambda: None
    can_copy_masters: bool = True
    copies_own_masters: bool = False
    unseen_steps: str = ""
    editors: Sequence[tuple[Any, Sequence[str]]] = ()

    @property
    def copies_masters(self) -> bool:
        """Whether new masters, where there are any, can be brought into the model: none lies in swap files."""
        return self.can_copy_masters and not any(slot.is_swapped for slot in self.slots)

    def without_frozen(self, names: AbstractSet[str] = frozenset()) -> Training:
        """This training without slots that are frozen, but for parameters of these `names`."""
        slots = [slot for slot in self.slots if not slot.is_frozen or any(it.name in names for it in slot.members)]
        return replace(self, slots=slots)


def training_of_model(
    model: Any, optimizer: torch.optim.Optimizer, scheduler: Any, scaler: Any, coordinator: Coordinator
) -> Training:
    """That of an optimizer that trains the parameters of `model` themselves: FSDP2, tensor parallelism, one rank."""
    fsdp.reshard(model)  # else the model has gathered parameters, which the optimizer does not know
    slots = slots_of_parameters(model, optimizer, coordinator)
    device = next((slot.values.device for slot in slots), torch.device("cpu"))
    return Training(
        model=model,
        optimizer=optimizer,
        slots=slots,
        scheduler=scheduler,
        scaler_state=None if scaler is None else scaler.state_dict(),
        set_scaler_state=lambda state: scaler.load_state_dict(dict(state)),
        counters={STEPS: max([history.steps_of(optimizer), *map(_steps_of, slots)])},
        set_counters=lambda counters: history.set_steps(optimizer, counters.get(STEPS, 0)),
        device=device,
    )


def _steps_of(slot: Slot) -> int:
    step: Any = slot.entries.get("step")
    return int(step) if is_number(step) else 0
