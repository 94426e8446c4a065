"""`plan`: what loading and training will take, and whether it fits."""

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import deepspeed  # noqa: F401 - first, because its logger keeps the stdout that it finds when it is imported
import pytest
import torch
from safetensors.torch import save_file

import hf_zero_stream
from hf_zero_stream.plugins.forecast.needs import verdict
from hf_zero_stream.plugins.forecast.worlds import WORLDS
from tests.support.checkpoint_files import tensors_of
from tests.support.cli import USAGE, run, run_json
from tests.support.parity import ds_config
from tests.support.zoo import Checkpoint


def test_plan_is_the_librarys(tiny_moe: str, tmp_path: Path) -> None:
    config = ds_config(torch.bfloat16, offload_optimizer={"device": "cpu"})
    (tmp_path / "ds.json").write_text(json.dumps(config))
    options = ["--world-size", "5", "--rank", "3", "--ds-config", str(tmp_path / "ds.json")]
    found = run_json("plan", tiny_moe, *options)
    expected = hf_zero_stream.plan(tiny_moe, world_size=5, rank=3, ds_config=config, device="cuda")
    assert found["load"]["bytes_read"] == expected.load.cost.bytes_read
    assert found["memory"] == asdict(expected.memory)
    assert found["memory"]["largest_gather_of"] == "model.layers.0.mlp" and found["fits"] is None
    text = run("plan", tiny_moe, *options).stdout
    assert text.startswith("Rank 3 of 5: ") and "largest gather of the forward pass" in text


def test_plan_of_a_sharded_model(tiny_moe: str, tmp_path: Path) -> None:
    options = ["--world-size", "16", "--rank", "5", "--fsdp", "4", "--tp", "2", "--ep", "4", "--replicate", "2"]
    sizes = {"fsdp_size": 4, "tp_size": 2, "ep_size": 4, "dp_replicate_size": 2}
    found = run_json("plan", tiny_moe, *options, "--dtype", "fp32")
    expected = hf_zero_stream.plan(
        tiny_moe, world_size=16, rank=5, distributed_config=sizes, dtype="float32", device="cuda"
    )
    assert found["load"] == expected.load.cost._asdict() and found["memory"] == asdict(expected.memory)
    assert found["sharding"] == sizes and found["stock"] is None and found["fits"] is None
    assert found["needs"]["device"] == most_in_training(asdict(expected.memory), "cuda")
    text = run("plan", tiny_moe, *options).stdout
    assert text.startswith("Rank 5 of 16, fsdp_size 4, tp_size 2, ep_size 4, dp_replicate_size 2: ")
    assert "first backward pass adds gradients" in text and "deepspeed" not in text and "ZeRO" not in text
    (tmp_path / "ds.json").write_text(json.dumps(ds_config()))
    both = run("plan", tiny_moe, *options, "--ds-config", str(tmp_path / "ds.json"), code=USAGE)
    assert "expected ZeRO-3 alone" in re.sub(r"\s+", " ", both.stderr)


@pytest.mark.parametrize(("dtype", "itemsize"), [("bfloat16", 2), ("fp16", 2), ("fp32", 4)])
def test_plan_in_another_dtype(tiny_moe: str, tmp_path: Path, dtype: str, itemsize: int) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(ds_config(torch.bfloat16)))
    with_config = run_json(
        "plan", tiny_moe, "--world-size", "2", "--dtype", dtype, "--ds-config", f"{tmp_path}/ds.json"
    )
    without = run_json("plan", tiny_moe, "--world-size", "2", "--dtype", dtype)
    numel = sum(param.numel() for param in tensors_of(tiny_moe).values())
    for found in (with_config, without):
        assert found["memory"]["partitions"]["cuda"] == numel * itemsize // 2
    assert any("fp32" in warning for warning in with_config["warnings"]) == (dtype == "fp32")


