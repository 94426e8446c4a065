"""`python -m examples.demo` as a newcomer runs it."""

import subprocess
import sys

import pytest

from examples import demo
from tests.cluster import ROOT
from tests.commands import command_environment


@pytest.fixture(scope="module")
def output(compiler: None) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "examples.demo"],
        cwd=ROOT,
        env=command_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.mark.slow
def test_every_check_passes(output: str) -> None:
    checks = [line for line in output.splitlines() if line.startswith("✓ ")]
    assert len(checks) == 8 and "✗" not in output
    assert "✓ 47 of 47 parameters equal plain from_pretrained, bit for bit" in checks
    assert "✓ 3 training steps: losses equal stock's, to the last bit" in checks
    assert "✓ cosine similarities equal those of plain transformers" in checks


@pytest.mark.slow
def test_shows_tables_and_nothing_else(output: str) -> None:
    assert output.count("STREAMING LOAD REPORT (2 ranks") == 1
    assert "from_pretrained, slower rank" in output and "cosine similarity" in output
    for noise in ("Warning", "WARNING", "INFO", "it/s", "Loading"):
        assert noise not in output


def test_a_failed_check_is_seen() -> None:
    rank = {"bytes_read": 50, "bytes_needed": 50}
    good = {"different": [], "losses": [2.0, 1.0], "growth": [50, 50], "report": {"ranks": [rank, rank]}}
    stock = {**good, "growth": [99, 99]}
    assert all(passed for passed, _ in demo.moe_checks(7, 100, good, stock))
    for bad in (
        {"different": ["lm_head.weight"]},
        {"losses": [2.0, 1.1]},
        {"growth": [50, 100]},
        {"report": {"ranks": [{"bytes_read": 100, "bytes_needed": 50}, rank]}},
    ):
        assert not all(passed for passed, _ in demo.moe_checks(7, 100, {**good, **bad}, stock))

    same = {"difference": 0.0, "similarities": [("near", 0.8, 0.8), ("far", 0.1, 0.1)]}
    assert all(passed for passed, _ in demo.embedding_checks(same))
    assert not all(passed for passed, _ in demo.embedding_checks({**same, "difference": 1e-3}))
    assert not all(passed for passed, _ in demo.embedding_checks({**same, "similarities": same["similarities"][::-1]}))
