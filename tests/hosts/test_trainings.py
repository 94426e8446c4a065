"""States on hosts know their training and how far it had come: what is taken, what is named, and what stays."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero_stream
from hf_zero_stream import HostStates
from hf_zero_stream.errors import SaveError, UrlError
from tests.support.cluster import run_ranks
from tests.support.hosts import can_mount
from tests.support.simulated_hosts import join_host


needs_mounts = pytest.mark.skipif(not can_mount(), reason="mounting in a namespace of its own is not allowed here")


@dataclass(frozen=True)
class Start:
    """A start of a job, one rank on each of `hosts`: it goes on from what it finds, and saves at these steps."""

    hosts: str
    until: int = 0
    on_hosts: Sequence[int] = ()
    on_disk: Sequence[int] = ()
    lr: float = 0.01
    width: int = 5
    kind: str = "AdamW"
    schedules: bool = False
    explicit: bool = False


def made(start: Start) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = nn.Linear(start.width, 3)
    optimizer = getattr(torch.optim, start.kind)(model.parameters(), lr=start.lr)
    lr_scheduler = torch.optim.lr_scheduler
    return model, optimizer, lr_scheduler.ExponentialLR(optimizer, 0.5) if start.schedules else None


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, next(model.parameters()).shape[1])).square().sum().backward()
    optimizer.step()


def run(start: Start, work: Path, shared: bool) -> tuple[int, str, list[str]]:
    """The step that is gone on from, what was said, and the steps of what is on this host in the end."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hf_zero_stream").addHandler(handler)
    join_host(start.hosts, work / "disks", work / "own")
    model, optimizer, scheduler = made(start)
    own = {"optimizer": optimizer, "scheduler": scheduler}
    states = HostStates(work / "own", job="job")
    disk = work / "shared"
    if start.explicit:
        place = max(states.folder.glob("state-*"))
        resumed: Any = hf_zero_stream.load_state(model, place, **own)
    else:
        resumed = states.load(model, disk if shared else None, **own)
    begin = 0 if resumed is None else resumed.counters["global_steps"]
    for number in range(begin + 1, start.until + 1):
        step(model, optimizer)
        if scheduler is not None:
            scheduler.step()
        if number in start.on_hosts:
            states.save(model, **own)
        if number in start.on_disk:
            hf_zero_stream.save_state(model, disk, keep_older=False, **own)
    return begin, "\n".join(said), sorted(path.name.split("-")[1] for path in states.folder.glob("state-*"))


def runs(work: Path, *starts: Start, shared: bool = False) -> list[tuple[int, str, list[str]]]:
    """What rank 0 tells of each start."""
    (work / "own").mkdir()
    return [run_ranks(len(start.hosts), run, start, work, shared)[0] for start in starts]


@pytest.mark.plugin("relay")
@needs_mounts
def test_hosts_that_were_away(cluster: None, tmp_path: Path) -> None:
    """The most steps count, not how many states were on the hosts that were there; nor does a save remove it."""
    started = Start("abc", 10, (5, 10))
    _, (begin, _, _), (again, said, _), (last, _, left) = runs(
        tmp_path, started, Start("c", 2, (2,)), Start("abc"), Start("cab", 11, (11,))
    )
    assert (begin, again, last) == (0, 10, 10)
    assert "state-00000002" in said and "another training" in said and "(step 10) is taken" in said
    assert left == ["00000002", "00000011"]  # on c


@pytest.mark.plugin("relay")
@needs_mounts
def test_hosts_that_were_away_and_a_shared_disk(cluster: None, tmp_path: Path) -> None:
    _, (begin, said, left), (again, _, _) = runs(
        tmp_path, Start("abc", 10, (5, 10), (4,)), Start("c", 6, (6,)), Start("abc"), shared=True
    )
    assert (begin, again) == (4, 10)
    assert "state-00000010" in said and "lacks 1 of 3 pieces" in said and left == ["00000006", "00000010"]


@needs_mounts
def test_another_training_of_the_same_job(cluster: None, tmp_path: Path) -> None:
    """It is named, not taken, not removed; a restart is not another one, though a schedule has changed its rate."""
    first = Start("ab", 3, (3,), schedules=True)
    _, (other, said, left), (wider, of_width, _), (again, _, _), (asked, _, _) = runs(
        tmp_path,
        first,
        Start("ab", 1, (1,), lr=0.5, schedules=True),
        Start("ab", width=7, schedules=True),
        first,
        Start("ab", lr=0.5, schedules=True, explicit=True),
    )
    assert (other, wider, again, asked) == (0, 0, 3, 3)
    assert "state-00000003" in said and "of another training: lr 0.01, here 0.5" in said
    assert "state-00000003" in of_width and "parameters" in of_width
    assert left == ["00000001", "00000003"]


@needs_mounts
def test_another_training_than_that_of_the_shared_state(cluster: None, tmp_path: Path) -> None:
    """Begun anew with the same options: only the id tells, which the shared state has."""
    (tmp_path / "elsewhere").mkdir()
    of_first, *_ = runs(tmp_path / "elsewhere", Start("ab", 9, (9,)))
    os.rename(tmp_path / "elsewhere" / "disks", tmp_path / "disks")
    _, (begin, said, left) = runs(tmp_path, Start("c", 2, (), (2,)), Start("ab", 3, (3,)), shared=True)
    assert (of_first[0], begin) == (0, 2) and "state-00000009" in said and left == ["00000003", "00000009"]


