"""What an optimizer keeps of the parameters that it trains: fp32 copies (*masters*), moments, steps.

An optimizer of torch has an entry of state for each tensor that it trains. That tensor is a parameter, the local shard
of one, or a flat buffer in which parts of many parameters lie: a *slot*. What is kept for each element, such as Adam's
moments, is laid out as the slot is. So where an element of a parameter lies in a slot says where its moments are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..errors import UnsupportedError
from ..planning.boxes import ParameterBox
from ..ranks.coordinator import Coordinator
from . import fsdp
from .holder import Holding
from .marks import local_of
from .own_names import named_parameters
from .shards import held_of


MASTER = "fp32"
"""The name of the masters among the states of a slot."""

_ELSE = "Use an optimizer like AdamW, or the checkpoints of DeepSpeed or accelerate."


class Member(NamedTuple):
    """Elements ``[start, stop)`` of `box` of the parameter of the own `name`, in a slot from element `first` on.

    `is_whole`: this rank holds all of the box, as others do, and gives these elements when they are saved.
    """

    name: str
    box: ParameterBox
    first: int
    start: int
    stop: int
    is_whole: bool = False


@dataclass(frozen=True, eq=False)
class Slot:
    """A tensor that an optimizer trains.

    Attributes:
        group: number of the optimizer's group.
        values: what is trained.
        entries: the optimizer's own entry of state for it: elementwise tensors, `step`, other numbers; may be empty.
        members: parts of parameters that lie in it; on each rank the same parameters, some without elements.
        is_apart: `values` are masters of parameters in 16 bit.
        is_swapped: the tensors are in memory inside :attr:`opened` only.
        is_frozen: it is not trained now, and has not been before.
    """

    group: int
    values: torch.Tensor
    entries: dict[str, Any]
    members: Sequence[Member]
    is_apart: bool = False
    is_swapped: bool = False
    is_frozen: bool = False
    opened: Callable[[], AbstractContextManager[object]] = field(default=nullcontext)

    def flat(self, key: str) -> torch.Tensor:
        """The elementwise state `key`, or the masters, as a flat tensor; zeros, if no step has made it yet."""
        value = self.values if key == MASTER else self.entries.get(key)
        return torch.zeros_like(local_of(self.values).view(-1)) if value is None else local_of(value).view(-1)


def slots_of_parameters(model: nn.Module, optimizer: torch.optim.Optimizer, coordinator: Coordinator) -> list[Slot]:
    """The slots of an optimizer that trains the parameters of `model` themselves, sharded by DTensor or whole."""
    names = {id(param): name for name, param in named_parameters(model)}
    records = fsdp.records_by_id(model)
    slots = []
    for number, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            name = names.get(id(param))
            if name is None:
                raise UnsupportedError(
                    f"The optimizer's group {number} trains a parameter of shape {tuple(param.shape)} that is none of "
                    f"the {type(model).__name__}'s. Give the model that it trains."
                )
            held = held_of(name, param, records.get(id(param)), coordinator)
            members = [Member(name, held.box, 0, *held.share, is_whole=held.copies > 1)]
            # What is frozen for a while keeps the moments that it has.
            is_frozen = not (param.requires_grad or optimizer.state[param])
            slots.append(Slot(number, param, optimizer.state[param], members, is_frozen=is_frozen))
    return slots


def elementwise_keys(slots: Iterable[Slot]) -> list[str]:
    """The names of the elementwise states, masters last where there are any.

    Raises:
        UnsupportedError: a slot keeps something that is neither elementwise nor a number.
    """
    keys: dict[str, None] = {}
    has_masters = False
    for slot in slots:
        has_masters = has_masters or slot.is_apart
        for key, value in slot.entries.items():
            if is_number(value) or value is None:
                continue
            if not isinstance(value, torch.Tensor):
                raise UnsupportedError(
                    f"The optimizer keeps {key}, a {type(value).__name__}, for {_names(slot)}. Only numbers, and "
                    f"state that has one floating-point number for an element, can be saved. {_ELSE}"
                )
            if local_of(value).numel() != local_of(slot.values).numel() or not value.is_floating_point():
                raise UnsupportedError(
                    f"The optimizer keeps {key}, {value.dtype} of shape {tuple(value.shape)}, for {_names(slot)}, of "
                    f"shape {tuple(slot.values.shape)}. Only state that has one floating-point number for an element "
                    f"can be cut for another number of ranks. {_ELSE}"
                )
            keys[key] = None
    return [*keys, *([MASTER] if has_masters else [])]


def is_number(value: Any) -> bool:
    """Whether an optimizer keeps one number, as ``step``."""
    return isinstance(value, (bool, int, float)) or (isinstance(value, torch.Tensor) and value.dim() == 0)


def _names(slot: Slot) -> str:
    first, *others = (member.name for member in slot.members)
    return f"{first} and {len(others)} others" if others else first


def holdings_of(slots: Iterable[Slot], key: str) -> dict[str, Holding]:
    """What this rank holds of the state `key` of each parameter that is trained, by the parameter's name."""

    @contextmanager
    def opened(slot: Slot, member: Member) -> Iterator[torch.Tensor]:
        with slot.opened():
            count = member.box.numel if member.is_whole else member.stop - member.start
            yield slot.flat(key)[member.first : member.first + count]

    found = {}
    for slot in slots:
        for member in slot.members:
            kept = slot.values if key == MASTER else slot.entries.get(key)
            found[member.name] = Holding(
                member.box,
                torch.float32 if slot.is_swapped or kept is None else kept.dtype,
                member.start,
                member.stop,
                partial(opened, slot, member),
                is_whole=member.is_whole,
                is_swapped=slot.is_swapped,
            )
    return found


def make_entries(slots: Iterable[Slot], keys: Sequence[str]) -> None:
    """Make the elementwise states `keys` of zeros where an optimizer, which has made no step yet, has none."""
    for slot in slots:
        with slot.opened():
            for key in keys:
                if key != MASTER and key not in slot.entries:
                    slot.entries[key] = _zeros_like(slot.values)


def _zeros_like(values: torch.Tensor) -> torch.Tensor:
    if isinstance(values, DTensor) or values.device.type != "cpu" or values.is_pinned() or not values.is_contiguous():
        return torch.zeros_like(values, memory_format=torch.preserve_format)
    # The system gives numpy zeros when they are first touched; torch would write them, and they will be overwritten.
    nothing = torch.from_numpy(numpy.zeros(values.nbytes, dtype=numpy.uint8))
    return nothing.view(values.dtype).view(values.shape)
