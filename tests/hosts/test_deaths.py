"""A host is killed at a random moment, also inside a save: two go on from a whole state, bit for bit."""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import hf_zero_stream
from hf_zero_stream import HostStates
from tests.support.cluster import run_ranks, run_ranks_expecting_errors
from tests.support.hosts import can_mount
from tests.support.saving import different
from tests.support.simulated_hosts import join_host
from tests.support.training_state import engine_of, state_config, train, two_groups


pytestmark = pytest.mark.skipif(not can_mount(), reason="mounting in a namespace of its own is not allowed here")

STEPS = 60


def train_until(checkpoint: Path, work: Path, victim: int, dies_after_s: float, asynchronous: bool) -> None:
    """Save after each step, on a shared disk and then on hosts; the process of the `victim` is killed some time."""
    join_host("abc", work / "memories", work / "memory")
    engine = engine_of(checkpoint, state_config(3), two_groups)
    states = HostStates(work / "memory", job="job")
    for step in range(STEPS):
        train(engine, [step])
        shared = work / "shared" / str(step + 1)
        hf_zero_stream.save_state(engine, shared)
        states.save(engine, data={"step": step + 1}, asynchronous=asynchronous)
        if step == 0 and dist.get_rank() == victim:
            threading.Timer(dies_after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()


def go_on(checkpoint: Path, work: Path, hosts: Sequence[str]) -> dict[str, Any]:
    """The step that hosts have, and losses of two more; and from the shared disk."""
    join_host(hosts, work / "memories", work / "memory")
    found: dict[str, Any] = {}
    for name in ("hosts", "shared"):
        engine = engine_of(checkpoint, state_config(3), two_groups)
        states = HostStates(work / "memory", job="job")
        if name == "hosts":
            resumed = states.load(engine)
            assert resumed is not None
            found["step"] = engine.global_steps
            assert resumed.data == {"step": found["step"]}
        else:
            hf_zero_stream.load_state(engine, work / "shared" / str(found["step"]))
        found[name] = train(engine, range(found["step"], found["step"] + 2))
        hf_zero_stream.save_state(engine, work / f"again {name}")
    states.save(engine)  # which removes what the death has left
    found["left"] = sorted(path.name for path in states.folder.iterdir())
    dist.barrier()
    states.remove()
    found["in the end"] = [path.name for path in (work / "memory").iterdir()]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("number", range(20))
@pytest.mark.parametrize("asynchronous", [False, True])
def test_killed_at_any_moment(
    cluster: None, zoo_checkpoint: Callable[..., Path], tmp_path: Path, number: int, asynchronous: bool
) -> None:
    (tmp_path / "memory").mkdir()
    checkpoint, victim = zoo_checkpoint("llama"), number % 3
    dies_after_s = random.uniform(0, 4)
    outcomes = run_ranks_expecting_errors(3, train_until, checkpoint, tmp_path, victim, dies_after_s, asynchronous)
    assert outcomes[victim].error_type == "Died", outcomes
    shutil.rmtree(tmp_path / "memories" / "abc"[victim])
    rest = "abc".replace("abc"[victim], "")
    for found in run_ranks(2, go_on, checkpoint, tmp_path, rest):
        # Of the step that was being made, or of the one before.
        last = max(int(path.name) for path in (tmp_path / "shared").iterdir() if (path / "latest").exists())
        assert found["step"] in (last, last - 1), found
        assert found["hosts"] == found["shared"]
        assert len(found["left"]) == 1 and found["in the end"] == [], found
    assert different(tmp_path / "again hosts", tmp_path / "again shared") == []
