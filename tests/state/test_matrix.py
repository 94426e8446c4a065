"""What is saved can be resumed: whatever was changed in a model, in each home, by whom and at whatever size."""

import shutil
from pathlib import Path

import pytest

from tests import sampling
from tests.support.changed_models import CHANGES, by_trainer, is_in_bf16, resume_changed, save_changed
from tests.support.cluster import run_ranks
from tests.support.quantised_checkpoints import dense_fp8
from tests.support.zoo import Checkpoint


HOMES = {
    "zero3": ("engine", "save_state", "accelerate"),
    "zero2": ("engine", "save_state", "accelerate"),
    "fsdp2": ("save_state", "accelerate"),
    "distributed_config": ("save_state",),
}
COMPILED = ("compiled", "both")

ROWS = [
    pytest.param(home, saver, marks=[] if (home, saver) == ("zero3", "engine") else [pytest.mark.slow])
    for home, savers in HOMES.items()
    for saver in savers
]


def changes_in(home: str) -> list[str]:
    """DeepSpeed itself cannot train compiled blocks at stage 3: ``'dict' object has no attribute '_in_forward'``."""
    return sampling.every(4, [change for change in CHANGES if home != "zero3" or change not in COMPILED])


def tolerance(home: str, change: str) -> float:
    """Of losses at another number of ranks, which add up gradients in another order."""
    return 2e-3 if is_in_bf16(home, change) else 1e-4


@pytest.fixture
def checkpoint(zoo_checkpoint: Checkpoint, tmp_path: Path) -> Path:
    shutil.copytree(zoo_checkpoint("llama"), tmp_path / "checkpoint")
    dense_fp8(tmp_path / "checkpoint" / "fp8")
    return tmp_path / "checkpoint"


@pytest.mark.sample(len(ROWS))
@pytest.mark.parametrize(("home", "saver"), ROWS)
def test_resumed(cluster: None, checkpoint: Path, tmp_path: Path, home: str, saver: str) -> None:
    """The same losses as of a training that never stopped; all values come back, also at another number of ranks."""
    folder, changes = checkpoint, changes_in(home)
    saved = run_ranks(2, save_changed, folder, tmp_path, home, saver, changes, timeout=400)[0]
    assert {change: found["wrong"] for change, found in saved.items() if found["wrong"]} == {}
    resumed = run_ranks(2, resume_changed, folder, tmp_path, home, saver, changes, timeout=400)[0]
    assert resumed == saved
    others = run_ranks(3, resume_changed, folder, tmp_path, home, saver, changes, timeout=400)[0]
    for change, found in others.items():
        assert found["wrong"] == [], change
        assert found["losses"] == pytest.approx(saved[change]["losses"], rel=tolerance(home, change)), change


@pytest.mark.slow
@pytest.mark.parametrize("home", ["zero3", "zero2", "fsdp2"])
def test_resumed_by_the_trainer(cluster: None, checkpoint: Path, tmp_path: Path, home: str) -> None:
    folder = checkpoint
    changes = [change for change in changes_in(home) if change not in COMPILED]  # the Trainer compiles by itself
    whole = run_ranks(2, by_trainer, folder, tmp_path, home, changes, False, timeout=400)[0]
    assert run_ranks(2, by_trainer, folder, tmp_path, home, changes, True, timeout=400)[0] == whole
    others = run_ranks(3, by_trainer, folder, tmp_path, home, changes, True, timeout=400)[0]
    for change, losses in others.items():
        assert losses[2:] == pytest.approx(whole[change][2:], rel=tolerance(home, change)), change
