"""`plan --suggest`: the smallest set-up of ZeRO-3 that fits, and a config with which accelerate starts it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file

from benchmarks.moe_checkpoint import make_moe_checkpoint
from hf_zero_stream.plugins.demo.suggest import Machines, smallest
from tests.support.cli import run, run_json


GIB = 2**30


def needs(ranks: int, config: Mapping[str, Any]) -> dict[str, int]:
    """Of a model whose weights take 1 GiB and whose optimizer takes 4, each in equal parts on all ranks."""
    zero = config["zero_optimization"]
    assert zero["stage"] == 3 and config["bf16"] == {"enabled": True}
    weights, optimizer = GIB // ranks, 4 * GIB // ranks
    host = ranks * (weights * ("offload_param" in zero) + optimizer * ("offload_optimizer" in zero))
    device = weights * ("offload_param" not in zero) + optimizer * ("offload_optimizer" not in zero)
    return {"device": device, "host": host, "ranks_per_node": 8}


@pytest.mark.parametrize(
    ("device", "host", "expected"),
    [
        (5 * GIB, None, (1, "nothing")),
        (GIB, None, (6, "nothing")),  # 4 would need 1.25
        (GIB // 2, 8 * GIB, (2, "optimizer")),
        (GIB // 8, 8 * GIB, (1, "optimizer, parameters")),
        (GIB // 2, 3 * GIB, None),
    ],
)
def test_the_smallest_that_fits(device: int, host: int | None, expected: Any) -> None:
    limits = {"device": device, **({} if host is None else {"host": host})}
    found, looked_at = smallest(needs, Machines(6, 8, limits), "bf16")
    assert (found and (found["ranks"], found["offload"])) == expected
    assert [tried["fits"] for tried in looked_at].count(True) == (expected is not None)
    assert {tried["ranks"] for tried in looked_at} <= {1, 2, 4, 6}


def test_the_command(tmp_path: Path) -> None:
    """Its numbers are those of `plan` for what it suggests, and accelerate reads what it writes."""
    folder, config = str(make_moe_checkpoint(tmp_path / "moe", 1e7, num_layers=2, num_experts=8)), tmp_path / "it.yaml"
    arguments = [folder, "--world-size", "4", "--suggest", "--device-memory", "965MiB", "--ranks-per-node", "2"]
    setup = run_json("plan", *arguments, "--write", str(config))["suggested"]
    assert (setup["ranks"], setup["offload"]) == (2, "optimizer")
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": zero, "bf16": {"enabled": True}}))
    planned = run_json("plan", folder, "--world-size", "2", "--ds-config", str(tmp_path / "ds.json"))["needs"]
    assert setup["needs"] == {place: planned[place] for place in ("device", "host")}
    loaded = load_config_from_file(str(config))
    assert (loaded.num_processes, loaded.num_machines, loaded.mixed_precision) == (2, 1, "bf16")
    assert loaded.deepspeed_config["offload_optimizer_device"] == "cpu"
    assert yaml.safe_load(config.read_text())["deepspeed_config"]["offload_param_device"] == "none"


def test_nothing_fits(tmp_path: Path) -> None:
    folder, config = str(make_moe_checkpoint(tmp_path / "moe", 1e6, num_layers=1, num_experts=2)), tmp_path / "it.yaml"
    arguments = [folder, "--world-size", "2", "--suggest", "--device-memory", "1MiB", "--write", str(config)]
    text = run("plan", *arguments, code=1).stdout
    assert "Nothing of this FITS" in text and not config.exists()


@pytest.mark.parametrize(
    "options", [["--suggest"], ["--write", "it.yaml"], ["--suggest", "--device-memory", "1GiB", "--fsdp", "2"]]
)
def test_options_that_do_not_go_together(options: list[str], tmp_path: Path) -> None:
    run("plan", str(tmp_path), "--world-size", "2", *options, code=2)
