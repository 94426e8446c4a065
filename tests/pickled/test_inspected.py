"""Folders of DeepSpeed's and torch's, for their tools and for ours.

- `inspect`, `verify` and `plan` of files of ``torch.save`` and of folders of torch.distributed.checkpoint.
- DeepSpeed's tools on states of ours: each says what a state is, and `zero_to_fp32.py` gives the values.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from deepspeed.checkpoint import ds_to_universal
from deepspeed.utils import zero_to_fp32
from safetensors.torch import load_file

import hf_zero_stream
from hf_zero_stream import StreamingConfig
from hf_zero_stream.checkpoint.deepspeed_names import is_guard_file, remove_guard_files
from hf_zero_stream.plugins.pickled.convert import convert
from tests.support.cli import run, run_json
from tests.support.cluster import RankFailure, run_ranks
from tests.support.fsdp2 import announce, load, make_accelerator
from tests.support.training_state import all_in_one_group, engine_of, state_config, train
from tests.support.zoo import Checkpoint


def as_torch_files(source: Path, folder: Path) -> Path:
    """The checkpoint in `source` as two files of ``torch.save`` with an index."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = {name: value for path in sorted(source.glob("*.safetensors")) for name, value in load_file(path).items()}
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), start=1):
        file = f"pytorch_model-{number:05}-of-00002.bin"
        torch.save({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def as_distributed(source: Path, folder: Path) -> Path:
    """The model that the checkpoint in `source` becomes, saved by torch.distributed.checkpoint."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder, no_dist=True)
    return folder


def of_tensors(found: dict[str, object]) -> dict[str, object]:
    return {name: found[name] for name in ("count", "dtypes", "tensors")}


@pytest.mark.plugin("tools", "forecast")
def test_files_of_torch_save(zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    source = zoo_checkpoint("qwen3_moe")
    folder = as_torch_files(source, tmp_path / "torch")
    found, expected = (run_json("inspect", str(each)) for each in (folder, source))
    assert found["format"] == "torch.save" and found["model"] == expected["model"]
    assert sorted(map(json.dumps, found["tensors"])) == sorted(map(json.dumps, expected["tensors"]))
    assert [shard["file"] for shard in found["shards"]] == sorted(path.name for path in folder.glob("*.bin"))
    plans = [run_json("plan", str(each), "--world-size", "2") for each in (folder, source)]
    assert plans[0]["memory"]["partitions"] == plans[1]["memory"]["partitions"]
    assert run_json("verify", str(folder))["faults"] == []
    damaged = folder / "pytorch_model-00002-of-00002.bin"
    damaged.write_bytes(damaged.read_bytes()[:-100])
    (fault,) = run_json("verify", str(folder), code=1)["faults"]
    assert (fault["file"], fault["kind"]) == (damaged.name, "header")


@pytest.mark.plugin("tools", "forecast")
def test_folders_of_torch_distributed(zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    source = zoo_checkpoint("llama")
    folder = as_distributed(source, tmp_path / "distributed")
    found = run_json("inspect", str(folder))
    assert found["format"] == "torch.distributed.checkpoint"
    assert found["model"] == run_json("inspect", str(source))["model"]
    assert sum(line["bytes"] for line in found["tensors"]) >= found["model"]["bytes"]
    plans = [run_json("plan", str(each), "--world-size", "2") for each in (folder, source)]
    assert plans[0]["memory"]["partitions"] == plans[1]["memory"]["partitions"]
    assert run_json("verify", str(folder))["shards"] == 1
    (shard,) = folder.glob("*.distcp")
    os.truncate(shard, shard.stat().st_size // 2)
    (fault,) = run_json("verify", str(folder), code=1)["faults"]
    assert fault["kind"] == "map" and shard.name in fault["message"]


class Executes:
    """Unpickling it runs a command."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.trace}",)


@pytest.mark.plugin("tools", "forecast")
def test_no_pickle_is_run(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    torch.save({"a": Executes(tmp_path / "trace")}, folder / "pytorch_model.bin")
    for command in (["plan", "--world-size", "2"], ["inspect"]):
        assert "no map of bytes" in run(*command, str(folder), code=1).stderr
    assert "no map of bytes" in run("verify", str(folder)).stdout
    assert not (tmp_path / "trace").exists()
    (folder / "pytorch_model.bin").write_bytes(b"not even a pickle")
    for command in (["plan", "--world-size", "2"], ["inspect"], ["verify"]):
        assert "pytorch_model.bin" in run(*command, str(folder), code=1).output


MEETS = "hf_zero_stream training state, which DeepSpeed .* cannot load: resume inside .*: hf-zero-stream convert"


def with_frozen_and_buffer(model: Any) -> list[dict[str, Any]]:
    model.model.layers[0].self_attn.q_proj.weight.requires_grad_(False)
    model.register_buffer("seen", torch.arange(5))
    model.register_buffer("scale", torch.linspace(0, 1, 3, dtype=torch.bfloat16))
    model.register_buffer("scratch", torch.ones(2), persistent=False)
    return all_in_one_group(model)


def save_by_both(folder: Path, target: Path, config: dict[str, Any]) -> None:
    engine = engine_of(folder, config, with_frozen_and_buffer)
    train(engine, range(2))
    engine.save_checkpoint(str(target / "stock"))
    with hf_zero_stream.streaming():
        engine.save_checkpoint(str(target / "ours"))
        engine.save_checkpoint(str(target / "named"), tag="mine")


def load_outside(folder: Path, source: Path, config: dict[str, Any]) -> None:
    engine_of(folder, config, with_frozen_and_buffer).load_checkpoint(str(source))


def stock_over_ours(folder: Path, target: Path, config: dict[str, Any]) -> list[float]:
    """The losses after a resume from what DeepSpeed has saved, in streaming(), into the folder of a state of ours."""
    engine = engine_of(folder, config, with_frozen_and_buffer)
    train(engine, range(2))
    with hf_zero_stream.streaming():
        engine.save_checkpoint(str(target))
    with hf_zero_stream.streaming(StreamingConfig(training_state=False)):  # the way back: ours is loaded all the same
        engine = engine_of(folder, config, with_frozen_and_buffer)
        assert engine.load_checkpoint(str(target))[0] is not None and engine.global_steps == 2
        engine.save_checkpoint(str(target))
    expected = train(engine, (3,))
    again = engine_of(folder, config, with_frozen_and_buffer)
    again.load_checkpoint(str(target))
    assert train(again, (3,)) == expected
    return expected


def run_script(folder: Path, target: Path, *options: str) -> dict[str, torch.Tensor]:
    subprocess.run([sys.executable, "zero_to_fp32.py", ".", target, *options], check=True, cwd=folder, timeout=120)
    return {name: value for path in target.glob("*.safetensors") for name, value in load_file(path).items()}


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_tools(
    cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: int
) -> None:
    """Functions, universal checkpoints and a resume end in a sentence; script and `convert` give the same values."""
    folder = zoo_checkpoint("qwen3")
    config = state_config(stage)
    run_ranks(2, save_by_both, folder, tmp_path, config)
    stock, ours = tmp_path / "stock", tmp_path / "ours"
    found = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(stock))
    expected = {name: value.float() if value.is_floating_point() else value for name, value in found.items()}
    assert {"seen", "scale"} <= expected.keys()
    convert(ours / "global_step2", tmp_path / "converted", progress=False)
    values = {
        "convert": load_file(tmp_path / "converted" / "model.safetensors"),
        "script": run_script(ours, tmp_path / "by script", "--safe_serialization"),
        "shards": run_script(ours, tmp_path / "shards", "--max_shard_size", "80KB", "--tag", "global_step2"),
        "of a tag": run_script(tmp_path / "named", tmp_path / "of a tag"),
    }
    for name, each in values.items():
        assert each.keys() == expected.keys(), name
        assert [key for key, value in each.items() if not torch.equal(value, expected[key])] == [], name
    assert len([*(tmp_path / "shards").glob("*.safetensors")]) > 1

    for place in (ours, tmp_path / "named"):
        for inside in (hf_zero_stream.streaming(), hf_zero_stream.streaming(StreamingConfig(training_state=False))):
            with inside, pytest.raises(RuntimeError, match=MEETS):
                zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(place))
        with pytest.raises(RuntimeError, match=MEETS):
            zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(str(place), str(tmp_path / "none"))
        with pytest.raises(RankFailure) as failure:
            run_ranks(2, load_outside, folder, place, config)
        for outcome in failure.value.outcomes:
            assert outcome.error_type == "RuntimeError" and re.search(MEETS, outcome.error_message or "")
    arguments = ["--input_folder", f"{ours}/global_step2", "--output_folder", str(tmp_path / "universal")]
    monkeypatch.setattr("sys.argv", ["ds_to_universal", *arguments, "--num_extract_workers", "1"])
    with pytest.raises(RuntimeError, match="without ds_to_universal"):
        ds_to_universal.main(ds_to_universal.parse_arguments())
    left = [path for path in ours.rglob("*") if path.suffix in (".pt", ".py")]
    assert len(left) == 5 and sum(path.stat().st_size for path in left) < 6000


