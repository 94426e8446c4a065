"""DeepSpeed's tools on states of ours: ``zero_to_fp32`` answers, and what cannot load them says what they are."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.checkpoint import ds_to_universal
from deepspeed.utils import zero_to_fp32
from safetensors.torch import load_file

import hf_zero_stream
from hf_zero_stream import StreamingConfig
from hf_zero_stream.checkpoint.deepspeed_names import remove_signs, write_signs
from hf_zero_stream.plugins.pickled.convert import convert
from tests import sampling
from tests.support.cluster import RankFailure, run_ranks
from tests.support.training_state import all_in_one_group, engine_of, state_config, train


Checkpoint = Callable[..., Path]

WITHOUT_PACKAGES = """
import runpy, sys
sys.modules["hf_zero_stream"] = sys.modules["deepspeed"] = None
sys.argv = sys.argv[1:]
sys.path.insert(0, ".")
runpy.run_path(sys.argv[0], run_name="__main__")
"""


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


def load_outside(folder: Path, source: Path, config: dict[str, Any]) -> None:
    engine_of(folder, config, with_frozen_and_buffer).load_checkpoint(str(source))


def stock_over_ours(folder: Path, target: Path, config: dict[str, Any]) -> list[float]:
    """The losses after a resume from what DeepSpeed has saved, in streaming(), into the folder of a state of ours."""
    engine = engine_of(folder, config, with_frozen_and_buffer)
    train(engine, range(2))
    with hf_zero_stream.streaming():
        engine.save_checkpoint(str(target))
    with hf_zero_stream.streaming(StreamingConfig(training_state=False)):
        engine.save_checkpoint(str(target))
    expected = train(engine, (3,))
    again = engine_of(folder, config, with_frozen_and_buffer)
    again.load_checkpoint(str(target))
    assert train(again, (3,)) == expected
    return expected


def differences(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """The names of tensors that only one of the two has, or that are not equal."""
    return sorted(found.keys() ^ expected.keys()) + [
        name
        for name, value in expected.items()
        if name in found and (found[name].dtype != value.dtype or not torch.equal(found[name], value))
    ]


def in_dtype(tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in tensors.items()}


def run_script(ours: str, target: Path, *options: str, script: str = "zero_to_fp32.py") -> None:
    """Run the script in the folder `ours`, as if neither we nor DeepSpeed were installed."""
    command = [sys.executable, "-c", WITHOUT_PACKAGES, script, ".", str(target), *options]
    subprocess.run(command, check=True, cwd=ours, timeout=120)


def ties(state_dict: dict[str, torch.Tensor]) -> list[list[str]]:
    groups: dict[int, list[str]] = {}
    for name, value in state_dict.items():
        groups.setdefault(value.data_ptr(), []).append(name)
    return sorted(sorted(names) for names in groups.values() if len(names) > 1)


@pytest.mark.parametrize("stage", [2, 3])
def test_tools(
    cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: int
) -> None:
    """Functions, script, `convert` and universal checkpoints: of ours as of DeepSpeed's own folder, or a sentence."""
    folder = zoo_checkpoint("qwen3")
    config = state_config(stage)
    run_ranks(2, save_by_both, folder, tmp_path, config)
    stock, ours = str(tmp_path / "stock"), str(tmp_path / "ours")
    for kwargs in ({}, {"tag": "global_step2"}, {"exclude_frozen_parameters": True}):
        expected = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(stock, **kwargs)
        with hf_zero_stream.streaming():
            assert not differences(zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(stock, **kwargs), expected)
            found = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(ours, **kwargs)
        assert not differences(found, expected)
        assert ties(found) == ties(expected) and ties(found)
        assert {"seen", "scale"} <= found.keys()
    expected = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(stock)

    zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(stock, str(tmp_path / "by stock"), "80KB")
    wanted = files_in(tmp_path / "by stock")
    assert "pytorch_model.bin.index.json" in wanted
    with hf_zero_stream.streaming():
        zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(ours, str(tmp_path / "by ours"), "80KB")
    run_script(ours, tmp_path / "by script", "--max_shard_size", "80KB")
    for name in ("by ours", "by script"):
        found = files_in(tmp_path / name)
        assert found.keys() == wanted.keys()
        for file, content in wanted.items():
            assert found[file] == content if file.endswith(".json") else not differences(found[file], content)
    if not sampling.is_sample:
        # Of tied parameters DeepSpeed's script writes no safetensors.
        run_script(ours, tmp_path / "safe", "--safe_serialization")
        assert not differences(load_file(tmp_path / "safe" / "model.safetensors"), in_dtype(expected, torch.float32))
    run_script(ours, tmp_path / "bf16", "--dtype", "bf16", script="zero_to_torch.py")
    assert not differences(torch.load(tmp_path / "bf16" / "pytorch_model.bin"), in_dtype(expected, torch.bfloat16))

    with hf_zero_stream.streaming():
        model = engine_free_model(folder)
        zero_to_fp32.load_state_dict_from_zero_checkpoint(model, ours)
    assert not differences(dict(model.state_dict()), in_dtype(expected, torch.float32))

    convert(Path(ours) / "global_step2", tmp_path / "converted", layout="same", progress=False)
    converted = load_file(tmp_path / "converted" / "model.safetensors")
    assert all(torch.equal(value, expected[name].to(value.dtype)) for name, value in converted.items())

    with pytest.raises(RankFailure, match="hf_zero_stream training state, which DeepSpeed cannot load: go on inside"):
        run_ranks(2, load_outside, folder, tmp_path / "ours", config)
    arguments = ["--input_folder", f"{ours}/global_step2", "--output_folder", str(tmp_path / "universal")]
    monkeypatch.setattr("sys.argv", ["ds_to_universal", *arguments, "--num_extract_workers", "1"])
    with pytest.raises(ModuleNotFoundError, match="without ds_to_universal; its fp32 values: the script"):
        ds_to_universal.main(ds_to_universal.parse_arguments())


def engine_free_model(folder: Path) -> Any:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with_frozen_and_buffer(model)
    model.register_buffer("scale", torch.zeros(3))
    return model


def files_in(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix == ".json":
            found[path.name] = json.loads(path.read_text())
        else:
            found[path.name] = load_file(path) if path.suffix == ".safetensors" else torch.load(path)
    return found


def test_deepspeed_saves_into_a_folder_of_ours(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """What says that a folder is ours is gone then, and both find DeepSpeed's checkpoint."""
    run_ranks(2, stock_over_ours, zoo_checkpoint("qwen3"), tmp_path / "both", state_config(3))


def test_each_rank_that_has_saved_meets_a_sign(tmp_path: Path) -> None:
    write_signs(tmp_path, 12)
    names = [f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(12)]
    for path in (tmp_path / name for name in [*names, "mp_rank_00_model_states.pt"]):
        with pytest.raises(ModuleNotFoundError, match="inside hf_zero_stream's streaming"):
            torch.load(path, weights_only=False)
    (tmp_path / names[0]).write_bytes(b"what DeepSpeed has written")
    remove_signs(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == names[:1]
