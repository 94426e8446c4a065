"""The GPU day, on paper GPUs; on a real one it is `python -m scripts.gpu`."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.gpu.__main__ import MINUTES, ROOT, line, table
from scripts.gpu.calls import CALLS


SITE = ROOT / "tests" / "paper_gpu" / "site"

SAMPLE = {
    "a": "facts,bus,files,lanes,FSDP2",
    "b": "pinned copies,plan",
    "c": "first load",
}


def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "scripts.gpu", *words],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=900,
    )


def day(folder: Path, call: str, only: str, *words: str) -> tuple[int, list[dict[str, Any]], str]:
    """The exit code of a call on one paper GPU, what it has found, and what it has printed."""
    path = os.pathsep.join([str(SITE), str(ROOT)])
    done = run(
        *(call, str(folder), "--gigabytes=0.02", f"--only={only}", "--jobs=2", "--minutes=14", *words),
        **{"PYTHONPATH": path, "PAPER_GPUS": "1", "CUDA_VISIBLE_DEVICES": "0"},
    )
    lines = (folder / f"{call}.jsonl").read_text().splitlines()
    return done.returncode, [json.loads(each) for each in lines], f"{done.stdout}{done.stderr}"


def test_without_cuda_it_says_so(tmp_path: Path) -> None:
    done = run("a", str(tmp_path), CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1 and done.stdout == ""
    assert "needs a machine with an NVIDIA GPU" in done.stderr and "Nothing was run" in done.stderr


def test_lines() -> None:
    good = {"group": "g", "step": "a", "ok": True, "seconds": 2.0, "figures": {"GB/s": 3}}
    bad = {"group": "g", "step": "b", "ok": False, "rank": 1, "figures": {}, "error": "x\nWhy"}
    assert line(good) == "ok   g: a (2 s): GB/s 3" and line(bad) == "FAIL g: b on rank 1: \nx\nWhy"
    assert [*table("a", [good, bad])][-2:] == ["| g | a | ok | GB/s 3 |", "| g | b | FAIL | Why |"]


def test_calls_fit_the_day() -> None:
    """Fifteen minutes, with two starts of a machine; groups that time something come first."""
    assert MINUTES["a"] + MINUTES["b"] <= 11.5 and MINUTES["c"] <= 11.5
    for groups in CALLS.values():
        assert len({group.name for group in groups}) == len(groups)
        assert [group.alone for group in groups] == sorted((group.alone for group in groups), reverse=True)


@pytest.mark.usefixtures("paper_gpus")
class TestOnPaper:
    @pytest.mark.plugin("forecast")
    @pytest.mark.parametrize("call", [pytest.param(call, marks=[pytest.mark.slow] * (call != "a")) for call in CALLS])
    def test_sample(self, tmp_path: Path, call: str) -> None:
        code, found, printed = day(tmp_path, call, SAMPLE[call])
        assert code == 0 and {each["step"] for each in found} == set(SAMPLE[call].split(",")), printed
        assert not list(tmp_path.glob("*.safetensors")) and len(list(tmp_path.iterdir())) == 1
        for figures in (each["figures"] for each in found if each["step"] == "first load"):
            assert list(figures["phases"]["threads"]) == ["buffer", "read", "submit"]

    @pytest.mark.slow
    @pytest.mark.parametrize("call", CALLS)
    def test_whole_call(self, tmp_path: Path, call: str) -> None:
        code, found, printed = day(tmp_path, call, "")
        assert code == 0, printed
        assert [len(group.steps) for group in CALLS[call]] == [
            sum(each["group"] == group.name for each in found) for group in CALLS[call]
        ]

    def test_what_a_cut_leaves(self, tmp_path: Path) -> None:
        """Every step that was not reached is named, and what was found before stays."""
        code, found, _ = day(tmp_path, "a", "facts,lanes", "--minutes=0.001")
        assert code == 1 and [each["ok"] for each in found] == [False, False]
        assert all("no time was left" in each["error"] for each in found)
