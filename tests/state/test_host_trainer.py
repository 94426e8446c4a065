"""The Trainer with states on hosts: a host is killed, others go on with the bits of a resume from a shared disk."""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import transformers

import hf_zero_stream
from hf_zero_stream import HostStates
from tests.state.test_fsdp2_hooks import trainer_of
from tests.support.cluster import run_ranks, run_ranks_expecting_errors
from tests.support.hosts import can_mount
from tests.support.saving import different
from tests.support.simulated_hosts import join_host
from tests.support.training_state import TrainerRun


pytestmark = pytest.mark.skipif(not can_mount(), reason="mounting in a namespace of its own is not allowed here")

Checkpoint = Callable[..., Path]
STEPS = 6


class Death(transformers.TrainerCallback):
    """Kills this process at the beginning of a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def train(
    checkpoint: Path, work: Path, hosts: Sequence[str], run: TrainerRun, output: str, dies: tuple[int, int] = (-1, 0)
) -> dict[str, Any]:
    """Go on from the newest state, by a job of one rank on each of `hosts`; (a rank, a step): that one dies there."""
    import torch.distributed as dist

    folder = work / "memory"
    join_host(hosts, work / "memories", folder)
    with hf_zero_stream.streaming():
        trainer, taken = trainer_of(checkpoint, work / output, run)
        trainer.args.save_steps, trainer.args.remove_unused_columns = 1, False
        states = HostStates(folder, job="job")
        if dist.get_rank() == dies[0]:
            trainer.add_callback(Death(dies[1]))
        resumed = states.attach(trainer, every=1)
        trainer.train(resume_from_checkpoint=resumed)
        trainer.save_model(str(work / f"{output} in the end"))
    return {
        "resumed": resumed,
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "taken": taken,
        "left": [path.name for path in folder.iterdir()],
    }


@pytest.mark.parametrize("zero", [True, False], ids=["ZeRO-3", "FSDP2"])
def test_a_host_is_killed(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, zero: bool) -> None:
    (tmp_path / "memory").mkdir()
    folder = zoo_checkpoint("llama")
    run = TrainerRun(zero=zero)
    victim, step = random.randrange(3), random.randrange(2, STEPS - 1)
    outcomes = run_ranks_expecting_errors(3, train, folder, tmp_path, "abc", run, "first", (victim, step))
    assert outcomes[victim].error_type == "Died", outcomes
    shutil.rmtree(tmp_path / "memories" / "abc"[victim])
    # Of the same step, on the shared disk.
    shutil.copytree(tmp_path / "first" / f"checkpoint-{step}", tmp_path / "shared" / f"checkpoint-{step}")
    shutil.rmtree(tmp_path / "first")  # so that nothing can be read there

    rest = "abc".replace("abc"[victim], "")
    found = run_ranks(2, train, folder, tmp_path, rest, run, "first")
    for of_rank in found:
        assert str(of_rank["resumed"]).startswith(str(tmp_path / "memory" / "hf_zero_stream-job" / "state-")), of_rank
        assert of_rank["left"] == []
    expected = run_ranks(2, train, folder, tmp_path, rest, run, "shared")
    assert expected[0]["resumed"] == str(tmp_path / "shared" / f"checkpoint-{step}")
    assert [each["losses"] for each in found] == [each["losses"] for each in expected]
    assert [each["taken"] for each in found] == [each["taken"] for each in expected]
    assert different(tmp_path / "first in the end", tmp_path / "shared in the end") in ([], ["training_args.bin"])