@needs_mounts
@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_steps_of_any_optimizer(cluster: None, tmp_path: Path, kind: str) -> None:
    """The newer of both is gone on from, also where the optimizer counts no steps."""
    found = runs(
        tmp_path,
        Start("ab", 6, (3,), (6,), kind=kind),
        Start("ab", 8, (8,), kind=kind),
        Start("ab", 9, kind=kind),
        shared=True,
    )
    assert [begin for begin, _, _ in found] == [0, 6, 8]


# ------------------------------------------------------------------------------------------- the end of a block


@pytest.fixture
def trained(tmp_path: Path) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer, _ = made(Start("a", kind="SGD"))
    step(model, optimizer)
    return model, optimizer


def on_hosts(folder: Path) -> list[str]:
    return [path.name.split("-")[1] for path in folder.rglob("state-*")]


def test_urls_beside_states_on_hosts(tmp_path: Path, trained: tuple[nn.Module, torch.optim.Optimizer]) -> None:
    """Of a URL nobody would see which state is the newer one."""
    model, optimizer = trained
    states = HostStates(tmp_path, job="j")
    trainer: Any = SimpleNamespace(is_deepspeed_enabled=True, args=SimpleNamespace(output_dir="s3://bucket/run"))
    for call in (
        lambda: states.load(model, "s3://bucket/run", optimizer=optimizer),
        lambda: states.attach(trainer, 1),
        lambda: HostStates("s3://bucket/own", job="j"),
    ):
        with pytest.raises(UrlError, match="expected a local folder; got a URL, s3://"):
            call()


def test_a_save_in_the_background_fails_behind_the_block(
    tmp_path: Path, trained: tuple[nn.Module, torch.optim.Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is on the hosts stays, and goes with the save that comes to its end."""
    model, optimizer = trained
    write, is_full, blocked = os.pwritev, threading.Event(), threading.Event()

    def pwritev(handle: int, buffers: Any, position: int) -> int:
        if threading.current_thread().name == "hf_zero_stream-save" and not is_full.is_set():
            blocked.wait(30)
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(handle, buffers, position)

    monkeypatch.setattr(os, "pwritev", pwritev)
    disk = tmp_path / "shared"
    with HostStates(tmp_path / "own", copies=0, job="j") as states:
        hf_zero_stream.save_state(model, disk, optimizer=optimizer)
        step(model, optimizer)
        states.save(model, optimizer=optimizer)
        pending = hf_zero_stream.save_state(model, disk, optimizer=optimizer, asynchronous=True)
    assert on_hosts(tmp_path / "own") == ["00000002"]
    blocked.set()
    with pytest.raises(SaveError):
        pending.wait()
    assert on_hosts(tmp_path / "own") == ["00000002"] and (disk / "latest").read_text() == "global_step1"
    is_full.set()
    hf_zero_stream.save_state(model, disk, optimizer=optimizer, asynchronous=True).wait()
    assert on_hosts(tmp_path / "own") == []


def test_a_training_that_is_stopped_early(
    tmp_path: Path,
    trained: tuple[nn.Module, torch.optim.Optimizer],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The state on the hosts is ahead of that on the disk: it stays, and a save of weights is no state."""
    model, optimizer = trained
    logger = logging.getLogger("hf_zero_stream")
    monkeypatch.setattr(logger, "handlers", [*logger.handlers, caplog.handler])
    with HostStates(tmp_path / "own", copies=0, job="j") as states:
        for number in range(9):
            if number == 1:
                hf_zero_stream.save_state(model, tmp_path / "shared", optimizer=optimizer)
            if number == 3:
                break
            step(model, optimizer)
            states.save(model, optimizer=optimizer)
    assert on_hosts(tmp_path / "own") == ["00000004"] and "state of step 4 stays until" in caplog.text
    again, its_optimizer, _ = made(Start("a", kind="SGD"))
    with HostStates(tmp_path / "own", copies=0, job="j") as states:
        resumed = states.load(again, tmp_path / "shared", optimizer=its_optimizer)
        assert resumed is not None and resumed.counters["global_steps"] == 4
        step(again, its_optimizer)
        hf_zero_stream.save_state(again, tmp_path / "shared", optimizer=its_optimizer)
    assert on_hosts(tmp_path / "own") == []


def test_another_trainings_states_stay_at_the_end(
    tmp_path: Path, trained: tuple[nn.Module, torch.optim.Optimizer]
) -> None:
    """Trainings of one job name remove their own, each at its own end."""
    model, optimizer = trained
    HostStates(tmp_path / "own", copies=0, job="j").save(model, optimizer=optimizer)
    other, its_optimizer, _ = made(Start("a", lr=0.5))
    with HostStates(tmp_path / "own", copies=0, job="j") as states:
        assert states.load(other, optimizer=its_optimizer) is None
        step(other, its_optimizer)
        step(other, its_optimizer)
        states.save(other, optimizer=its_optimizer)
        hf_zero_stream.save_state(other, tmp_path / "shared", optimizer=its_optimizer)
        assert on_hosts(tmp_path / "own") == ["00000001", "00000002"] or on_hosts(tmp_path / "own")[::-1] == [
            "00000001",
            "00000002",
        ]
    assert on_hosts(tmp_path / "own") == ["00000001"]
    states.remove()
    assert list((tmp_path / "own").iterdir()) == []
