"""`hf-zero-stream demo`: stock and streaming side by side, on a checkpoint that it makes or on one's own."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.moe_checkpoint import make_moe_checkpoint
from hf_zero_stream.plugins.demo import demo
from tests.cli.test_docs import DOCUMENT, assert_shown, blocks, commands
from tests.support.cli import run, run_json
from tests.support.commands import command_environment


@pytest.mark.parametrize(
    ("files", "message"), [([], "model.safetensors: "), (["model.safetensors"], "no model can be")]
)
def test_a_checkpoint_that_cannot_be_loaded(tmp_path: Path, files: list[str], message: str) -> None:
    for name in files:
        (tmp_path / name).touch()
    stderr = run("demo", "--checkpoint", str(tmp_path), code=1).stderr
    assert stderr.startswith("CheckpointError: ") and message in stderr


def test_stdout_is_json_alone(tmp_path: Path) -> None:
    """DeepSpeed says on it which accelerator it finds, unless that is in the environment."""
    environment = command_environment()
    environment.pop("DS_ACCELERATOR", None)
    command = [sys.executable, "-m", "hf_zero_stream", "demo", "--checkpoint", str(tmp_path), "--format", "json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stdout == "" and "CheckpointError" in done.stderr


def test_more_gpus_than_there_are() -> None:
    assert "expected a GPU for each of 1000 ranks" in run("demo", "--on", "cuda", "--nproc", "1000", code=2).stderr


@pytest.mark.slow
def test_an_interrupt_leaves_no_rank_behind() -> None:
    """As of ``kill -INT``; Ctrl-C in a terminal reaches torchrun too."""
    command = [sys.executable, "-m", "hf_zero_stream", "demo", "--on", "cpu"]
    with subprocess.Popen(command, env=command_environment(), stderr=subprocess.DEVNULL) as process:
        ranks: list[psutil.Process] = []
        while len(ranks) < 2 and process.poll() is None:
            below = psutil.Process(process.pid).children(recursive=True)
            ranks = [child for child in below if child.environ().get("LOCAL_RANK")]
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    assert len(ranks) == 2 and not any(map(psutil.Process.is_running, ranks))


@pytest.fixture
def shown_data(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the command would have written as JSON, too."""
    kept: list[Any] = []
    emit = demo.frame.emit
    monkeypatch.setattr(
        demo.frame, "emit", lambda data, *others, **options: (kept.append(data), emit(data, *others, **options))
    )
    return kept


@pytest.mark.usefixtures("compiler")
@pytest.mark.slow
def test_your_own_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shown_data: list[Any]) -> None:
    """Real ranks: the same bits, each streaming rank reads its half, and the table is that of docs/cli.md."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)
    folder = make_moe_checkpoint(tmp_path / "tiny-moe", 1e7, num_layers=2, num_experts=8)
    ((command, shown),) = next(parts for parts in map(commands, blocks(DOCUMENT)) if " demo " in parts[0][0])
    assert_shown(shown, run(*command.split()[1:]).stdout)
    (found,) = shown_data
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert found["same_bits"] is True and set(found["arms"]) == {"stock", "streaming"}
    for figures in found["arms"].values():
        assert len(figures["seconds"]) == 1 and figures["losses"] == []
        assert 0.99 * weights <= sum(figures["partition_bytes"]) <= 1.01 * weights
    assert sum(found["arms"]["streaming"]["bytes_read"]) == pytest.approx(weights, rel=0.02)
    assert max(found["arms"]["streaming"]["bytes_read"]) < 0.6 * weights


@pytest.mark.usefixtures("compiler")
@pytest.mark.slow
def test_as_a_newcomer_runs_it(tmp_path: Path, shown_data: list[Any]) -> None:
    text = run("demo", "--on", "cpu", "--html", str(tmp_path / "page.html")).stdout
    checks = [line for line in text.splitlines() if line.startswith("✓ ")]
    assert len(checks) == 3 and "✗" not in text and "loss, step 4" in text
    assert checks[0] == "✓ 47 of 47 parameters equal, bit for bit"
    assert checks[1] == "✓ 3 training steps: losses equal stock's"
    page = (tmp_path / "page.html").read_text()
    assert "what a rank keeps" in page and all(check in page.replace("&#39;", "'") for check in checks)
    (found,) = shown_data
    stock, streaming = found["arms"].values()
    assert max(streaming["anonymous_growth_bytes"]) < 0.5 * max(stock["anonymous_growth_bytes"])
    assert len(set(streaming["losses"])) == demo.STEPS + 1, "steps must change the loss"
    assert found["resumed"]["losses"] == streaming["losses"][-1:]


ARM: dict[str, Any] = {
    "seconds": [2.0],
    "bytes_read": 2**20,
    "anonymous_growth_bytes": 2**21,
    "partition_bytes": 2**20,
    "digests": {"a.weight": "0a", "b.weight": "0b"},
    "curves": [[0.0, 0], [1.0, 2**21]],
    "losses": [],
}
OTHER_BITS = {"a.weight": "0a", "b.weight": "0c"}


@pytest.fixture
def faked_ranks(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What each arm's ranks write down, instead of loading; an arm that is not in it dies without a word."""
    results: dict[str, Any] = {}

    def torchrun(command: list[str], environment: Any) -> tuple[int, str]:
        arm, folder = command[-2], Path(command[-1]).parent
        ranks = int(command[command.index("--nproc-per-node") + 1])
        for rank in range(ranks if arm in results else 0):
            (folder / f"{arm}-{rank}.json").write_text(json.dumps(results[arm]))
        for name, files in results.get("files", {}).items():
            (folder / name).mkdir(exist_ok=True)
            for file, content in files.items():
                (folder / name / file).write_text(content)
        failed = arm not in results or "error" in results[arm]
        return int(failed), "killed by a signal\n"

    monkeypatch.setattr(demo, "_launch", torchrun)
    return results


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(make_moe_checkpoint(tmp_path / "moe", 1e6, num_layers=1, num_experts=2))