def test_stocks_peaks(tiny_moe: str) -> None:
    """The formulas of `stock_load` in hf_zero_stream/plugins/forecast/stock.py, from the tensors themselves."""
    found = run_json("plan", tiny_moe, "--world-size", "4")
    tensors = tensors_of(tiny_moe)
    total = sum(tensor.nbytes for tensor in tensors.values())
    experts = sum(tensor.nbytes for name, tensor in tensors.items() if ".layers.0.mlp.experts." in name)
    gate_up = experts * 2 // 3
    assert max(tensor.nbytes for tensor in tensors.values()) < gate_up, "the largest parameter is a fused one"
    stock, memory = found["stock"], found["memory"]
    held = total // 4 + memory["buffers"]["cuda"]
    assert stock["other_received"] == total
    assert stock["rank0_read"] == sum(shard.stat().st_size for shard in Path(tiny_moe).glob("*.safetensors"))
    assert stock["other_peak"] == {"cuda": held + experts}
    assert stock["rank0_peak"] == {"cuda": held + experts, "cpu": gate_up}
    passing = min(2 * 2**23, total // 4)  # what is cast or scattered passes through the device
    assert memory["load_peak"] == {"cuda": held + passing, "cpu": memory["staging"]}


def most_in_training(memory: dict[str, Any], place: str) -> int:
    """In passes, with all that may be gathered, or in the optimizer's step."""
    return int(max(memory["held"][place] + memory["most_gathered"], memory["step_peak"][place]))


def test_plan_says_whether_it_fits(tiny_moe: str) -> None:
    options = ["--world-size", "4", "--ranks-per-node", "2"]
    needs = run_json("plan", tiny_moe, *options)["needs"]
    memory = run_json("plan", tiny_moe, *options)["memory"]
    assert needs["device"] == most_in_training(memory, "cuda")
    assert needs["host"] == 2 * memory["load_peak"]["cpu"] and needs["ranks_per_node"] == 2
    enough = [f"--device-memory={needs['device']}B", f"--host-memory={needs['host']}B"]
    assert run_json("plan", tiny_moe, *options, *enough)["fits"] is True
    for too_little in (f"--device-memory={needs['device'] - 1}B", f"--host-memory={needs['host'] - 1}B"):
        assert run_json("plan", tiny_moe, *options, *enough, too_little, code=1)["fits"] is False
        assert run("plan", tiny_moe, *options, *enough, too_little, code=1).stdout.count("DOES NOT FIT") == 1


def test_plan_for_a_cpu_counts_all_as_the_hosts(tiny_moe: str) -> None:
    found = run_json("plan", tiny_moe, "--world-size", "4", "--device", "cpu", "--host-memory", "1TiB")
    assert found["needs"]["host"] == 4 * most_in_training(found["memory"], "cpu")
    assert found["needs"]["device"] == 0 and found["fits"] is True
    assert "device needs" not in run("plan", tiny_moe, "--world-size", "4", "--device", "cpu").stdout


def test_plan_counts_adapters(tiny_moe: str) -> None:
    def memory(*lora: str) -> dict[str, Any]:
        found: dict[str, Any] = run_json("plan", tiny_moe, "--world-size", "4", *lora)["memory"]
        return found

    whole, narrow, wide = (
        memory(),
        *(memory("--lora-rank", rank, "--lora-targets", "q_proj,o_proj") for rank in ("4", "8")),
    )
    adapters = [each["partitions"]["cuda"] - whole["partitions"]["cuda"] for each in (narrow, wide)]
    assert 0 < 2 * adapters[0] == adapters[1]
    assert [each["optimizer_states"]["cuda"] for each in (narrow, wide)] == [2 * nbytes for nbytes in adapters]


def test_warnings(tiny_moe: str, tmp_path: Path) -> None:
    def warnings(*options: str) -> str:
        return "\n".join(run_json("plan", tiny_moe, "--world-size", *options)["warnings"])

    (tmp_path / "ds.json").write_text(json.dumps({**ds_config(), "bf16": {"enabled": "auto"}}))
    assert "gathers model.layers.0.mlp whole" in warnings("64")
    assert "No --ds-config" in warnings("1") and "gathers" not in warnings("1")
    given = warnings("1", "--ds-config", str(tmp_path / "ds.json"))
    assert "--dtype bf16" in given and "No --ds-config" not in given


def test_warning_of_uneven_shards(zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    tensors = tensors_of(str(zoo_checkpoint("llama")))
    sizes = sorted(tensors, key=lambda name: tensors[name].nbytes)
    shards = {"big": sizes[4:], **{f"small-{number}": [name] for number, name in enumerate(sizes[:4])}}
    for shard, names in shards.items():
        save_file({name: tensors[name] for name in names}, tmp_path / f"{shard}.safetensors", {"format": "pt"})
    weight_map = {name: f"{shard}.safetensors" for shard, names in shards.items() for name in names}
    index = {"metadata": {}, "weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_bytes((zoo_checkpoint("llama") / "config.json").read_bytes())
    (warning,) = [w for w in run_json("plan", str(tmp_path), "--world-size", "2")["warnings"] if "shards" in w]
    assert warning.startswith("Uneven shards: big.safetensors has ") and warning.endswith(" in 5 shards.")


def test_plan_with_settings_that_deepspeed_refuses(tiny_moe: str, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3, "sub_group_size": "x"}}))
    result = run("plan", tiny_moe, "--world-size", "2", "--ds-config", str(tmp_path / "ds.json"), code=1)
    assert "sub_group_size" in result.stderr and "Traceback" not in result.stderr


