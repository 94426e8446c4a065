"""Suites of others run in two arms (`make peers`): what counts as a difference, and a sample of the run itself."""

import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.peers import fetch
from tests.peers.arms import ARMS, HERE, ROOT
from tests.peers.compare import Result, differences, faults_of, read_results


def lines(*rows: tuple[str, str, Mapping[str, Any]]) -> str:
    return "".join(
        json.dumps({"test": test, "outcome": outcome, "recorded": recorded, "text": ""}) + "\n"
        for test, outcome, recorded in rows
    )


def test_results_are_those_of_the_worst_phase(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(lines(("a", "passed", {"losses": [1.5]}), ("b", "passed", {}), ("b", "failed", {})))
    found = read_results(path)
    assert found == {"a": Result("passed", {"losses": [1.5]}), "b": Result("failed", {})}
    assert read_results(tmp_path / "none") == {}


def test_differences() -> None:
    passed, failed = Result("passed", {"losses": ["1.5"]}), Result("failed", {}, "AssertionError: no")
    same = {"a": passed, "b": failed, "c": Result("skipped", {}, "no plan")}
    assert differences(same, same) == []
    assert differences({"a": passed}, {"a": failed}) == ["a: stock passed, ours failed\nAssertionError: no"]
    assert differences({"a": failed}, {"a": passed}) == ["a: stock failed, ours passed\nAssertionError: no"]
    assert differences({"a": passed, "b": passed}, {"a": passed}) == ["b: only in the arm stock"]
    assert differences({}, {"a": passed}) == ["a: only in the arm ours"]
    other = Result("passed", {"losses": ["1.6"]})
    assert differences({"a": passed}, {"a": other}) == ["a: losses: stock ['1.5'], ours ['1.6']"]
    assert differences({"a": passed}, {"a": Result("passed", {})}) == ["a: losses: stock ['1.5'], ours None"]


def test_arms_that_show_nothing() -> None:
    passed = {"a": Result("passed", {})}
    streamed: dict[str, dict[str, int]] = {"stock": {}, "ours": {"load": 2}}
    assert faults_of(passed, passed, streamed) == []
    (fault,) = faults_of(passed, passed, {"stock": {}, "ours": {"save": 1}})
    assert "no load has streamed" in fault
    (fault,) = faults_of(passed, passed, {"stock": {"load": 1}, "ours": {"load": 1}})
    assert "was not without us" in fault
    skipped = {"a": Result("skipped", {})}
    (fault,) = faults_of(skipped, skipped, streamed)
    assert "no test has passed" in fault


def test_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An archive that is there is unpacked; what pip cannot give is a reason."""
    with pytest.raises(fetch.Unavailable, match="no-such-package is not installed"):
        fetch.source_of("no-such-package", tmp_path)
    monkeypatch.setattr(fetch, "version", lambda package: "1.0+cpu")

    def download(*arguments: str) -> None:
        assert arguments[-1] == "it==1.0"
        with tarfile.open(tmp_path / "it-1.0.tar.gz", "w:gz") as archive:
            archive.add(__file__, "it-1.0/tests/test_it.py")

    with monkeypatch.context() as patch:
        patch.setattr(fetch, "_pip", download)
        assert (fetch.source_of("it", tmp_path) / "tests" / "test_it.py").is_file()
    assert fetch.source_of("it", tmp_path) == tmp_path / "it-1.0"
    with pytest.raises(fetch.Unavailable, match="pip download no_such_option"):
        fetch._pip("download", "--no-index", "no_such_option")


@pytest.mark.parametrize("arm", ARMS)
def test_processes_enter_in_the_arm_ours(tmp_path: Path, arm: str) -> None:
    code = (
        "import transformers; from hf_zero_stream.settings.scope import active_configs; print(bool(active_configs()))"
    )
    environment = {**os.environ, "PEERS_ARM": arm, "PEERS_EVENTS": str(tmp_path / "events"), "LOCAL_RANK": "0"}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE / "site"), str(ROOT)])
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert "sitecustomize" not in done.stderr
    assert done.stdout.strip() == str(arm == "ours")


@pytest.mark.slow
def test_a_sample(cluster: None) -> None:
    """Both arms: a test of transformers' FSDP mixin, and a training of accelerate's that saves and resumes."""
    for suite, only in (("mixins", "Llama and fsdp2_save_load"), ("launches", "checkpointing and zero3")):
        command = [sys.executable, "-m", "tests.peers", suite, "--only", only, "--timeout", "600"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500)
        if "skipped: " in done.stdout and "CI" not in os.environ:
            pytest.skip(done.stdout.strip().splitlines()[-1])
        assert done.returncode == 0, done.stdout + done.stderr
        assert "passed" in done.stdout and "differences: 0" in done.stdout