def test_shows_one_table(faked_ranks: dict[str, Any], folder: str, tmp_path: Path) -> None:
    faked_ranks |= {"stock": ARM, "streaming": {**ARM, "seconds": [0.5]}}
    options = ("--nproc", "3", "--cache", "cold", "--html", str(tmp_path / "page.html"))
    text = run("demo", "--checkpoint", folder, *options).stdout
    page = (tmp_path / "page.html").read_text()
    assert "##" not in page and "<td>growth of anonymous host memory" in page, "bars are for terminals"
    assert "| seconds, first load" in text and " 2.00 |" in text and " 0.50 |" in text and "cold" in text
    stock, streaming = re.findall(r"^(?:stock|streaming) +(#+) [\d.]+ s$", text, re.MULTILINE)
    assert len(stock) == 4 * len(streaming) == 48 and max(map(len, text.split("\n\nseconds\n")[1].splitlines())) <= 80
    assert "1.0 MiB to 1.0 MiB" in text and text.endswith("✓ 2 of 2 parameters equal, bit for bit\n")


def test_different_bits(faked_ranks: dict[str, Any], folder: str) -> None:
    faked_ranks |= {"stock": ARM, "streaming": {**ARM, "digests": OTHER_BITS}}
    assert run_json("demo", "--checkpoint", folder, code=1)["same_bits"] is False
    text = run("demo", "--checkpoint", folder, code=1).stdout
    assert text.endswith("✗ 1 of 2 parameters equal, bit for bit; DIFFERENT: b.weight\n")
    faked_ranks["streaming"] = {**ARM, "digests": None}
    assert run_json("demo", "--checkpoint", folder)["same_bits"] is None, "what is in swap files is not compared"


def test_errors(faked_ranks: dict[str, Any], folder: str) -> None:
    faked_ranks["stock"] = {"error": "RuntimeError: size mismatch"}
    text = run("demo", "--checkpoint", folder, code=1).stdout
    assert "✗ the stock run failed: RuntimeError: size mismatch" in text
    assert "✗ the streaming run failed: exit code 1:\nkilled by a signal" in text
    assert run_json("demo", "--checkpoint", folder, code=1)["same_bits"] is None


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({}, None),
        ({"stock": {"losses": [3.0, 2.5, 1.0]}}, "losses equal"),
        ({"resumed": {"losses": [1.5]}}, "the next loss"),
        ({"files": {"again": {"model.safetensors": "other"}}}, "every weight"),
        ({"resumed": {"error": "LoadError: no"}}, "the resume failed: LoadError: no"),
    ],
    ids=["right", "losses", "next loss", "files", "error"],
)
def test_a_training_that_differs_is_seen(
    faked_ranks: dict[str, Any], folder: str, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], fault: str
) -> None:
    places: list[Path] = []
    monkeypatch.setattr(demo, "_make_checkpoint", lambda place: places.append(place) or Path(folder))
    same = {"model.safetensors": "weights"}
    arm = {**ARM, "seconds": [2.0, 1.0], "losses": [3.0, 2.0, 1.0]}
    faked_ranks |= {"stock": arm, "streaming": arm, "resumed": {**arm, "losses": [1.0]}}
    faked_ranks["files"] = {"saved": same, "again": same}
    for name, change in changes.items():
        faked_ranks[name] = {**faked_ranks[name], **change}
    found = run_json("demo", "--keep", f"{folder}-kept", code=1 if fault else 0)
    assert places == [Path(f"{folder}-kept")]
    assert "expected a new folder" in run("demo", "--keep", folder, code=2).stderr
    failed = [check["what"] for check in found["checks"] if not check["passed"]]
    assert len(failed) == (fault is not None) and all(fault in what for what in failed)
