"""What is taken of the states on hosts, and what a save removes; two writers on hosts that come and go, all orders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn

from hf_zero_stream.holdings.slots import training_of_model
from hf_zero_stream.plugins.hosts.choice import (
    FoundState,
    TrainingMark,
    choose,
    differences,
    facts_of,
    joined,
    next_number,
    replaced_by,
)
from hf_zero_stream.ranks.coordinator import Coordinator


FACTS = {"lr": 0.01, "parameters": "12"}


def state(
    steps: int, training: str = "A", *, whole: bool = True, number: int = 1, facts: Mapping[str, Any] = FACTS
) -> FoundState:
    name = f"{training}{steps}.{number}"
    return FoundState(name, steps, number, training, facts, frozenset(range(1 + whole)), [["a"], ["b"]])


def taken(found: Sequence[FoundState], mark: TrainingMark, steps: int = -1) -> tuple[str | None, str]:
    """The name of the state that is taken, and what is said of others."""
    choice = choose(joined([found]), mark, steps)
    return choice.taken and choice.taken.name, "\n".join(choice.passed_over)


def test_the_most_steps_count() -> None:
    found = [state(2, "B"), state(10), state(6, number=3)]
    name, said = taken(found, TrainingMark("", FACTS))
    assert name == "A10.1" and "B2.1" in said and "A6.3" not in said
    assert taken(found, TrainingMark("A", FACTS), 6)[0] == "A10.1"
    assert taken(found, TrainingMark("B", FACTS), 6)[0] is None  # the shared state is B's
    assert taken([state(5), state(5, number=2)], TrainingMark("", FACTS))[0] == "A5.2"


def test_what_is_ahead_is_named() -> None:
    name, said = taken([state(10, whole=False), state(6), state(3, whole=False)], TrainingMark("", FACTS))
    assert name == "A6.1" and "A10.1 (step 10) lacks 1 of 2 pieces" in said and "A3.1" not in said
    assert taken([state(10, whole=False), state(6)], TrainingMark("A", FACTS), 8) == (None, said)


def test_another_training_is_named_and_not_taken() -> None:
    name, said = taken(
        [state(10), state(3, "B", facts={"lr": 0.5, "more": 1})], TrainingMark("", {**FACTS, "lr": 0.5})
    )
    assert name == "B3.1" and "A10.1 (step 10) is of another training: lr 0.01, here 0.5" in said
    name, said = taken([state(10)], TrainingMark("B", FACTS))
    assert name is None and "id A, here B" in said
    # The id alone is not enough: the shared state of one training may be where two others began.
    assert taken([state(10)], TrainingMark("A", {**FACTS, "lr": 0.5}))[0] is None


def test_a_save_removes_older_ones_of_its_training() -> None:
    found = [state(10), state(4, whole=False), state(3), state(2), state(2, "B"), state(5, number=2), state(5)]
    own = state(5, number=2)
    assert sorted(replaced_by(own, found, 1)) == ["A2.1", "A3.1", "A4.1", "A5.1"]
    assert sorted(replaced_by(own, found, 3)) == ["A2.1", "A4.1"]


def made(lr: float, width: int = 3, **options: Any) -> tuple[torch.optim.Optimizer, Any]:
    model = nn.Linear(width, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, **options)
    return optimizer, lambda scheduler=None: facts_of(
        training_of_model(model, optimizer, scheduler, None, Coordinator.of_this_rank())
    )


def test_facts_of_trainings() -> None:
    """Those of a restart are the same, whatever schedules and resumes have done to the options since."""
    optimizer, facts = made(0.01, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=9)
    first = facts(scheduler)
    optimizer.param_groups[0].update(lr=7.0, initial_lr=7.0)
    again = made(0.01, betas=(0.9, 0.95), foreach=True)[1]()
    assert differences(first, facts(scheduler)) == differences(first, again) == []
    assert differences(made(0.5)[1](), made(0.01)[1]()) == ["lr 0.5, here 0.01"]
    (what,) = differences(made(0.01, 4)[1](), made(0.01)[1]())
    assert what.startswith("parameters ")
    by_group = [torch.optim.SGD([{"params": [nn.Parameter(torch.ones(2))], "lr": lr}]) for lr in (0.1, 0.2)]
    for each in by_group:
        torch.optim.lr_scheduler.ConstantLR(each)
    mine, theirs = ([group["initial_lr"] for group in each.param_groups] for each in by_group)
    assert differences({"initial_lr": mine}, {"initial_lr": theirs}) == ["initial_lr [0.1], here [0.2]"]


# --------------------------------------------------------------------------------------------- all orders of writers


HOSTS = "ab"
HOLDERS = {"ab": ("a", "b"), "b": ("b",)}
"""The hosts that have the piece of each rank, of jobs on these hosts."""


@dataclass(frozen=True)
class Writer:
    """A job that saves at each step on its hosts; `todo` are the parts of a save that it has not done yet."""

    hosts: str
    steps: int
    last: int
    key: str
    own: str = ""
    todo: tuple[tuple[str, str], ...] = ()
    removes: tuple[str, ...] = ()


@dataclass(frozen=True)
class World:
    """States on each host, by name; the writers that live; and how often a job may still be killed or started."""

    on: tuple[frozenset[str], ...]
    writers: tuple[Writer, ...]
    left: int


class Model:
    """Walks all orders in which writers may do the parts of their saves, with deaths and starts in between."""

    def __init__(self, keep: int) -> None:
        self.keep, self.states, self.seen = keep, dict[str, FoundState](), 0
        self.homes: dict[str, str] = {}
        self.chosen: dict[tuple[tuple[frozenset[str], ...], str], FoundState | None] = {}

    def newest(self, world: World, hosts: str = HOSTS) -> FoundState | None:
        if (world.on, hosts) not in self.chosen:
            self.chosen[world.on, hosts] = choose(self.look(world, hosts), TrainingMark("", {})).taken
        return self.chosen[world.on, hosts]

    def look(self, world: World, hosts: str) -> list[FoundState]:
        def on(number: int) -> list[FoundState]:
            host = HOSTS[number]
            found = [self.states[name] for name in world.on[number]]
            of_hosts = [HOLDERS[self.homes[each.name]] for each in found]
            return [
                each._replace(there=frozenset(rank for rank, of in enumerate(holders) if host in of))
                for each, holders in zip(found, of_hosts, strict=True)
            ]

        return joined(on(HOSTS.index(host)) for host in hosts)

    def begun(self, world: World, writer: Writer) -> Writer:
        steps, found = writer.steps + 1, self.look(world, writer.hosts)
        number = next_number(found, "A", steps)
        name = f"state-{steps:08d}-{number}-{writer.key}"
        holders = HOLDERS[writer.hosts]
        self.states[name] = FoundState(name, steps, number, "A", {}, frozenset(), holders)
        self.homes[name] = writer.hosts
        todo = [("commit", host) for host in writer.hosts] + [("remove", host) for host in writer.hosts]
        removes = tuple(sorted(replaced_by(self.states[name], found, self.keep)))
        return replace(writer, steps=steps, own=name, todo=tuple(todo), removes=removes)

    def after(self, world: World, number: int) -> World:
        writer = world.writers[number]
        if not writer.todo:
            made = self.begun(world, writer)
            return replace(world, writers=(*world.writers[:number], made, *world.writers[number + 1 :]))
        (what, host), *todo = writer.todo
        place, on = HOSTS.index(host), [*world.on]
        on[place] = on[place] | {writer.own} if what == "commit" else on[place] - {*writer.removes}
        goes_on = [replace(writer, todo=tuple(todo))] if todo or writer.steps < writer.last else []
        writers = (*world.writers[:number], *goes_on, *world.writers[number + 1 :])
        return replace(world, on=tuple(on), writers=writers)

    def following(self, world: World) -> Iterator[World]:
        for number, writer in enumerate(world.writers):
            yield self.after(world, number)
            if world.left and writer.todo:
                rest = world.writers[:number] + world.writers[number + 1 :]
                yield replace(world, writers=rest, left=world.left - 1)
        if world.left:  # on all hosts, or on those that are left, beside a job that may hang
            for hosts in HOLDERS:
                newest = self.newest(world, hosts)
                steps = 0 if newest is None else newest.steps
                key = f"{world.left}{hosts}"
                yield replace(
                    world, writers=(*world.writers, Writer(hosts, steps, steps + 1, key)), left=world.left - 1
                )

    def walk(self, world: World) -> None:
        waiting, known = [(world, (0, 0, ""))], set()
        while waiting:
            here, best = waiting.pop()
            if (here, best) in known:
                continue
            known.add((here, best))
            newest = self.newest(here)
            order = (0, 0, "") if newest is None else newest.order
            assert order >= best, f"{best} was whole, and now the newest one is {order}: {here}"
            waiting += [(each, order) for each in self.following(here)]
        self.seen = len(known)


@pytest.mark.parametrize("failures", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("hosts", [("ab", "ab"), ("ab", "b")])
def test_two_writers(hosts: tuple[str, str], keep: int, failures: int) -> None:
    """Once a state is whole, one that is as new is, whatever two jobs do on hosts that not both of them have."""
    model = Model(keep)
    world = World((frozenset(),) * len(HOSTS), (Writer("ab", 0, 1, "w"),), failures)
    while world.writers:
        world = model.after(world, 0)
    writers = tuple(Writer(each, 1, 2, key) for key, each in zip("xy", hosts, strict=True))
    model.walk(replace(world, writers=writers))
    assert model.seen > 1000
