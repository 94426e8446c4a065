"""Quantised checkpoints come out dequantised, bit for bit as in plain loading, and partitioned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.cluster import run_ranks
from tests.parity import load_and_compare


BLOCK = 16


def save(model: transformers.PreTrainedModel, folder: Path) -> dict[str, torch.Tensor]:
    """Save `model` with random values in bf16; returns the tensors of its only shard."""
    torch.manual_seed(0)
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(std=0.3)
    model.to(torch.bfloat16).save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def write(folder: Path, tensors: dict[str, torch.Tensor], quantization: dict[str, Any]) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))


def deepseek_v3() -> transformers.PreTrainedModel:
    config = transformers.DeepseekV3Config(
        vocab_size=48,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=16,
    )
    return transformers.DeepseekV3ForCausalLM(config)


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DeepSeek's block FP8: each linear weight in e4m3 with one fp32 scale per block."""
    folder = tmp_path_factory.mktemp("fp8")
    tensors = save(deepseek_v3(), folder)
    for name, weight in list(tensors.items()):
        if not name.endswith("proj.weight") and "_a_proj" not in name and "_b_proj" not in name:
            continue
        rows, columns = weight.shape
        blocks = weight.float().reshape(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
        scale = blocks.abs().amax((1, 3)) / 448
        quantised = (blocks / scale[:, None, :, None]).reshape(rows, columns)
        tensors[name] = quantised.to(torch.float8_e4m3fn)
        tensors[name.replace(".weight", ".weight_scale_inv")] = scale
    write(
        folder,
        tensors,
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK], "fmt": "e4m3"},
    )
    return folder


@pytest.fixture(scope="module")
def mxfp4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """gpt-oss's MXFP4: experts as nibbles in `_blocks`, one exponent per 32 values in `_scales`."""
    folder = tmp_path_factory.mktemp("mxfp4")
    config = transformers.GptOssConfig(
        vocab_size=48,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_local_experts=3,
        num_experts_per_tok=2,
    )
    tensors = save(transformers.GptOssForCausalLM(config), folder)
    for name, weight in list(tensors.items()):
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inner, outer = weight.shape
            blocks = torch.randint(256, (experts, outer, inner // 32, 16), dtype=torch.uint8)
            tensors[f"{name}_blocks"] = blocks
            tensors[f"{name}_scales"] = torch.randint(110, 135, (experts, outer, inner // 32), dtype=torch.uint8)
            del tensors[name]
    write(folder, tensors, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]})
    return folder


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("format_name", ["fp8", "mxfp4"])
def test_dequantised_as_plain(
    cluster: None, request: pytest.FixtureRequest, format_name: str, world_size: int
) -> None:
    folder = request.getfixturevalue(format_name)
    config_class = {"fp8": transformers.FineGrainedFP8Config, "mxfp4": transformers.Mxfp4Config}[format_name]
    kwargs = {"quantization_config": config_class(dequantize=True)}
    for result in run_ranks(
        world_size, load_and_compare, "AutoModelForCausalLM", folder, torch.bfloat16, torch.bfloat16, kwargs
    ):
        assert result["differences"] == []
        assert result["info"] == result["plain_info"]
        assert all(rank["materialised"] == [] for rank in result["report"]["ranks"])
    read = sum(rank["bytes"]["read"] for rank in result["report"]["ranks"])
    print(format_name, world_size, read, (folder / "model.safetensors").stat().st_size)
