"""Which state on hosts a training goes on from, and which ones its save replaces: decided by what is there.

Hosts leave and return, jobs are started beside each other under one name, and an old job may hang while another one
goes on in its place. So nothing here counts what happens to be there, and nothing asks for the time. A state knows its
training, by an id, and how far that had come, in steps. Of two states of a training the one with more steps is the
newer one, and a save removes older ones of its own training alone, when every host has the new one.
"""

from __future__ import annotations

import hashlib
import json
import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ...plugin_api import Training, history, named_parameters


class FoundState(NamedTuple):
    """A state in the folder of a host: which pieces lie there, and the names of the hosts that had each piece.

    For `number`, `training` and `facts` see :class:`.folders.HostState`.
    """

    name: str
    steps: int
    number: int
    training: str
    facts: Mapping[str, Any]
    there: frozenset[int]
    holders: Sequence[Sequence[str]]

    @property
    def order(self) -> tuple[int, int, str]:
        """Is greater for the newer of two states of a training, and never the same."""
        return self.steps, self.number, self.name

    @property
    def is_whole(self) -> bool:
        return len(self.there) == len(self.holders)


def joined(of_hosts: Iterable[Iterable[FoundState]]) -> list[FoundState]:
    """The states that hosts have between them, with all pieces that are there; the newest first."""
    found: dict[str, FoundState] = {}
    for state in (state for of_host in of_hosts for state in of_host):
        before = found.get(state.name)
        found[state.name] = state._replace(there=state.there | (before.there if before else frozenset()))
    return sorted(found.values(), key=lambda state: state.order, reverse=True)


def next_number(found: Iterable[FoundState], training: str, steps: int) -> int:
    """The number of a new state, beside those of its step that were `found`."""
    return 1 + max((state.number for state in found if (state.training, state.steps) == (training, steps)), default=0)


def replaced_by(own: FoundState, found: Iterable[FoundState], keep: int) -> list[str]:
    """The states among those that were `found` that go once all hosts have `own`, of which `keep` states stay.

    Those of its own training that are older: what is ahead of it, and what is of others, is theirs to remove.
    """
    older = [state for state in found if state.training == own.training and state.order < own.order]
    whole = sorted((state for state in older if state.is_whole), key=lambda state: state.order, reverse=True)
    stays = {state.name for state in whole[: keep - 1]}
    return [state.name for state in older if state.name not in stays]


class TrainingMark(NamedTuple):
    """What a training is known by before it goes on: an id, "" if it has none yet; and its facts."""

    training: str
    facts: Mapping[str, Any]

    def differs_from(self, state: FoundState) -> str:
        """Why a state is of another training; "" if it is of this one."""
        if what := differences(state.facts, self.facts):
            return "; ".join(what)
        is_other = self.training and state.training and self.training != state.training
        return f"id {state.training}, here {self.training}" if is_other else ""


@dataclass(frozen=True)
class Chosen:
    """The state that is taken, None if there is none; and what is said of those that are not, each a sentence."""

    taken: FoundState | None
    passed_over: Sequence[str]


def choose(found: Sequence[FoundState], mark: TrainingMark, least_steps: int = -1) -> Chosen:
    """Choose among states of hosts, the newest first, one of at least so many steps: else there is a newer one.

    What is ahead of what is taken is named, and what is of another training.
    """
    mine = [state for state in found if not mark.differs_from(state)]
    taken = next((state for state in mine if state.is_whole and state.steps >= least_steps), None)
    known = TrainingMark(taken.training, taken.facts) if taken is not None else mark
    said = []
    for state in found:
        if state is taken:
            continue
        why = mark.differs_from(state) or known.differs_from(state)
        if why:
            said.append(f"{state.name} (step {state.steps}) is of another training: {why}")
        elif taken is None or state.order > taken.order:
            if state.steps > least_steps:
                said.append(what_is_missing(state))
    return Chosen(taken, said)


def what_is_missing(state: FoundState) -> str:
    """The pieces that no host has, and the hosts that had them."""
    missing = [rank for rank in range(len(state.holders)) if rank not in state.there]
    names = sorted({name for rank in missing for name in state.holders[rank]})
    files = ", ".join(piece_name(rank) for rank in missing[:8])
    count = f"{len(missing)} of {len(state.holders)} pieces"
    return f"{state.name} (step {state.steps}) lacks {count}: {files}, which lie on {', '.join(names)}"


def piece_name(rank: int) -> str:
    return f"rank-{rank:05d}"


# ------------------------------------------------------------------------------------------------------------- facts


_MAKES_NO_OTHER = ("foreach", "fused", "capturable", "differentiable")
"""Options of optimizers that say how a step is computed."""

_facts: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()
"""By the optimizer, as they were when it was first asked: a resume puts saved options in place of its own."""


def facts_of(training: Training) -> dict[str, Any]:
    """What two starts of a training have in common, and two trainings not: its parameters, and how it was set up.

    A schedule changes none of it: options are those that the optimizer was made with.
    """
    optimizer = training.optimizer
    if optimizer not in _facts:
        shapes = {member.name: list(member.box.shape) for slot in training.slots for member in slot.members}
        given = getattr(optimizer, "defaults", {})
        rates = [group.get("initial_lr") for group in optimizer.param_groups]
        facts = {name: value for name, value in given.items() if name not in _MAKES_NO_OTHER}
        facts |= {"optimizer": type(optimizer).__name__, "parameters": described(shapes)}
        facts |= {} if None in rates else {"initial_lr": rates}
        _facts[optimizer] = as_facts(facts)
    return _facts[optimizer]


def facts_of_model(model: nn.Module) -> str:
    """What tells a model from others before anything trains it."""
    return described({name: list(getattr(it, "ds_shape", it.shape)) for name, it in named_parameters(model)})


def described(shapes: Mapping[str, Sequence[int]]) -> str:
    digest = hashlib.sha256(json.dumps(sorted(shapes.items())).encode()).hexdigest()[:12]
    return f"{len(shapes)} ({digest})"


def as_facts(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the values that JSON gives back as they are."""
    plain = ((name, _plain(value)) for name, value in values.items())
    return {name: value for name, value in plain if value is not NotImplemented}


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_meta:
        value = value.item()
    if isinstance(value, (list, tuple)):
        items = [_plain(each) for each in value]
        return NotImplemented if any(each is NotImplemented for each in items) else items
    if value is None or isinstance(value, (str, int)):
        return value
    return float(value) if isinstance(value, numbers.Real) and math.isfinite(value) else NotImplemented


def differences(theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> list[str]:
    """What differs of the facts that both have."""
    return [f"{name} {theirs[name]}, here {mine[name]}" for name in mine if mine[name] != theirs.get(name, mine[name])]


def mark_of(training: Training, facts: Mapping[str, Any] = {}) -> TrainingMark:
    """That of a training that is going to go on, with `facts` that somebody else knows of it."""
    return TrainingMark(history.id_of(training.optimizer), {**facts_of(training), **facts})
