"""The GPU day, on paper GPUs; on a real one it is `python -m scripts.gpu`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.gpu.__main__ import ROOT, table
from scripts.gpu.steps import COMMANDS


SITE = ROOT / "tests" / "paper_gpu" / "site"

SAMPLE = {"correctness": "lanes,marked,ZeRO-3,ZeRO-3 resumed,plan", "ranks": "killed", "speed": "pinned copies"}


def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "scripts.gpu", *words],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=600,
    )


def day(folder: Path, command: str, only: str, gpus: int) -> list[dict[str, Any]]:
    """What a command has found on paper GPUs."""
    path = os.pathsep.join([str(SITE), str(ROOT)])
    done = run(
        *(command, str(folder), "--gigabytes=0.02", f"--only={only}"),
        **{"PYTHONPATH": path, "PAPER_GPUS": str(gpus), "CUDA_VISIBLE_DEVICES": "0,1"[: 2 * gpus - 1]},
    )
    found: list[dict[str, Any]] = json.loads((folder / f"{command}.json").read_text())
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    return found


def test_without_cuda_it_says_so(tmp_path: Path) -> None:
    done = run("correctness", str(tmp_path), CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1 and done.stdout == ""
    assert "needs a machine with an NVIDIA GPU" in done.stderr and "Nothing was run" in done.stderr


def test_table() -> None:
    results = [{"step": "a", "ok": True, "figures": {"seconds": 3}}, {"step": "b", "ok": False, "error": "x\nWhy"}]
    assert [*table("speed", results)][-2:] == ["| a | ok | seconds 3 |", "| b | FAIL | Why |"]


@pytest.mark.usefixtures("paper_gpus")
class TestOnPaper:
    @pytest.mark.slow
    @pytest.mark.parametrize("command", COMMANDS)
    def test_sample(self, tmp_path: Path, command: str) -> None:
        """Two ranks on one GPU first find a way to talk."""
        found = day(tmp_path, command, SAMPLE[command], gpus=1)
        assert [result["step"] for result in found][-1] == SAMPLE[command].split(",")[-1]

    @pytest.mark.slow
    @pytest.mark.parametrize("command", COMMANDS)
    def test_whole_command(self, tmp_path: Path, command: str) -> None:
        found = day(tmp_path, command, "", gpus=2)
        assert [result["step"] for result in found] == [*COMMANDS[command]]

    @pytest.mark.slow
    def test_a_step_that_fails_does_not_end_the_day(self, tmp_path: Path) -> None:
        """It is told what was found, and the next step begins in a new process."""
        with pytest.raises(AssertionError, match="KeyError|TypeError"):
            day(tmp_path, "correctness", "no such step,lanes", gpus=1)
        first, second = json.loads((tmp_path / "correctness.json").read_text())
        assert (first["ok"], second["ok"], second["step"]) == (False, True, "lanes")
