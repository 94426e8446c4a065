"""2:4-sparse checkpoints of compressed-tensors are refused by name; stock leaves their weights random."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.distributed import DistributedConfig

import hf_zero_stream
from hf_zero_stream.errors import UnsupportedError
from tests.support.cluster import run_ranks
from tests.support.parity import ds_config


def sparse_checkpoint(dense: Path, folder: Path) -> Path:
    """The checkpoint in `dense` with two of each four elements, in the layout of sparse-24-bitmask."""
    folder.mkdir()
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in load_file(dense / "model.safetensors").items():
        module, is_projection = name.removesuffix(".weight"), name.endswith("_proj.weight")
        if not is_projection or weight.shape[1] % 8:
            tensors[name] = weight
            continue
        mask = torch.tensor([True, True, False, False]).repeat(weight.shape[1] // 4).expand_as(weight)
        bits = mask.view(len(weight), -1, 8).to(torch.uint8) << torch.arange(8, dtype=torch.uint8)
        tensors[f"{module}.compressed"] = weight[mask].view(len(weight), -1)
        tensors[f"{module}.bitmask"] = bits.sum(-1, dtype=torch.uint8)
        tensors[f"{module}.shape"] = torch.tensor(weight.shape)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    sparsity = {
        "format": "sparse-24-bitmask",
        "sparsity_structure": "2:4",
        "targets": ["Linear"],
        "ignore": ["lm_head"],
    }
    write_config(dense, folder, {"format": "dense", "config_groups": {}, "sparsity_config": sparsity})
    return folder


def write_config(dense: Path, folder: Path, quantisation: dict[str, Any]) -> None:
    config = json.loads((dense / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "compressed-tensors", "ignore": ["lm_head"], **quantisation}
    (folder / "config.json").write_text(json.dumps(config))


def refusals(folder: Path, way: str, dequantize: bool) -> str:
    kwargs: dict[str, Any] = {}
    if dequantize:
        kwargs["quantization_config"] = transformers.CompressedTensorsConfig(dequantize=True)
    with pytest.raises(UnsupportedError) as error:
        if way == "ZeRO-3":
            hf_zero_stream.StreamingAutoModelForCausalLM.from_pretrained(folder, ds_config=ds_config(), **kwargs)
        else:
            with hf_zero_stream.streaming():
                sharding = DistributedConfig(fsdp_size=2)
                transformers.AutoModelForCausalLM.from_pretrained(folder, distributed_config=sharding, **kwargs)
    return str(error.value)


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "dense")
    return tmp_path / "dense"


@pytest.mark.parametrize(("way", "dequantize"), [("ZeRO-3", False), ("ZeRO-3", True), ("FSDP2", False)])
def test_bitmasks(cluster: None, dense: Path, tmp_path: Path, way: str, dequantize: bool) -> None:
    folder = sparse_checkpoint(dense, tmp_path / "sparse")
    stock = [transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict() for _ in range(2)]
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(stock[0][name], stock[1][name]), "stock reads them, and they need not be refused"
    for text in run_ranks(2, refusals, folder, way, dequantize):
        assert text.startswith(f"{folder}: quantization_config has the format sparse-24-bitmask of compressed-tensors")


@pytest.mark.plugin("forecast")
@pytest.mark.parametrize("where", ["format", "group"])
def test_marlin(dense: Path, where: str) -> None:
    group: dict[str, Any] = {"targets": ["Linear"], "weights": {"num_bits": 4}}
    if where == "group":
        group["format"] = "marlin-24"
    write_config(
        dense, dense, {"format": "marlin-24" if where == "format" else "dense", "config_groups": {"g": group}}
    )
    with pytest.raises(UnsupportedError, match="has the format marlin-24 of compressed-tensors"):
        hf_zero_stream.plan(str(dense), world_size=2)
