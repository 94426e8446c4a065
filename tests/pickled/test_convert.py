"""Conversions of checkpoints on disk: what transformers would save of the model, or the same tensors elsewhere."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file

from hf_zero_stream.errors import CheckpointError, ConfigError, SaveError, UnsupportedError
from hf_zero_stream.plugins.pickled import convert as converting
from hf_zero_stream.plugins.pickled.convert import convert
from tests.hostile.test_odd_folders import link_all, promise_in_vain
from tests.support.checkpoint_files import tensors_of
from tests.support.cli import run, run_json
from tests.support.saving import contents, different, save_stock
from tests.support.zoo import Checkpoint


BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that tensors are cut."""
    monkeypatch.setattr(converting, "CHUNK_BYTES", 4096)


@pytest.mark.parametrize("dtype", [None, FP32], ids=["same_dtype", "fp32"])
@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_vl_moe", "t5", "deepseek_v3"])
def test_hub_layout_is_what_transformers_saves(
    zoo_checkpoint: Checkpoint, tmp_path: Path, name: str, dtype: torch.dtype | None
) -> None:
    checkpoint = zoo_checkpoint(name, BF16)
    save_stock(name, checkpoint, tmp_path / "stock", BF16, cast=dtype)
    done = convert(checkpoint, tmp_path / "ours", layout="hub", max_shard_size="40KB", dtype=dtype)
    assert different(tmp_path / "ours", tmp_path / "stock") == []
    assert done.bytes_written == sum(value.nbytes for value in tensors_of(tmp_path / "ours").values())


@pytest.mark.parametrize("name", ["qwen3_moe", "bert"])
def test_model_layout(zoo_checkpoint: Checkpoint, tmp_path: Path, name: str) -> None:
    checkpoint = zoo_checkpoint(name, BF16)
    save_stock(name, checkpoint, tmp_path / "stock", BF16, save_original_format=False)
    convert(checkpoint, tmp_path / "ours", layout="model", max_shard_size="40KB")
    assert different(tmp_path / "ours", tmp_path / "stock") == []
    convert(tmp_path / "ours", tmp_path / "back", layout="hub", max_shard_size="40KB")
    save_stock(name, tmp_path / "ours", tmp_path / "stock hub", BF16)
    assert different(tmp_path / "back", tmp_path / "stock hub") == []


@pytest.mark.parametrize("size", ["10KB", "1GB"])
def test_same_layout(zoo_checkpoint: Checkpoint, tmp_path: Path, size: str) -> None:
    """No class of transformers is needed, and everything beside the weights is copied."""
    source = tmp_path / "source"
    convert(zoo_checkpoint("qwen3_moe", BF16), source, max_shard_size="40KB")
    (source / "tokenizer.json").write_text("{}")
    (source / "config.json").write_text(json.dumps({"model_type": "nobody knows", "torch_dtype": "bfloat16"}))
    done = convert(source, tmp_path / "ours", max_shard_size=size, dtype=FP32)
    before, after = tensors_of(source), tensors_of(tmp_path / "ours")
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], before[name].float()) for name in before)
    assert (len(done.files) > 3) == (size == "10KB")
    assert (tmp_path / "ours" / "tokenizer.json").read_text() == "{}"
    assert json.loads((tmp_path / "ours" / "config.json").read_text()) == {
        "model_type": "nobody knows",
        "dtype": "float32",
    }
    index = tmp_path / "ours" / "model.safetensors.index.json"
    if index.exists():
        weight_map = json.loads(index.read_text())["weight_map"]
        for name, file in weight_map.items():
            with safe_open(tmp_path / "ours" / file, "pt") as shard:
                assert name in shard.keys()
    else:
        assert done.files == ("model.safetensors",)


