"""The benchmark runs, its figures are complete, and its checkpoints are what they say."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import bench, checkpoints, fio, save
from benchmarks.figures import same_bits, summarise
from tests.support.cluster import run_ranks
from tests.support.parity import compare


ARMS = ["stock", "ours", "raw", "slices"]

needs_fio = pytest.mark.skipif(not fio.is_installed(), reason="fio is not installed")


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(checkpoints, "CACHE", tmp_path / "checkpoints")
    return tmp_path


@pytest.mark.usefixtures("compiler")
@pytest.mark.slow
def test_bench_measures_every_arm(tmp_path: Path) -> None:
    results_file = tmp_path / "results.json"
    arguments = "--gigabytes 0.02 --repeats 1 --worlds 2 --cache warm --timeout 200".split()

    assert bench.main([*arguments, "--arms", ",".join(ARMS), "--json", str(results_file)]) == 0

    results = json.loads(results_file.read_text())
    assert str(Path.cwd()) not in results_file.read_text()
    assert [entry["arm"] for entry in results["summary"]] == ARMS
    assert results["touches_memory"] is True
    assert results["same_bits"] is True
    total = results["checkpoint"]["nbytes"]
    for run in results["runs"]:
        assert sum(rank["owned_bytes"] for rank in run["ranks"]) == pytest.approx(total, rel=0.05)
        assert all(rank["seconds"] > 0 for rank in run["ranks"])
    ours = next(run for run in results["runs"] if run["arm"] == "ours")
    assert sum(rank["report"]["bytes_read"] for rank in ours["ranks"]) == pytest.approx(total, rel=0.05)
    for rank in ours["ranks"]:
        assert rank["rchar_bytes"] >= rank["report"]["bytes_read"]


@pytest.mark.parametrize("is_installed", [False, pytest.param(True, marks=needs_fio)])
def test_the_rate_of_the_disk(
    is_installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fio, "is_installed", lambda: is_installed)

    def no_load(*args: Any) -> dict[str, Any]:
        return {"arm": "raw", "world_size": 2, "cache": "cold", "repeat": args[-1], "error": "left out"}

    monkeypatch.setattr(bench, "_run_one", no_load)
    results_file = tmp_path / "results.json"
    arguments = f"--gigabytes 0.02 --repeats 2 --cache cold --arms raw --json {results_file}"
    bench.main(arguments.split())
    seconds = json.loads(results_file.read_text())["fio_seconds"]
    printed = " ".join(capsys.readouterr().out.split())
    if is_installed:
        assert len(seconds) == 2 and all(0 < each < 60 for each in seconds)
        assert "MB/s" in printed and "32 requests of 2 MiB in flight" in printed
    else:
        assert seconds == [] and "fio is not installed (Debian and Ubuntu: apt-get install fio)" in printed


@pytest.mark.usefixtures("compiler")
@pytest.mark.slow
def test_memory_is_left_untouched_on_request(tmp_path: Path) -> None:
    arguments = "--gigabytes 0.02 --repeats 1 --cache warm --timeout 200 --arms raw --untouched".split()
    assert bench.main([*arguments, "--json", str(tmp_path / "results.json")]) == 0
    assert json.loads((tmp_path / "results.json").read_text())["touches_memory"] is False


@pytest.mark.usefixtures("compiler")
@pytest.mark.slow
def test_saving_is_measured_for_every_arm(tmp_path: Path) -> None:
    results_file = tmp_path / "save.json"
    assert save.main(["--gigabytes", "0.02", "--repeats", "1", "--json", str(results_file)]) == 0
    results = json.loads(results_file.read_text())["2"]
    assert results.keys() == {"stock", "ours", "raw"}
    for runs in results.values():
        assert all(run["seconds"] >= run["until_written"] > 0 for run in runs)


@pytest.mark.parametrize("kind", checkpoints.KINDS)
@pytest.mark.parametrize("fp32", [False, True])
def test_checkpoints_have_the_size_asked_for_and_are_kept(kind: str, fp32: bool) -> None:
    gigabytes = 0.2 if fp32 else 0.1  # the same geometry: widths come in steps, and small ones miss by more
    made = checkpoints.cached_checkpoint(kind, gigabytes, fp32)
    assert made.nbytes == pytest.approx(gigabytes * 1e9, rel=0.1)
    assert len(made.shards) == checkpoints.NUM_SHARDS
    times = [path.stat().st_mtime_ns for path in made.shards]
    again = checkpoints.cached_checkpoint(kind, gigabytes, fp32)
    assert again == made and [path.stat().st_mtime_ns for path in again.shards] == times


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("kind", checkpoints.KINDS)
@pytest.mark.parametrize("fp32", [False, True])
def test_checkpoints_load_as_plain_from_pretrained_does(kind: str, fp32: bool) -> None:
    made = checkpoints.cached_checkpoint(kind, 0.02, fp32)
    for found in run_ranks(2, compare, made.auto_class, made.folder, {"dtype": torch.bfloat16}, torch.bfloat16):
        assert found["differences"] == []
        assert not found["info"]["missing_keys"] and not found["info"]["unexpected_keys"]


def _run(arm: str, repeat: int, *seconds: float, digest: str = "a") -> dict:
    keys = ("owned_bytes", "anonymous_growth_bytes", "resident_growth_bytes", "rchar_bytes", "storage_read_bytes")
    ranks = [
        {
            "rank": rank,
            "seconds": value,
            "cpu_seconds": 3 * value,
            "digest": digest,
            **dict.fromkeys(keys, 10 * repeat + rank),
        }
        for rank, value in enumerate(seconds)
    ]
    return {"arm": arm, "world_size": 2, "cache": "warm", "repeat": repeat, "ranks": ranks}


def test_summary_takes_the_slowest_rank_and_ratios_within_a_repeat() -> None:
    runs = [_run("ours", 0, 1.0, 2.0), _run("ours", 1, 4.0, 1.0), _run("raw", 0, 1.0, 1.0), _run("raw", 1, 2.0, 2.0)]
    ours, raw = summarise(runs)
    assert ours["seconds"] == {"median": 3.0, "min": 2.0, "max": 4.0}
    assert ours["cpu_seconds"] == {"median": 9.0, "min": 6.0, "max": 12.0}
    assert (ours["ratio_to_raw"], raw["ratio_to_ours"], ours["ratio_to_ours"]) == (2.0, 0.5, 1.0)
    assert ours["rchar_bytes"] == [10, 11]


def test_summary_keeps_an_arm_that_failed() -> None:
    failed = {"arm": "stock", "world_size": 2, "cache": "warm", "repeat": 0, "error": "rank 1 of 2 failed"}
    stock, ours = summarise([failed, _run("ours", 0, 1.0)])
    assert (stock["runs"], stock["error"], ours["ratio_to_raw"]) == (0, "rank 1 of 2 failed", None)


def test_same_bits_compares_arms() -> None:
    assert same_bits([_run("ours", 0, 1.0)]) is None
    assert same_bits([_run("ours", 0, 1.0), _run("stock", 0, 9.0)]) is True
    assert same_bits([_run("ours", 0, 1.0), _run("stock", 0, 9.0, digest="b")]) is False
