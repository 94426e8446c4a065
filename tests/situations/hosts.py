"""Situations of hosts that leave and come back, with clocks, counts and disks of their own.

Three starts of one job: hosts a, b and c train and save; some of them start again alone, and save what they come to;
all are back. The rule: the last start goes on from the furthest step that was saved whole, and nobody waits for ever.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import torch.distributed as dist

from tests.situations.drawn import Drawn
from tests.situations.trial import Finding, Trial
from tests.situations.writers import ON_DISK, Fault, faulty_disk, training
from tests.support.cluster import RankTimeout, run_ranks_expecting_errors


AXES: dict[str, tuple[str, ...]] = {
    "place": ("hosts",),
    "away": ("c", "b", "ab", "bc", "none"),
    "steps": ("2", "1", "4", "6"),
    "saves": ("last", "none", "each"),
    "how": ("waited", "background"),
    "shared": ("none", "older"),
    "copies": ("1", "0"),
    "clock": ("same", "behind", "ahead"),
    "optimizer": ("adamw", "sgd"),
    "fault": ("none", "killed", "no_space", "io_error"),
    "at": tuple(ON_DISK),
    "number": tuple(str(number) for number in range(1, 17)),
}
"""The values of each axis, simplest first."""

FIRST, SECOND, SHARED = 5, 10, 4
"""The steps at which all hosts save, and that of the older state on the shared disk."""

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Hosts(Drawn):
    """Three starts.

    Attributes:
        away: the hosts that start alone in between.
        steps, saves: how many steps these make, and when they save.
        how: in all saves on hosts: whether steps go on meanwhile.
        clock: theirs, beside that of the others: a day behind or ahead.
        fault: what happens to host b in the second save of all, at its operation `at` with this `number`.
    """

    place: str = "hosts"
    away: str = "c"
    steps: str = "2"
    saves: str = "last"
    how: str = "waited"
    shared: str = "none"
    copies: str = "1"
    clock: str = "same"
    optimizer: str = "adamw"
    fault: str = "none"
    at: str = "write"
    number: str = "1"

    AXES = AXES
    NAMED = "place"

    def settled(self) -> Hosts:
        return replace(self, at=Hosts.at, number=Hosts.number) if self.fault == "none" else self


def start(hosts: str, folder: Path, situation: Hosts, steps: int, saved_at: tuple[int, ...], clock_s: float) -> Any:
    """One start of the job: the step that it goes on from, and that of its end."""
    import torch

    import hf_zero_stream
    from tests.support.simulated_hosts import join_host

    ours = time.time
    time.time = lambda: ours() + clock_s
    join_host(hosts, folder / "disks", folder / "own")
    model, _ = training(0.0, 1)
    make: Any = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[situation.optimizer]
    optimizer = make(model.parameters(), lr=0.0)
    shared = folder / "shared" if situation.shared == "older" else None
    states = hf_zero_stream.HostStates(folder / "own", copies=min(int(situation.copies), len(hosts) - 1), job="job")
    resumed = states.load(model, shared, optimizer=optimizer)
    begun = at = 0 if resumed is None else resumed.counters["global_steps"]
    kept = sorted({float(value) for param in model.parameters() for value in param.detach().unique()})
    end, pending = at + steps, None
    while at < end:
        at += 1
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        optimizer.step()
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(float(at))
        if at in saved_at or -1 in saved_at or (at == end and 0 in saved_at):
            fault = situation.fault if len(hosts) == 3 and at == SECOND and hosts[dist.get_rank()] == "b" else "none"
            if fault != "none" and pending is not None:
                pending.wait()  # its disk does not fail
            with _disk(fault, situation, folder):
                if situation.how == "waited":
                    states.save(model, optimizer=optimizer)
                else:
                    pending = states.save(model, optimizer=optimizer, asynchronous=True)
                    if fault != "none" or at == end:
                        pending.wait()
        if shared is not None and at == SHARED and len(hosts) == 3:
            hf_zero_stream.save_state(model, shared, optimizer=optimizer)
    return begun, at, kept


def _disk(fault: str, situation: Hosts, folder: Path) -> Any:
    if fault == "none":
        return nullcontext()
    return faulty_disk(Fault(fault, situation.at, int(situation.number)), str(folder), Mock())


def trial(situation: Hosts, folder: Path, checkpoints: Path | None = None) -> Trial:
    """Try a situation in `folder`, which is emptied first."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "own").mkdir(parents=True)
    return Trial(findings=tuple(_tried(situation, folder)))


def _tried(situation: Hosts, folder: Path) -> Iterator[Finding]:
    saves = {"last": (0,), "none": (), "each": (-1,)}[situation.saves]
    clock_s = {"same": 0.0, "behind": -86400.0, "ahead": 86400.0}[situation.clock]
    first = _run("abc", folder, situation, SECOND, (FIRST, SECOND), 0.0)
    yield from _of_others("the first start", first)
    is_whole = all(outcome.error_type is None for outcome in first)
    furthest = {SECOND} if is_whole else {FIRST, SECOND}
    said = [(outcome.value, outcome.error_message) for outcome in first]
    if situation.away != "none":
        alone = _run(situation.away, folder, situation, int(situation.steps), saves, clock_s)
        said.append([(outcome.value, outcome.error_message) for outcome in alone])
        if any(outcome.error_type for outcome in alone):
            yield Finding("those that start alone fail", f"{said}\n{alone[0].traceback}")
            return
        if saves:
            furthest = {max(step, alone[0].value[1]) for step in furthest}
    last = _run("abc", folder, situation, 0, (), 0.0)
    said.append([(outcome.value, outcome.error_message) for outcome in last])
    if any(outcome.error_type for outcome in last):
        yield Finding("the last start fails", f"{said}\n{last[0].traceback}")
        return
    begun = {outcome.value[0] for outcome in last}
    if len(begun) > 1 or not begun <= furthest:
        yield Finding("an earlier step", f"from {sorted(begun)}, expected {sorted(furthest)}: {said}")
    for outcome in last:
        if outcome.value[2] != [float(outcome.value[0])]:
            yield Finding("a mixture", f"{outcome.value}: {said}")
            return


def _run(hosts: str, *args: Any) -> list[Any]:
    try:
        return run_ranks_expecting_errors(len(hosts), start, hosts, *args, timeout=TIMEOUT_S)
    except RankTimeout as timeout:
        return timeout.outcomes


def _of_others(when: str, outcomes: list[Any]) -> Iterator[Finding]:
    for rank, outcome in enumerate(outcomes):
        if outcome.error_type == "Hung":
            yield Finding("hangs", f"{when}: rank {rank}: {outcome.traceback}")
        elif outcome.error_type not in (None, "Died", "SaveError", "PeerError"):
            yield Finding("an error of somebody else", f"{when}: rank {rank}: {outcome.traceback}")
