"""Slots: the tensors that an optimizer trains, and their state: fp32 copies (*masters*), moments, steps.

An optimizer of torch has an entry of state for each tensor that it trains. That tensor is a parameter, the local shard
of one, or a flat buffer in which parts of many parameters lie: a *slot*. What is kept for each element, such as Adam's
moments, is laid out as the slot is. So where an element of a parameter lies in a slot says where its moments are.

An entry is *elementwise*, or small (a number, None, a string, a dtype, and tuples, lists and dicts of these), or any
other tensor, which belongs to its slot *as a whole*, or refused by name: nothing is passed over.

A :class:`Training` is a model with what trains it: its slots, a scheduler, a loss scaler, counters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..bindings import history
from ..errors import UnsupportedError
from ..planning.boxes import ParameterBox
from ..ranks.coordinator import Coordinator
from ..settings.values import dtype_name, dtype_named, is_dtype_name
from . import fsdp
from .holding import Holding
from .introspection import local_of, local_tensor
from .own_names import named_parameters


VALUES = "values"
"""The name, among the states of a slot, of what is trained; in files, of the values of all that a model has."""

WHOLE = "whole"
"""What stands for the name of a state, in files, with all that is kept of slots as a whole."""

BUFFERS = "buffers"
"""What stands for the name of a state, in files, with buffers of which ranks have values of their own."""

_TAKEN = (VALUES, WHOLE, BUFFERS)


def entry_name(key: str, name: str) -> str:
    """The name, in files, of the state `key` of the parameter `name`, or of what else has a name."""
    return f"{key}/{name}"


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

    @property
    def elements(self) -> tuple[int, int]:
        """The elements of the box that lie in the slot: the first, and one past the last."""
        return (0, self.box.numel) if self.is_whole else (self.start, self.stop)


def in_memory(*, changes: bool) -> AbstractContextManager[None]:
    """:attr:`Slot.opened` of tensors that stay where they are."""
    return nullcontext()


@dataclass(frozen=True, eq=False)
class Slot:
    """A tensor that an optimizer trains.

    Attributes:
        group: number of the optimizer's group.
        values: what is trained.
        entries: the optimizer's own entry of state for it; an empty dict if it has none (see :func:`make_entries`).
        members: parts of parameters that lie in it; on each rank the same parameters, some without elements.
        has_masters: `values` are masters of parameters in 16 bit.
        is_swapped: the tensors are in memory inside :attr:`opened` only.
        is_frozen: it is not trained now, and has not been before.
        opened: a context in which the tensors are in memory; it takes `changes`, whether what is written there stays.
    """

    group: int
    values: torch.Tensor
    entries: dict[str, Any]
    members: Sequence[Member]
    has_masters: bool = False
    is_swapped: bool = False
    is_frozen: bool = False
    opened: Callable[..., AbstractContextManager[object]] = in_memory

    def flat(self, key: str) -> torch.Tensor:
        """The elementwise state `key`, or the values, as a flat tensor; zeros, if no step has made it yet."""
        value = self.elementwise(key)
        if value is None:
            return torch.zeros(local_of(self.values).numel(), dtype=self.values.dtype, device=self.values.device)
        return local_of(value).contiguous().view(-1)

    @property
    def is_in_one_piece(self) -> bool:
        """Whether :meth:`flat` gives the memory of the values itself: they may be in another order, or expanded."""
        return local_of(self.values).is_contiguous()

    def elementwise(self, key: str) -> torch.Tensor | None:
        """The elementwise state `key`, or the values; None if there is none for this slot."""
        if key == VALUES:
            return self.values
        value = self.entries.get(key)
        return value if _is_laid_out(value, self.values) else None

    @property
    def whole(self) -> list[str]:
        """The names of tensors that belong to the slot as it is, and to no other part of the parameters.

        Such are factors of a moment, matrices of a preconditioner, and codes of 8 bits with a scale for each block of
        them: blocks are counted from the slot's first element on, padding too.
        """
        tensors = {key: it for key, it in self.entries.items() if isinstance(it, torch.Tensor)}
        if self.is_swapped:
            return []
        others = [key for key, it in tensors.items() if it.numel() != 1 and not _is_laid_out(it, self.values)]
        has_codes = any(it.dtype == torch.uint8 and it.numel() > 1 for it in tensors.values())
        return [key for key, it in tensors.items() if it.dim()] if others and has_codes else others

    @property
    def is_padding(self) -> bool:
        """Whether no element of a parameter lies in it."""
        return all(start == stop for start, stop in (member.elements for member in self.members))

    def has_one_element(self) -> bool:
        """Whether one element is all that is trained, so that the shape of an entry does not tell what it is."""
        return self.values.numel() == 1


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
            held = fsdp.shard_of(name, param, records.get(id(param)), coordinator.rank, coordinator.world_size)
            members = [Member(name, held.box, 0, *held.share, is_whole=held.copies > 1)]
            # What is frozen for a while keeps the moments that it has.
            entries = entries_of(optimizer, param)
            is_frozen = not (param.requires_grad or entries)
            slots.append(Slot(number, param, entries, members, is_frozen=is_frozen))
    return slots


def entries_of(optimizer: Any, trained: torch.Tensor) -> dict[str, Any]:
    """Return the state that `optimizer` keeps for `trained`, maybe empty; looking must not leave an entry behind.

    Some optimizers begin with a tensor that has no entry, and take an empty one for an old one.
    """
    return optimizer.state[trained] if trained in optimizer.state else {}


Forms = Mapping[Slot, int]
"""Numbers of slots, the same for those that are kept alike but for values: as long as no entry is replaced."""


def forms_of(slots: Iterable[Slot]) -> Forms:
    """What can be told of a slot without its values holds for all slots of its number."""
    numbers: dict[object, int] = {}
    found = {}
    for slot in slots:
        kept = [(key, _form_of(value, slot.values)) for key, value in slot.entries.items()]
        form = _form_of(slot.values, slot.values), slot.is_swapped, slot.has_masters, *kept
        found[slot] = numbers.setdefault(form, len(numbers))
    return found


def elementwise_keys(slots: Sequence[Slot], forms: Forms | None = None) -> list[str]:
    """The names of the elementwise states.

    Raises:
        UnsupportedError: a slot keeps a tensor that a state has no place for.
    """
    keys: dict[str, None] = {}
    alike = first_of_forms(slots, forms_of(slots) if forms is None else forms)
    for slot in alike:
        whole = slot.whole
        for key in slot.entries:
            if slot.elementwise(key) is not None and not slot.has_one_element() and key not in whole:
                keys[key] = None
    for slot in alike:
        whole = slot.whole
        for key, value in slot.entries.items():
            _refuse_key(key, slot, names_tensors=key in keys or key in whole)
            if isinstance(value, torch.Tensor):
                _refuse_tensor(key, value, slot, is_whole=key in whole)
    return [*keys]


def first_of_forms(slots: Iterable[Slot], forms: Forms) -> list[Slot]:
    """The first slot of each form."""
    found: dict[int, Slot] = {}
    for slot in slots:
        found.setdefault(forms[slot], slot)
    return [*found.values()]


def _form_of(value: Any, values: torch.Tensor) -> object:
    """All but the values of an entry of a slot that trains `values`: with no other one, if it must be looked at."""
    if not isinstance(value, torch.Tensor):
        return type(value)
    local = local_tensor(value)
    if local.layout != torch.strided or local.dtype == torch.uint8:
        return object()
    kinds = type(value), type(local), local.dtype, local.device, getattr(value, "is_paged", False)
    is_one = value.numel() == 1, value.dim() == 0
    return kinds, is_one, local.is_quantized, local.is_contiguous(), _is_laid_out(value, values)


def _is_laid_out(value: Any, values: torch.Tensor) -> bool:
    """Whether `value` is a tensor that has an element where `values` have one."""
    if not isinstance(value, torch.Tensor):
        return False
    if not (isinstance(values, DTensor) or isinstance(value, DTensor)):
        return value.shape == values.shape
    whole = value.shape == values.shape or (isinstance(values, DTensor) and not isinstance(value, DTensor))
    return whole and local_of(value).shape == local_of(values).shape


def _is_plain(value: torch.Tensor) -> bool:
    """Whether the memory of `value`, which is none of a DTensor, is all that there is of it."""
    is_strided = value.layout == torch.strided and not (value.is_quantized or value.is_complex() or value.is_meta)
    return is_strided and type(value) in (torch.Tensor, nn.Parameter)


def _refuse_key(key: Any, slot: Slot, *, names_tensors: bool) -> None:
    """Raise an UnsupportedError unless `key` can be the name of a state, or a part of names in files."""
    if not isinstance(key, str) or (names_tensors and (not key.isidentifier() or key in _TAKEN)):
        raise UnsupportedError(
            f"The optimizer keeps {key!r} for {_names(slot)}: a state of this name cannot be saved. {_ELSE}"
        )


def _refuse_tensor(key: str, value: torch.Tensor, slot: Slot, *, is_whole: bool) -> None:
    """Raise an UnsupportedError unless the memory of `value` is all that there is of it."""
    local = local_of(value)
    if is_whole and isinstance(value, DTensor):
        why = f", a DTensor of shape {tuple(slot.values.shape)}: it is not known what of it belongs to this rank."
    elif type(local) not in (torch.Tensor, nn.Parameter):
        why = f". It is a {type(local).__name__}, whose memory is not known."
    elif not _is_plain(local):
        why = ". It is sparse, quantised, complex or on the meta device."
    elif is_whole or not _is_laid_out(value, slot.values):
        return
    elif not (local.is_contiguous() and local_of(slot.values).is_contiguous()):
        why = ". Its elements are not in row-major order (contiguous)."
    else:
        return
    what = f"The optimizer keeps {key}, {value.dtype} of shape {tuple(value.shape)}, for {_names(slot)}"
    raise UnsupportedError(f"{what}{why} {_ELSE}")


def is_number(value: Any) -> bool:
    """Whether an optimizer keeps one number, as ``step``."""
    return isinstance(value, (bool, int, float)) or (isinstance(value, torch.Tensor) and value.dim() == 0)


def _names(slot: Slot) -> str:
    first, *others = (member.name for member in slot.members)
    return f"{first} and {len(others)} others" if others else first


def holdings_of(slots: Iterable[Slot], key: str) -> dict[str, Holding]:
    """Return this rank's holding of the state `key` of each trained parameter, by the parameter's name."""
    return {member.name: holding_of(slot, member, key) for slot in slots for member in slot.members}


def holding_of(slot: Slot, member: Member, key: str) -> Holding:
    """What this rank holds of the state `key` of one member."""
    kept = slot.elementwise(key)
    return Holding(
        member.box,
        torch.float32 if slot.is_swapped else (slot.values if kept is None else kept).dtype,
        member.start,
        member.stop,
        partial(_swapped_in if slot.is_swapped else _in_place, slot, member, key),
        is_whole=member.is_whole,
        is_swapped=slot.is_swapped,
        is_zero=kept is None and not slot.is_swapped,
    )


def memory_of(slot: Slot, member: Member, key: str) -> torch.Tensor:
    """The elements of one member in the state `key`, flat; they are the memory itself if that is in one piece."""
    start, stop = member.elements
    return slot.flat(key)[member.first : member.first + stop - start]


def _in_place(slot: Slot, member: Member, key: str) -> AbstractContextManager[torch.Tensor]:
    return nullcontext(memory_of(slot, member, key))


@contextmanager
def _swapped_in(slot: Slot, member: Member, key: str) -> Iterator[torch.Tensor]:
    with slot.opened(changes=False):
        yield memory_of(slot, member, key)


def storage_kind(value: torch.Tensor, values: torch.Tensor) -> str:
    """Name what differs between an elementwise `value` and the slot: its dtype, ``host``, ``local``; "" if nothing."""
    words = [] if value.dtype == values.dtype else [dtype_name(value.dtype)]
    is_paged = getattr(value, "is_paged", False)  # bitsandbytes': in memory that the GPU sees too
    if value.device.type == "cpu" and values.device.type != "cpu" and not is_paged:
        words.append("host")
    if isinstance(values, DTensor) and not isinstance(value, DTensor):
        words.append("local")
    return " ".join(words)


def is_storage_kind(text: str) -> bool:
    """Whether :func:`storage_kind` can have given `text`."""
    first, *others = text.split(" ") if text else ["host"]
    return all(word in ("host", "local") for word in (others if is_dtype_name(first) else [first, *others]))


def zeros_of(kind: str, values: torch.Tensor) -> torch.Tensor:
    """An elementwise state of this :func:`storage_kind` for a slot that trains `values`."""
    words = kind.split()
    if "local" in words:
        values = local_of(values)
    if "host" in words:
        values = torch.empty(values.shape, dtype=values.dtype)
    dtypes = [dtype_named(word) for word in words if word not in ("host", "local")]
    return _zeros_like(values, *dtypes)


def _zeros_like(values: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    dtype = dtype or values.dtype
    is_host = values.device.type == "cpu" and not values.is_pinned()
    if isinstance(values, DTensor) or not is_host or not values.is_contiguous() or not values.numel():
        return torch.zeros_like(values, dtype=dtype, memory_format=torch.preserve_format)
    # The system gives numpy zeros when they are first touched; torch would write them, and they will be overwritten.
    nothing = torch.from_numpy(numpy.zeros(values.numel() * dtype.itemsize, dtype=numpy.uint8))
    return nothing.view(dtype).view(values.shape)


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
        copy_masters: brings new masters, where there are any, into the model, inside `replacing_state` (all ranks).
            None if some of either lie in swap files.
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
    copy_masters: Callable[[], object] | None = lambda: None
    copies_own_masters: bool = False
    unseen_steps: str = ""
    editors: Sequence[tuple[Any, Sequence[str]]] = ()

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
