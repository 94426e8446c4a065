"""Eight gigabytes are trained beside in the memory of two layers; and the benchmark runs."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import from_files


MIB = 2**20


def figures(tmp_path: Path, *arguments: str) -> dict[str, list[dict[str, Any]]]:
    assert from_files.main([*arguments, "--json", str(tmp_path / "figures.json")]) == 0
    found: dict[str, list[dict[str, Any]]] = json.loads((tmp_path / "figures.json").read_text())
    return found


@pytest.mark.slow
def test_eight_gigabytes_in_the_memory_of_two_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """26 layers of 300 MB: on one rank anonymous memory grows by two of them, and what any training takes.

    By default glibc keeps some 40 MiB more of what torch has freed.
    """
    monkeypatch.setattr(from_files, "CACHE", tmp_path)
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(MIB))
    found = figures(tmp_path, "--sparse", "--steps", "2", "--tokens", "32", "--arms", "files")
    (rank,) = found["files"]
    assert rank["frozen"] > 7.9e9
    largest = 2048 * 768 * 3 * 32 * 2 + 2048 * 1024 * 2 * 2 + 2048 * 256 * 2 * 2  # experts, attention
    adapters = 18 * 26 * 4 * (2048 + 1024 + 2048 + 256)  # in bf16 and fp32, gradients, AdamW's averages
    assert rank["growth"] < 2 * largest + adapters + 128 * MIB
    assert all(nbytes <= 2 * rank["frozen"] for nbytes in rank["bytes"])


@pytest.mark.slow
def test_the_benchmark_compares_with_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(from_files, "CACHE", tmp_path)
    found = figures(tmp_path, "--gigabytes", "0.04", "--layers", "4", "--steps", "3", "--ranks", "2", "--experts")
    printed = capsys.readouterr().out
    assert [*found] == [*from_files.ARMS] and "differ" not in printed
    for arm, ranks in found.items():
        multiples = [sum(of_step) / ranks[0]["frozen"] for of_step in zip(*(it["bytes"] for it in ranks), strict=True)]
        assert all(multiple < 0.1 if arm == "memory" else 1 < multiple <= 2 for multiple in multiples[1:]), arm
