"""What becomes of a training if a release renames a function that we replace, or no longer calls it.

A training saves its state, and another one goes on from there: either there is an error, or both have the losses that
they have as they are; never others. Which functions loads need is seen in test_mutated_bindings.py.
"""

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.autoep.test_expert_parallel import expert_parallel
from tests.autoep.test_expert_parallel import losses as losses_of_experts
from tests.drift import smoke
from tests.state.test_trainer import train
from tests.support.changed_models import resume_changed
from tests.support.cluster import run_ranks
from tests.support.mutations import Mutation, mutated, mutations
from tests.support.training_state import TrainerRun
from tests.support.zoo import Checkpoint


OF_TRAINER = ("transformers.trainer:", "transformers.modeling_utils:", "accelerate.")


def losses_of_trainer(folder: Path, output: Path, run: TrainerRun) -> list[float]:
    found = train(folder, output, run)
    return [*found["losses"], found["at the end"]]


def train_twice(
    mutation: Mutation | None, folder: Path, output: Path, *, zero: bool
) -> tuple[list[float] | str, list[float] | str]:
    """Six steps; and the last two again, from the checkpoint before them, in new processes."""
    whole, _ = run_ranks(2, mutated, mutation, losses_of_trainer, folder, output, TrainerRun(zero=zero))
    if isinstance(whole, str):
        return whole, ""
    for checkpoint in output.glob("checkpoint-6*"):
        shutil.rmtree(checkpoint)
    again = TrainerRun(resume=True, zero=zero)  # type: ignore[arg-type]
    return whole, run_ranks(2, mutated, mutation, losses_of_trainer, folder, output, again)[0]


@pytest.fixture(scope="module")
def expected(
    cluster: None, zoo_checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[bool], list[float]]:
    """The losses of the Trainer as it is, by whether it is under ZeRO-3."""
    found: dict[bool, list[float]] = {}

    def losses(zero: bool) -> list[float]:
        if zero not in found:
            whole, again = train_twice(None, zoo_checkpoint("llama"), tmp_path_factory.mktemp("plain"), zero=zero)
            assert isinstance(whole, list) and whole == again
            found[zero] = whole
        return found[zero]

    return losses


@pytest.mark.parametrize("mutation", mutations((*OF_TRAINER, "deepspeed.runtime."), "BLOCK", "MODELS", "SAVE"))
def test_trainer_under_zero_3(
    expected: Callable[[bool], list[float]], zoo_checkpoint: Checkpoint, tmp_path: Path, mutation: Mutation
) -> None:
    outcomes = train_twice(mutation, zoo_checkpoint("llama"), tmp_path, zero=True)
    assert all(isinstance(each, str) or each == expected(True) for each in outcomes), outcomes


@pytest.mark.parametrize(
    "mutation",
    mutations((*OF_TRAINER, "torch."), "BLOCK", "MODELS", "SAVE", "DEFERRED"),
)
def test_trainer_under_fsdp2(
    expected: Callable[[bool], list[float]], zoo_checkpoint: Checkpoint, tmp_path: Path, mutation: Mutation
) -> None:
    outcomes = train_twice(mutation, zoo_checkpoint("llama"), tmp_path, zero=False)
    assert all(isinstance(each, str) or each == expected(False) for each in outcomes), outcomes


@pytest.mark.parametrize("home", ["ZeRO-3", "ZeRO-2"])
@pytest.mark.parametrize("mutation", mutations(("deepspeed.runtime.", "deepspeed.accelerator:"), "BLOCK", "FLAT"))
def test_engine(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, home: str, mutation: Mutation) -> None:
    how, folder = smoke.HOMES[home], zoo_checkpoint("qwen3_moe")
    outcome, _ = run_ranks(2, mutated, mutation, smoke.train_and_save, folder, tmp_path, *how)
    if isinstance(outcome, str):
        return
    what, losses = outcome
    assert what == "right" and smoke.wrongly_saved(tmp_path) == []
    again, _ = run_ranks(2, mutated, mutation, resume_changed, folder, tmp_path, *how, ["none"])
    assert isinstance(again, str) or again == {"none": {"losses": losses, "wrong": []}}, (again, losses)


@pytest.mark.plugin("autoep")
@pytest.mark.parametrize("mutation", mutations(("deepspeed.module_inject.",), "EXPERTS"))
def test_expert_parallelism(of_experts: Callable[..., Any], mutation: Mutation) -> None:
    expected, outcome = of_experts(None), of_experts(mutation)
    assert isinstance(expected, list) and (isinstance(outcome, str) or outcome == expected), outcome


@pytest.fixture(scope="module")
def of_experts(cluster: None, zoo_checkpoint: Checkpoint) -> Callable[..., Any]:
    """What a training gives under a mutation; without one it runs once."""
    how = losses_of_experts, zoo_checkpoint("deepseek_v3"), expert_parallel(), "streaming", {}
    return functools.cache(lambda mutation: run_ranks(2, mutated, mutation, *how)[0])