def pickled(source: Path, folder: Path, shards: int, zipped: bool = True) -> dict[str, torch.Tensor]:
    """The checkpoint `source` as files of ``torch.save`` in `folder`; its values, some of them in other strides."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    values = tensors_of(source)
    values |= {name: value.clone().t().contiguous().t() for name, value in values.items() if value.dim() == 2}
    if "lm_head.weight" in values:
        values["tied to lm_head.weight"] = values["lm_head.weight"]
    names = sorted(values)
    files = [f"pytorch_model-{number + 1:05}-of-{shards:05}.bin" for number in range(shards)]
    if shards == 1:
        files = ["pytorch_model.bin"]
    else:
        weight_map = {name: files[number % shards] for number, name in enumerate(names)}
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    for number, file in enumerate(files):
        part = {name: values[name] for name in names[number::shards]}
        torch.save(part, folder / file, _use_new_zipfile_serialization=zipped)
    return values


@pytest.mark.parametrize(("shards", "zipped"), [(1, True), (1, False), (3, True), (3, False)])
def test_files_of_torch_save(zoo_checkpoint: Checkpoint, tmp_path: Path, shards: int, zipped: bool) -> None:
    values = pickled(zoo_checkpoint("qwen3_moe", BF16), tmp_path / "bin", shards, zipped)
    done = convert(tmp_path / "bin", tmp_path / "ours", max_shard_size="40KB")
    found = tensors_of(tmp_path / "ours")
    assert found.keys() == values.keys() and all(torch.equal(found[name], values[name]) for name in values)
    assert done.bytes_written == sum(value.nbytes for value in values.values())
    assert not list((tmp_path / "ours").glob("*.bin*")) and (tmp_path / "ours" / "config.json").exists()
    with safe_open(tmp_path / "ours" / done.files[0], "pt") as shard:
        assert shard.metadata() == {"format": "pt"}
    if shards == 1:
        convert(tmp_path / "bin" / "pytorch_model.bin", tmp_path / "file", dtype=FP32)
        assert all(torch.equal(value, values[name].float()) for name, value in tensors_of(tmp_path / "file").items())


def test_layouts_of_tied_weights_of_torch_save(zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Two names of one storage, as ``torch.save(model.state_dict())`` writes them."""
    source = zoo_checkpoint("qwen3", BF16)
    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= model.state_dict().keys()
    shutil.copytree(source, tmp_path / "bin", ignore=shutil.ignore_patterns("*.safetensors*"))
    torch.save(model.state_dict(), tmp_path / "bin" / "pytorch_model.bin")
    for layout in ("same", "hub", "model"):
        convert(tmp_path / "bin", tmp_path / layout, layout=layout, max_shard_size="1GB")  # type: ignore[arg-type]
        loaded, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / layout, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
        assert all(torch.equal(value, model.state_dict()[name]) for name, value in loaded.state_dict().items())
    model.save_pretrained(tmp_path / "stock", max_shard_size="1GB")
    assert different(tmp_path / "hub", tmp_path / "stock") == []


def test_what_is_refused_of_torch_save(tmp_path: Path) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    torch.save({"model": {"a": torch.ones(2)}}, folder / "pytorch_model.bin")
    with pytest.raises(UnsupportedError, match="pytorch_model.bin: model is no plain tensor"):
        convert(folder, tmp_path / "ours")
    (folder / "pytorch_model.bin").unlink()
    torch.save({"a": torch.ones(2)}, folder / "pytorch_model-00001-of-00002.bin")
    weight_map = dict.fromkeys("ab", "pytorch_model-00001-of-00002.bin")
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    with pytest.raises(CheckpointError, match="promises tensor 'b'"):
        convert(folder, tmp_path / "ours")
    index.write_text(json.dumps({"metadata": {}, "weight_map": {"a": "../pytorch_model-00001-of-00002.bin"}}))
    with pytest.raises(CheckpointError, match="'..'"):
        convert(folder, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_in_place(zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    checkpoint = zoo_checkpoint("qwen3_moe", BF16)
    convert(checkpoint, tmp_path, max_shard_size="40KB")
    before = tensors_of(tmp_path)
    convert(tmp_path, tmp_path)
    assert [path.name for path in tmp_path.glob("*.safetensors*")] == ["model.safetensors"]
    assert all(torch.equal(before[name], value) for name, value in tensors_of(tmp_path).items())


def test_what_is_refused(zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    checkpoint = zoo_checkpoint("qwen3_moe", BF16)
    with pytest.raises(ConfigError, match='"same", "hub" or "model"; got \'gguf\''):
        convert(checkpoint, tmp_path / "ours", layout="gguf")  # type: ignore[arg-type]
    small = tmp_path / "small"
    small.mkdir()
    save_file({"weight": torch.ones(4, 4).to(torch.float8_e4m3fn)}, small / "model.safetensors")
    with pytest.raises(UnsupportedError, match="quantised .tensor 'weight'"):
        convert(small, tmp_path / "ours", dtype=FP32)
    (small / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json: expected a JSON object"):
        convert(small, tmp_path / "ours", dtype=FP32)
    (small / "model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(CheckpointError, match="model.safetensors"):
        convert(small, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_a_failure_leaves_what_was_there(
    zoo_checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(zoo_checkpoint("qwen3_moe", BF16), tmp_path, max_shard_size="40KB")
    before = contents(tmp_path)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(SaveError, match="No space left on device"):
        convert(tmp_path, tmp_path, dtype=FP32, max_shard_size="40KB")
    assert contents(tmp_path) == before


def test_command(zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    words = ["convert", str(zoo_checkpoint("bert", BF16)), str(tmp_path / "ours"), "--dtype", "float32"]
    found = run_json(*words)
    assert found["files"] == ["model.safetensors"] and found["bytes_written"] == 2 * found["bytes_read"]
    words[4] = "int7"
    assert "int7" in run(*words, code=2).stderr


def test_a_copy_does_not_lose_what_is_promised(zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """No model is known here that could say whether it is wanted."""
    folder = shutil.copytree(zoo_checkpoint("llama"), tmp_path / "llama")
    promise_in_vain(folder)
    with pytest.raises(CheckpointError, match="old_head"):
        convert(folder, tmp_path / "copy", progress=False)
    assert not list((tmp_path / "copy").glob("**/*"))


def test_the_copy_of_links_has_none(zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = shutil.copytree(zoo_checkpoint("llama"), tmp_path / "llama")
    link_all(folder)
    convert(folder, tmp_path / "copy", progress=False)
    assert not any(path.is_symlink() for path in (tmp_path / "copy").iterdir())