def test_deepspeed_saves_into_a_folder_of_ours(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """What says that a folder is ours is gone then, and both find DeepSpeed's checkpoint."""
    run_ranks(2, stock_over_ours, zoo_checkpoint("qwen3"), tmp_path / "both", state_config(3))
    assert zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "both"))


def resume_alone(folder: Path, target: Path) -> None:
    announce(cpu_ram_efficient_loading=True, state_dict_type="SHARDED_STATE_DICT")
    accelerator = make_accelerator()
    with hf_zero_stream.streaming():
        model = load("llama", folder)
        model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        accelerator.save_state(str(target))
    accelerator.load_state(str(target))


def test_accelerate_alone_on_a_state_of_fsdp2(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Every rank says what the state is."""
    with pytest.raises(RankFailure) as failure:
        run_ranks(2, resume_alone, zoo_checkpoint("llama"), tmp_path / "state")
    for outcome in failure.value.outcomes:
        assert outcome.error_type == "CheckpointException" and re.search(MEETS, outcome.error_message or "")
    whole = tmp_path / "state" / "pytorch_model_fsdp.bin"
    with pytest.raises(RuntimeError, match=MEETS):
        torch.load(whole, weights_only=True)
    guards = [path for path in (tmp_path / "state").rglob("*") if is_guard_file(path)]
    assert len(guards) == 2
    remove_guard_files(tmp_path / "state")
    assert not any(map(is_guard_file, guards))
