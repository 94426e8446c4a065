"""`inspect`, `verify` and `plan` of files of ``torch.save`` and of folders of torch.distributed.checkpoint."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
import transformers
from safetensors.torch import load_file

from tests.support.cli import run, run_json
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
