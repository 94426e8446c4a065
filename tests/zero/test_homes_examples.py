"""The DeepSpeed configs in examples/deepspeed run, and docs/homes.md names tests and configs that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.support.cluster import ROOT
from tests.support.commands import losses, run_command


TABLE = ROOT / "docs" / "homes.md"
MAKE = "python -m benchmarks.moe_checkpoint tiny-moe --gigabytes 0.01 --layers 2 --experts 8"
TRAIN = "torchrun --nproc_per_node 2 examples/finetune_trainer.py --model tiny-moe --steps 3"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the examples run, with their checkpoint."""
    folder = tmp_path_factory.mktemp("homes")
    run_command(MAKE, folder)
    return folder


@pytest.fixture(scope="module")
def stock_losses(folder: Path) -> list[str]:
    """What stock's loading gives with plain ZeRO-3; where partitions live changes no value."""
    found = losses(run_command(TRAIN, folder, extra=["--loader", "stock"]))
    assert len(found) == 3
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("async_io")
@pytest.mark.parametrize("config", ["zero3_offload_cpu.json", "zero3_hpz.json", "zero3_nvme.json"])
def test_trains_as_stock(folder: Path, stock_losses: list[str], config: str) -> None:
    output = run_command(TRAIN, folder, extra=["--deepspeed", f"examples/deepspeed/{config}"])
    assert output.count("STREAMING LOAD REPORT (2 ranks") == 1
    assert losses(output) == stock_losses


@pytest.mark.usefixtures("compiler")
@pytest.mark.slow
def test_stage_2_trains_as_stock(folder: Path) -> None:
    extra = ["--deepspeed", "examples/deepspeed/zero2.json"]
    output = run_command(TRAIN, folder, extra=extra)
    assert output.count("STREAMING LOAD REPORT (2 ranks") == 1
    stock = losses(run_command(TRAIN, folder, extra=[*extra, "--loader", "stock"]))
    assert losses(output) == stock and len(stock) == 3


@pytest.mark.usefixtures("compiler")
@pytest.mark.slow
def test_quantised_weights_need_a_gpu(folder: Path) -> None:
    """`run_command` fails with what the command printed."""
    with pytest.raises(AssertionError, match="UnsupportedError: zero_quantized_weights: DeepSpeed's quantizer"):
        run_command(TRAIN, folder, extra=["--deepspeed", "examples/deepspeed/zero3_quantized_weights.json"])


def rows() -> list[list[str]]:
    homes, _, _ = TABLE.read_text().partition("\n## ")
    lines = [line for line in homes.splitlines() if line.startswith("| ")]
    return [line.split("|")[1:-1] for line in lines]


def test_table_names_what_exists() -> None:
    assert {len(row) for row in rows()} == {6}
    text = TABLE.read_text()
    for path, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text):
        tree = ast.parse((ROOT / path).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{path}::{name}"
    for path in re.findall(r"`(examples/[\w./]+)`", text):
        assert (ROOT / path).is_file(), path


def test_each_config_has_a_row() -> None:
    configs = {path.name for path in (ROOT / "examples" / "deepspeed").glob("*.json")}
    assert configs <= set(re.findall(r"`examples/deepspeed/([\w.]+)`", TABLE.read_text()))
