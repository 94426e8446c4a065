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
from hf_zero_stream import HostStates, StreamingConfig
from tests.state.test_fsdp2_hooks import trainer_of
from tests.support.cluster import run_ranks, run_ranks_expecting_errors
from tests.support.hosts import can_mount
from tests.support.saving import different
from tests.support.simulated_hosts import join_host
from tests.support.training_state import TrainerRun


pytestmark = pytest.mark.skipif(not can_mount(), reason="mounting in a namespace of its own is not allowed here")

Checkpoint = Callable[..., Path]
STOP, STEPS = 4, 6


class Ends(transformers.TrainerCallback):
    """Ends this process, or the training, at the beginning of a step."""

    def __init__(self, step: int, dies: bool) -> None:
        self.step, self.dies = step, dies

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step and self.dies:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= state.global_step == self.step and not self.dies


def train(
    checkpoint: Path,
    work: Path,
    hosts: Sequence[str],
    run: TrainerRun,
    by_settings: bool,
    output: str,
    stop: int,
    victim: int = -1,
) -> dict[str, Any]:
    """Go on from the newest state, by one rank on each of `hosts`, up to step `stop`, where rank `victim` dies.

    `by_settings`, the first start has nothing to go on from, and `victim` tells it.
    """
    import torch.distributed as dist

    folder = work / "memory"
    join_host(hosts, work / "memories", folder)
    config = StreamingConfig(host_states_every=int(by_settings), host_states_folder=str(folder))
    with hf_zero_stream.streaming(config):
        trainer, taken = trainer_of(checkpoint, work / output, run)
        trainer.args.save_steps = trainer.args.save_total_limit = 1  # of the disk; one state stays on hosts, too
        trainer.args.remove_unused_columns = False
        if victim < 0 or victim == dist.get_rank():
            trainer.add_callback(Ends(stop, dies=victim >= 0))
        resumed: Any = victim < 0 if by_settings else HostStates(folder, job=output).attach(trainer, every=1)
        restore, loaded = trainer._load_rng_state, [""]
        trainer._load_rng_state = lambda checkpoint: (loaded.append(checkpoint), restore(checkpoint))
        trainer.train(resume_from_checkpoint=resumed)
        trainer.save_model(str(work / f"{output} at step {stop}"))
    return {
        "resumed": loaded[-1],
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "taken": taken,
        "left": [path.name for path in folder.rglob("state-*")],
    }


@pytest.mark.plugin("relay")
@pytest.mark.parametrize("zero", [True, False], ids=["ZeRO-3", "FSDP2"])
@pytest.mark.parametrize("by_settings", [True, False])
def test_a_host_is_killed(
    cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, zero: bool, by_settings: bool
) -> None:
    """The two that are left go on, then a third one comes back: as from a shared disk, of which nothing is there."""
    (tmp_path / "memory").mkdir()
    checkpoint, run = zoo_checkpoint("llama"), TrainerRun(zero=zero)
    victim, step = random.randrange(3), random.randrange(1, STOP)
    outcomes = run_ranks_expecting_errors(
        3, train, checkpoint, tmp_path, "abc", run, by_settings, "hosts", step, victim
    )
    assert outcomes[victim].error_type == "Died", outcomes
    shutil.rmtree(tmp_path / "memories" / "abc"[victim])
    shutil.copytree(tmp_path / "hosts" / f"checkpoint-{step}", tmp_path / "shared" / f"checkpoint-{step}")

    rest, found = "abc".replace("abc"[victim], ""), {}
    for hosts, stop in ((rest, STOP), ("abc", STEPS)):
        shutil.rmtree(tmp_path / "hosts")
        for output in ("hosts", "shared"):
            found[output] = run_ranks(len(hosts), train, checkpoint, tmp_path, hosts, run, by_settings, output, stop)
            for memory in (tmp_path / "memories").iterdir():  # the shared disk alone is to be gone on from there
                for left in memory.glob("hf_zero_stream-shared*"):
                    shutil.rmtree(left)
        for of_hosts, of_shared in zip(found["hosts"], found["shared"], strict=True):
            place = Path(of_hosts["resumed"]).relative_to(tmp_path / "memory")
            assert place.parts[0].startswith("hf_zero_stream-hosts") and place.name.startswith("state-")
            assert of_shared["resumed"].startswith(str(tmp_path / "shared" / "checkpoint-"))
            assert (of_hosts["losses"], of_hosts["taken"]) == (of_shared["losses"], of_shared["taken"])
            assert bool(of_hosts["left"]) == (stop < STEPS)
        names = different(*(tmp_path / f"{output} at step {stop}" for output in ("hosts", "shared")))
        assert set(names) <= {"training_args.bin"}
    assert len(found["hosts"][0]["losses"]) == STEPS


# --------------------------------------------------------------------------------- which is newer, and when they go


def go_on(checkpoint: Path, work: Path, run: TrainerRun, stop: int, saves: str) -> dict[str, Any]:
    """Train from the newest state to step `stop`; the steps of the states on hosts then, and behind the result."""
    config = StreamingConfig(host_states_folder=str(work / "memory"), asynchronous_save=saves == "steps")
    with hf_zero_stream.streaming(config):
        trainer, _ = trainer_of(checkpoint, work / "output", run)
        trainer.args.save_steps, trainer.args.save_strategy, trainer.args.remove_unused_columns = 4, saves, False
        trainer.add_callback(Ends(stop, dies=False))
        states = HostStates(work / "memory", copies=0, job="job")
        newest = states.attach(trainer, every=1)
        trainer.train(resume_from_checkpoint=newest)
        trained = on_hosts(work)
        trainer.save_model(str(work / "result"))
    return {"newest": newest and Path(newest).name, "trained": trained, "left": on_hosts(work)}


def on_hosts(work: Path) -> list[int]:
    """Their steps. A folder may go while this looks: ``os.walk`` goes on."""
    names = [name for _, folders, _ in os.walk(work / "memory") for name in folders]
    return sorted(int(name.split("-")[1]) for name in names if name.startswith("state-"))


@pytest.mark.parametrize("zero", [True, False], ids=["ZeRO-3", "FSDP2"])
def test_states_stay_until_the_result_is_saved(
    cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, zero: bool
) -> None:
    """Also of an optimizer that counts no steps: the state of step 5 is newer than the checkpoint of step 4."""
    (tmp_path / "memory").mkdir()
    checkpoint, run = zoo_checkpoint("llama"), TrainerRun(zero=zero, arguments={} if zero else {"optim": "sgd"})
    for found in run_ranks(2, go_on, checkpoint, tmp_path, run, 5, "steps"):
        assert found == {"newest": None, "trained": [5], "left": [5]}
    for found in run_ranks(2, go_on, checkpoint, tmp_path, run, 6, "no"):
        assert found["newest"].startswith("state-00000005-")
        assert (found["trained"], found["left"]) == ([6], [])


def test_states_go_with_the_last_checkpoint(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """One in the background, which is whole when ``train()`` returns."""
    (tmp_path / "memory").mkdir()
    found = run_ranks(2, go_on, zoo_checkpoint("llama"), tmp_path, TrainerRun(), 6, "steps")
    assert found == [{"newest": None, "trained": [], "left": []}] * 2