def test_plan_of_what_transformers_does_not_know(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "nonsense"}')
    result = run("plan", str(tmp_path), "--world-size", "2", code=1)
    assert "CheckpointError: " in result.stderr and "nonsense" in result.stderr and result.stdout == ""


def test_plan_for_any_number_of_ranks(tiny_moe: str) -> None:
    """Without one, a line for each: what do I need for this model?"""
    found = run_json("plan", tiny_moe, "--dtype", "fp32")
    needs = {world["world_size"]: world["needs"] for world in found["worlds"]}
    assert list(needs) == list(WORLDS) and found["fits"] is None
    of_four = run_json("plan", tiny_moe, "--dtype", "fp32", "--world-size", "4")
    assert needs[4] == of_four["needs"] and found["worlds"][2]["read"] == of_four["load"]["bytes_read"]
    for less, fitting in ((0, ["64"]), (1, [])):
        limit = f"--device-memory={needs[64]['device'] - less}B"
        text = run("plan", tiny_moe, "--dtype", "fp32", limit, code=less).stdout
        rows = [line.strip("| ").split("|") for line in text.splitlines() if line.startswith("| ")][1:]
        assert [int(row[0]) for row in rows] == list(WORLDS)
        assert [row[0].strip() for row in rows if row[-1].strip() == "tight"] == fitting


def test_the_smallest_without_a_number_of_ranks(tiny_moe: str) -> None:
    found = run_json("plan", tiny_moe, "--suggest", "--device-memory", "80GiB")
    assert found["suggested"]["ranks"] == 1 and found["share_reads"] == ""


@pytest.mark.plugin("demo")
def test_a_suggestion_for_several_nodes_says_when_to_share_reads(tiny_moe: str) -> None:
    """Two ranks are the smallest set-up that fits, and here each has a node of its own."""
    limits = ["--suggest", "--device-memory", "1GiB", "--world-size", "8"]
    text = "ask for share_reads=True, because there are 2 nodes:"
    assert text in run("plan", tiny_moe, *limits, "--ranks-per-node", "1").stdout
    assert "share_reads" not in run("plan", tiny_moe, *limits).stdout


FOR_THEM = "activations not counted"


@pytest.mark.parametrize(
    ("needs", "limits", "device", "expected"),
    [
        ((60, 1), {"device": 80}, "cuda", [f"60 B, {FOR_THEM}: fits into 80 B, and leaves 20 B for them."]),
        (
            (65, 1),
            {"device": 79},
            "cuda",
            [": tight: fits into 79 B, and leaves 14 B for", "fits if it has that"],
        ),
        ((90, 1), {"device": 80}, "cuda", ["DOES NOT FIT into 80 B, 10 B too much.", "needs 1 B."]),
        ((60, 9), {"device": 80, "host": 8}, "cuda", ["fits into 80 B", "9 B: DOES NOT FIT into 8 B, 1 B too"]),
        ((60, 9), {"device": 80, "host": 9}, "cuda", ["fits into 80 B", "needs 9 B: fits into 9 B."]),
        ((0, 10), {"host": 11}, "cpu", [f"{FOR_THEM}: tight: fits into 11 B, and leaves 1 B for them."]),
        ((60, 1), {}, "cuda", [f"60 B, {FOR_THEM}.", "needs 1 B."]),
    ],
)
def test_verdicts(needs: tuple[int, int], limits: dict[str, int], device: str, expected: list[str]) -> None:
    """What fits says what is left; and a host, of which nothing was said, may be what does not."""
    lines = list(verdict({"device": needs[0], "host": needs[1], "ranks_per_node": 8}, limits, device))
    assert all(text in line for text, line in zip(expected, lines, strict=False)), lines
    assert len(lines) == (1 if device == "cpu" else 2)


def test_plan_wants_a_folder(tiny_moe: str) -> None:
    file = Path(tiny_moe, "config.json")
    message = run("plan", str(file), "--world-size", "2", code=1).stderr
    assert message.startswith(f"CheckpointError: {file}: expected the checkpoint's folder")


def test_sizes_make_the_world_size(tiny_moe: Path) -> None:
    assert run_json("plan", str(tiny_moe), "--fsdp", "4", "--tp", "2")["world_size"] == 8


@pytest.mark.parametrize(
    ("text", "found"), [("[]", "list"), ('{"zero_optimization": {"stage": 0}}', "0"), ("{", "as JSON")]
)
def test_wrong_ds_config(tmp_path: Path, text: str, found: str) -> None:
    (tmp_path / "ds.json").write_text(text)
    arguments = ["plan", str(tmp_path), "--world-size", "2", "--ds-config", str(tmp_path / "ds.json")]
    assert found in run(*arguments, code=USAGE).stderr
