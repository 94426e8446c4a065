"""A sample of ``python -m tests.crash_state``: saves of training states that die, or whose disk fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash_state import make_states, trial_of_two_ranks, trials_of_one_rank


@pytest.mark.parametrize(
    ("way", "fault", "stride"),
    [("waited", "killed", 5), ("background", "killed", 5), ("background", "no space", 11)],
)
def test_one_rank(tmp_path: Path, way: str, fault: str, stride: int) -> None:
    found = trials_of_one_rank(tmp_path, way, [fault], stride)
    assert found.keys() >= {f"{fault}: old", f"{fault}: new"}


@pytest.fixture(scope="module")
def states(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_states(tmp_path_factory.mktemp("states"))


@pytest.mark.parametrize(
    ("way", "rank", "step", "fault"),
    [
        ("waited", 1, 5, "killed"),
        ("background", 0, 40, "killed"),
        ("background", 1, 5, "killed"),
        ("background", 1, 9, "i/o error"),
    ],
)
def test_one_of_two_ranks(states: Path, way: str, rank: int, step: int, fault: str) -> None:
    assert trial_of_two_ranks(states, rank, step, fault, way).startswith(f"{way}, {fault}")
