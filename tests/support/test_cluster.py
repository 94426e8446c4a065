"""The harness must report what ranks do, and must never hang or leave processes behind."""

import os
import time

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.support.cluster import SOON_S, RankFailure, RankTimeout, run_ranks, run_ranks_expecting_errors


pytestmark = pytest.mark.usefixtures("cluster")


def rank_sum(start: torch.Tensor) -> tuple[int, torch.Tensor, str, int]:
    total = start + dist.get_rank()
    dist.all_reduce(total)
    return dist.get_rank(), total, os.environ["LOCAL_RANK"], os.getpid()


def raise_on_all(message: str) -> None:
    raise ValueError(message)


def raise_on_rank_one() -> str:
    if dist.get_rank() == 1:
        raise OSError("no such disk")
    time.sleep(60)
    return "unreachable"


def sleep_on_rank_one() -> None:
    if dist.get_rank() == 1:
        time.sleep(60)


def die_on_rank_one() -> None:
    if dist.get_rank() == 1:
        os._exit(7)


def return_a_lambda() -> object:
    return lambda: None


def environment_value(name: str) -> str | None:
    return os.environ.get(name)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_talk_to_each_other(world_size: int) -> None:
    results = run_ranks(world_size, rank_sum, torch.arange(3))
    expected = world_size * torch.arange(3) + sum(range(world_size))
    for rank, (reported, total, local_rank, pid) in enumerate(results):
        assert reported == rank and local_rank == str(rank)
        assert torch.equal(total, expected)
        assert not psutil.pid_exists(pid)


def test_every_traceback_is_reported() -> None:
    with pytest.raises(RankFailure) as info:
        run_ranks(2, raise_on_all, "bad checkpoint")
    text = str(info.value)
    assert "rank 0: ValueError: bad checkpoint" in text and "rank 1: ValueError: bad checkpoint" in text
    assert text.count("in raise_on_all") == 2


def test_expected_errors_are_outcomes() -> None:
    outcomes = run_ranks_expecting_errors(2, raise_on_all, "bad checkpoint")
    assert [(o.error_type, o.error_message) for o in outcomes] == [("ValueError", "bad checkpoint")] * 2
    assert all(o.seconds < SOON_S for o in outcomes)


def test_ranks_left_behind_by_a_failure_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.cluster.GRACE_SECONDS", 0.5)
    start = time.monotonic()
    with pytest.raises(RankFailure, match=r"rank\(s\) \[0\] still running") as info:
        run_ranks(2, raise_on_rank_one)
    assert time.monotonic() - start < 20
    assert info.value.outcomes[1].error_message == "no such disk"


def test_time_out_names_the_ranks_and_shows_their_stacks() -> None:
    with pytest.raises(RankTimeout, match=r"rank\(s\) \[1\] no end after 8 s") as info:
        run_ranks(2, sleep_on_rank_one, timeout=8)
    assert "sleep_on_rank_one" in info.value.outcomes[1].traceback
    assert info.value.outcomes[0].error_type is None


def test_death_without_a_result() -> None:
    outcome = run_ranks_expecting_errors(2, die_on_rank_one)[1]
    assert outcome.error_type == "Died" and "exit code 7" in outcome.error_message


def test_results_that_cannot_travel_are_errors() -> None:
    with pytest.raises(RankFailure, match="pickle"):
        run_ranks(1, return_a_lambda)


def test_environment_of_the_moment_reaches_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HZS_TEST_VALUE", "here")
    assert run_ranks(1, environment_value, "HZS_TEST_VALUE") == ["here"]
