"""A sample of ``python -m tests.saving.crash``: saves that die, or whose disk fails, at their single steps."""

from pathlib import Path

import pytest

from tests.saving.crash import FAULTS, make_checkpoints, trial_of_two_ranks, trials_of_one_rank


Checkpoints = tuple[Path, Path, dict[str, bytes]]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return make_checkpoints(tmp_path_factory.mktemp("crash"))


@pytest.mark.parametrize(
    ("fault", "stride"),
    [
        pytest.param("killed", 1, marks=pytest.mark.slow),
        ("killed", 4),
        ("no space", 3),
        pytest.param("i/o error", 4, marks=pytest.mark.slow),
    ],
)
def test_one_rank(checkpoints: Checkpoints, fault: str, stride: int) -> None:
    old, checkpoint, new = checkpoints
    found = trials_of_one_rank(checkpoint, old, new, [fault], stride)
    # There are steps before anything has a final name, steps in between, and steps after.
    assert found.keys() >= {f"{fault}: old", f"{fault}: finished", f"{fault}: new"}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(("rank", "step"), [(0, 1), (0, 16), (0, 35), (1, 0), (1, 5)])
def test_one_of_two_ranks(cluster: None, checkpoints: Checkpoints, rank: int, step: int, fault: str) -> None:
    old, checkpoint, new = checkpoints
    assert trial_of_two_ranks(checkpoint, old, new, rank, step, fault).startswith(fault)
