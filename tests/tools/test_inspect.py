"""`inspect`: what is in a checkpoint, and in the model that transformers makes of it."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import deepspeed  # noqa: F401 - first, because its logger keeps the stdout that it finds when it is imported
import pytest
import torch
from safetensors.torch import save_file

from tests.support.checkpoint_files import rewritten, tensors_of
from tests.support.cli import run, run_json, unfolded
from tests.support.zoo import ZOO, Checkpoint, build_model


@pytest.mark.parametrize("name", list(ZOO))
def test_inspect_shows_files_and_model(zoo_checkpoint: Checkpoint, name: str) -> None:
    """Every tensor of the shards, and every parameter of a plain model, with its shape and size."""
    folder = zoo_checkpoint(name)
    found = run_json("inspect", str(folder))
    held = tensors_of(folder)
    assert shapes_of(found["tensors"]) == {name: list(tensor.shape) for name, tensor in held.items()}
    assert sum(line["bytes"] for line in found["tensors"]) == sum(tensor.nbytes for tensor in held.values())
    assert found["bytes"] == sum(shard["bytes"] for shard in found["shards"])
    assert sum(shard["tensors"] for shard in found["shards"]) == len(held)

    model = build_model(name)
    plain = {name: param for name, param in model.named_parameters()}
    assert found["model"]["class"] == type(model).__name__ and not found["model"]["missing"]
    assert shapes_of(found["model"]["parameters"]) == {name: list(param.shape) for name, param in plain.items()}
    assert found["model"]["bytes"] == sum(param.nbytes for param in plain.values())
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - plain.keys()
    assert set(itertools.chain.from_iterable(map(unfolded, found["model"]["tied"]))) == tied


def shapes_of(lines: list[dict[str, Any]]) -> dict[str, list[int]]:
    """Name -> shape; fails if a line's count is not the number of its names."""
    shapes = {}
    for line in lines:
        names = unfolded(line["name"])
        assert len(names) == line["count"]
        shapes |= dict.fromkeys(names, line["shape"])
    return shapes


def test_inspect_shows_of_many_shards_the_first_and_the_last(tmp_path: Path) -> None:
    names = [f"model-{number:05}-of-00020.safetensors" for number in range(1, 21)]
    for number, name in enumerate(names):
        save_file({f"t.{number}": torch.zeros(number + 1)}, tmp_path / name)
    index = {"metadata": {}, "weight_map": {f"t.{number}": name for number, name in enumerate(names)}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    arguments = ("inspect", str(tmp_path), "--no-model")

    shards = run(*arguments).stdout.split("\n\n")[1].splitlines()[2:]
    assert len(shards) == 3 and names[0] in shards[0] and names[-1] in shards[2]
    assert re.search(r"18 more, .* to .* each \(--all\) *\| *18 \|", shards[1])
    listed = run(*arguments, "--all").stdout
    assert all(name in listed for name in names) and "more" not in listed
    assert [shard["file"] for shard in run_json(*arguments)["shards"]] == names


def test_inspect_names_what_is_initialised(zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    rewritten(zoo_checkpoint("llama"), tmp_path, lambda tensors: tensors.pop("model.norm.weight"))
    assert run_json("inspect", str(tmp_path))["model"]["missing"] == ["model.norm.weight"]
    assert "so they are initialised: model.norm.weight" in run("inspect", str(tmp_path)).stdout


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (None, "no config.json"),
        ('{"model_type": "nonsense"}', "nonsense"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "wide"),
        ('{"model_type": "llama", "architectures": 3}', "TypeError"),
        ("[]", "no model can be made"),
    ],
)
def test_inspect_without_a_model(tmp_path: Path, config: str | None, reason: str) -> None:
    """What is in the shards can be shown without knowing what they are for."""
    save_file({"scalar": torch.tensor(1.0), "empty": torch.empty(0, 3)}, tmp_path / "model.safetensors")
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    found = run_json("inspect", str(tmp_path))
    assert found["model"] is None and reason in found["no_model_because"]
    assert shapes_of(found["tensors"]) == {"scalar": [], "empty": [0, 3]}
    assert reason in run("inspect", str(tmp_path)).stdout.partition("No model: ")[2]
    single = run("inspect", str(tmp_path / "model.safetensors"), "--no-model").stdout
    assert "| scalar | F32   | scalar |" in single and "not asked for" in single


def test_names_cannot_steer_a_terminal(tmp_path: Path) -> None:
    """A checkpoint may come from anybody."""
    save_file({"a\x1b[31mred\nline": torch.zeros(1)}, tmp_path / "model.safetensors")
    text = run("inspect", str(tmp_path)).stdout
    assert "| a\\x1b[31mred\\nline " in text and "\x1b" not in text
    damaged = (tmp_path / "model.safetensors").read_bytes().replace(b"[1]", b"[2]")
    (tmp_path / "model.safetensors").write_bytes(damaged)
    for command, code in (("inspect", 1), ("verify", 1)):
        assert "\x1b" not in run(command, str(tmp_path), code=code).output


def test_inspect_of_what_is_not_sound(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"nonsense" * 9)
    result = run("inspect", str(tmp_path), code=1)
    assert result.stderr.startswith("CheckpointError: ") and "model.safetensors" in result.stderr


@pytest.mark.parametrize("path", ["/nowhere", "~/nowhere", "./nowhere"])
@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_path_is_no_repository(command: str, path: str) -> None:
    message = run(command, path, code=1).stderr
    assert f"ReadError: {path}: there is no such file or folder" in message and "hf://" not in message
