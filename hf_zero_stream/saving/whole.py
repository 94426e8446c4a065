"""Which saves of a training are known to be whole, and what waits for one: nothing goes before its successor is.

A training has its place in here by its model, and its saves are told apart by its id and its steps. What is noted is
noted on every rank, after all have agreed; what fails, or was made by others, is never noted.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import nn

from ..ranks.coordinator import expected_at, meeting
from ..ranks.rendezvous import SAVE
from ..seams.wrappers import unwrapped
from ..settings.scope import set_in_context
from .pending import PendingSave


class _Waiting(NamedTuple):
    training: str
    steps: int
    work: Callable[[], object]
    or_weights: bool


@dataclass(eq=False)
class _Saves:
    """What is known of one model: the steps of the newest whole state of each training, and what waits."""

    states: dict[str, int] = field(default_factory=dict)
    waiting: list[_Waiting] = field(default_factory=list)


_of_models: WeakKeyDictionary[nn.Module, _Saves] = WeakKeyDictionary()
_lock = threading.Lock()


def when_whole(
    model: nn.Module, training: str, steps: int, work: Callable[[], object], *, or_weights: bool = False
) -> bool:
    """Do `work` once a state of the `training` of this id, of so many `steps` or more, is whole on a shared disk.

    `or_weights`: the training has come to its end, so that weights that are saved from now on are its result, too.
    Returns whether it is done already.
    """
    with _lock:
        _of_models.setdefault(model, _Saves()).waiting.append(waiting := _Waiting(training, steps, work, or_weights))
    return waiting in _do_what_is_due(model)


def note_state(model: nn.Module, training: str, steps: int, saved: object) -> None:
    """Note a state when it is whole: at once, or, if what was `saved` is pending, as the last part of that."""

    def note() -> None:
        with _lock:
            states = _of_models.setdefault(model, _Saves()).states
            states[training] = max(steps, states.get(training, -1))
        _do_what_is_due(model)

    if (later := _later.get()) is not None:
        later.append(note)
    else:
        _after(saved, note)


_later: ContextVar[list[Callable[[], object]] | None] = ContextVar("hf_zero_stream_notes_for_later", default=None)


@contextmanager
def notes_for_later() -> Iterator[Callable[[object], None]]:
    """Inside, states are not noted: they are when what this gives is called with what was saved.

    For callers that have something to do yet before a state is what a resume finds.
    """
    notes: list[Callable[[], object]] = []

    def note(saved: object) -> None:
        for each in notes:
            _after(saved, each)

    with set_in_context(_later, notes):
        yield note


def _after(saved: object, work: Callable[[], object]) -> None:
    if isinstance(saved, PendingSave):
        saved.then(work)
    else:
        work()


def note_weights(model: nn.Module) -> None:
    """Note that weights of `model` are whole that were saved just now (all ranks)."""
    _do_what_is_due(model, has_weights=True)


def noting_weights(save_model: Callable[..., Any]) -> Callable[..., Any]:
    """Have what replaces ``Trainer.save_model`` note the weights; of some models rank 0 alone saves them."""

    @functools.wraps(save_model)
    def save(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        saves = _of_models.get(model := unwrapped(self.model))
        if saves is None or not any(each.or_weights for each in saves.waiting):
            return save_model(original, self, *args, **kwargs)
        with expected_at(SAVE):
            result = save_model(original, self, *args, **kwargs)
        with meeting(SAVE) as coordinator:
            coordinator.agree()
        note_weights(model)
        return result

    return save


def _do_what_is_due(model: nn.Module, *, has_weights: bool = False) -> list[_Waiting]:
    with _lock:
        saves = _of_models.setdefault(model, _Saves())
        is_due = partial(_is_due, saves.states, has_weights)
        due = [each for each in saves.waiting if is_due(each)]
        saves.waiting = [each for each in saves.waiting if not is_due(each)]
    for each in due:
        each.work()
    return due


def _is_due(states: dict[str, int], has_weights: bool, waiting: _Waiting) -> bool:
    return states.get(waiting.training, -1) >= waiting.steps or (has_weights and waiting.or_weights)
