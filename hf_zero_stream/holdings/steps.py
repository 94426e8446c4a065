"""Steps of optimizers, and edits between them: which memory they change, and whether they can be seen coming."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from inspect import isfunction
from typing import Any, cast

import torch

from ..bindings.install import override_methods
from .introspection import has_partition, storage_of
from .own_names import parameters
from .slots import Training


@dataclass(frozen=True)
class Steps:
    """What the steps of a training's optimizer change.

    A step is known by the ids of the tensors that it trains. A parameter that a mapping lacks may change at any step.

    Attributes:
        of_states: by the name of a parameter, the id of the tensor of which a step changes its masters and moments.
        of_values: by the name of a parameter, the id of the tensor of which a step changes its values in the model.
        storages: where the memory that training keeps begins: that of parameters, and of what the optimizer has.
        alive: those tensors; while they live, nothing else has their ids.
        editors: what changes values between steps; see :class:`.slots.Training`.
    """

    of_states: Mapping[str, int] = field(default_factory=dict)
    of_values: Mapping[str, int] = field(default_factory=dict)
    storages: frozenset[int] = frozenset()
    alive: tuple[torch.Tensor, ...] = ()
    editors: Sequence[tuple[Any, Sequence[str]]] = ()

    @classmethod
    def of_training(cls, training: Training) -> Steps:
        of_states = {member.name: id(slot.values) for slot in training.slots for member in slot.members}
        # A step of one group of stages 1 and 2 is followed by an all-gather that changes the values of all.
        own = [slot for slot in training.slots if not slot.has_masters or training.copies_own_masters]
        of_values = {member.name: id(slot.values) for slot in own for member in slot.members}
        storages = frozenset(map(storage_of, _kept(training)))
        alive = tuple(slot.values for slot in training.slots)
        editors = [*training.editors, (training.optimizer, _own_methods(training.optimizer))]
        return cls(of_states, of_values, storages, alive, editors)


def _own_methods(optimizer: Any) -> list[str]:
    """The public methods that the class of `optimizer` adds to those of torch.

    They may change values between steps: ``train()`` and ``eval()`` of schedule-free ones, ``first_step()`` of SAM.
    """
    kinds = [kind for kind in type(optimizer).__mro__ if kind not in torch.optim.Optimizer.__mro__]
    names = {name: None for kind in kinds for name, it in vars(kind).items() if isfunction(it)}
    return [name for name in names if not name.startswith("_") and not hasattr(torch.optim.Optimizer, name)]


def _kept(training: Training) -> Iterator[torch.Tensor]:
    for param in parameters(training.model):
        yield param.ds_tensor if has_partition(param) else param
    for slot in training.slots:
        yield slot.values
        yield from [value for value in slot.entries.values() if isinstance(value, torch.Tensor)]


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` as it is, where ``torch.compile`` compiles what calls it, such as the step of an optimizer."""
    return cast(Callable[..., Any], torch.compiler.disable(function))


_before_edits: list[Callable[[], object]] = []


@contextmanager
def edits_call(secure: Callable[[], object], editors: Sequence[tuple[Any, Sequence[str]]]) -> Iterator[None]:
    """Inside, `secure` is called before :func:`announce_edit` returns, and before the methods of the `editors` do."""
    secure = uncompiled(secure)

    def secured(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            secure()
            return method(*args, **kwargs)

        return call

    with ExitStack() as stack:
        _before_edits.append(secure)
        stack.callback(_before_edits.remove, secure)
        for editor, names in editors:
            stack.enter_context(override_methods(editor, **{name: secured(getattr(editor, name)) for name in names}))
        yield


def announce_edit() -> None:
    """Say that something is going to change values in place: a save in the background first takes what it needs."""
    for secure in [*_before_edits]:
        secure()


def gather(
    original: Callable[..., Any], self: Any, params: Any, modifier_rank: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """DeepSpeed's ``GatheredParameters``, in which `modifier_rank` may change what is gathered."""
    if modifier_rank is not None:
        announce_edit()
    return original(self, params, modifier_rank, *args, **kwargs)


def load_values(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """``nn.Module.load_state_dict``, by which averaged weights are swapped in."""
    announce_edit()
    return original(self, *args, **kwargs)


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
