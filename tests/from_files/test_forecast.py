"""What plan() says that training needs with frozen weights in files, beside what it takes."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from peft import LoraConfig
from typer.testing import CliRunner

import hf_zero_stream
from benchmarks.moe_checkpoint import make_moe_checkpoint
from hf_zero_stream.cli import app
from hf_zero_stream.reports.measures import AnonymousMemory
from tests.from_files.trainings import ATTENTION, adapted, config_for, engine_of, load, steps
from tests.support.cluster import run_ranks


pytestmark = pytest.mark.plugin("forecast")

MIB = 2**20

LORA = ("--lora-rank", "8", "--lora-targets", "all-linear")


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_moe_checkpoint(tmp_path_factory.mktemp("moe"), 2e8, num_layers=8, num_experts=8)


def mixture_bytes(mixture: Path) -> int:
    return sum(path.stat().st_size for path in mixture.glob("*.safetensors"))


def planned(mixture: Path, frozen_weights: str) -> Any:
    lora = LoraConfig(r=4, target_modules=[*ATTENTION])
    with hf_zero_stream.streaming(frozen_weights=frozen_weights):
        return hf_zero_stream.plan(mixture, world_size=1, ds_config=config_for(), lora=lora).memory


def test_the_command_says_what_stays_in_files(mixture: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ZERO_STREAM_FROZEN_WEIGHTS", "files")
    shown = CliRunner().invoke(app, ["plan", str(mixture), "--world-size", "2", *LORA, "--disk-gbps", "0.1"])
    assert shown.exit_code == 0, shown.output
    assert re.search(r"a step reads of files, at most +\| +\d+\.\d MiB", shown.output), shown.output
    (seconds,) = re.findall(r"from the node's disks, at least +\| +([\d.]+) s", shown.output)
    assert "a step sends backward gathers" in shown.output, "nothing stays gathered"
    assert float(seconds) == pytest.approx(2 * mixture_bytes(mixture) / 1e8, rel=0.1)
    assert "partitions, files" in shown.output and "twice in each step" in shown.output
    assert "stock, rank 0" not in shown.output


def suggested(mixture: Path, *options: str, code: int = 0) -> str:
    """What is said of one GPU with little memory, of its own and of its host."""
    limits = ("--world-size", "1", "--device-memory", "1000MiB", "--host-memory", "320MiB")
    shown = CliRunner().invoke(app, ["plan", str(mixture), "--suggest", *limits, *options])
    assert shown.exit_code == code, shown.output
    return shown.output


def test_adapters_of_what_fits_nowhere_else_are_trained_from_files(mixture: Path, tmp_path: Path) -> None:
    small = ("--lora-rank", "4", "--lora-targets", "q_proj")
    text = suggested(mixture, *small, "--disk-gbps", "0.1", "--write", str(tmp_path / "it.yaml"))
    assert "First that fits: 1 rank, stage 3 in bf16, in host memory: nothing; frozen weights in files" in text
    (seconds,) = re.findall(r": ([\d.]+) s at least", text)
    assert float(seconds) == pytest.approx(2 * mixture_bytes(mixture) / 1e8, rel=0.1)
    assert "HF_ZERO_STREAM_FROZEN_WEIGHTS=files hf-zero-stream run" in text
    assert yaml.safe_load((tmp_path / "it.yaml").read_text())["deepspeed_config"]["offload_param_device"] == "none"
    assert "in files" not in suggested(mixture, code=1), "without adapters all is trained"
    more = ("--device-memory", "1434MiB", "--host-memory", "4GiB")
    assert "frozen weights" not in suggested(mixture, *small, *more), "host memory is faster"


def measured(mixture: Path) -> int:
    with AnonymousMemory() as memory:
        engine = engine_of(adapted(load(mixture, config_for(), "files")), config_for())
        list(steps(engine, 2))
    return memory.growth_peak


def test_weights_in_files_take_two_layers(cluster: None, mixture: Path) -> None:
    from_files, in_memory = planned(mixture, "files"), planned(mixture, "memory")
    assert from_files.partitions["files"] > 190 * MIB and in_memory.partitions["cpu"] > 190 * MIB
    assert from_files.partitions["cpu"] < MIB, "adapters alone"
    assert from_files.load_peak["cpu"] < in_memory.load_peak["cpu"] - 60 * MIB
    most = max(phase["cpu"] for phase in (from_files.load_peak, from_files.passes_peak, from_files.step_peak))
    assert "files" not in from_files.passes_peak
    (grown,) = run_ranks(1, measured, mixture)
    assert 40 * MIB < grown < most + 128 * MIB < 240 * MIB


def report(mixture: Path) -> dict[str, int]:
    model: Any = load(mixture, config_for(), "files")
    found: dict[str, int] = model.streaming_report.footprint.partitions
    return found


def test_the_report_of_a_load_says_what_stays_in_files(cluster: None, mixture: Path) -> None:
    for partitions in run_ranks(2, report, mixture):
        assert partitions["files"] > 95 * MIB and partitions.get("cpu", 0) == 0
