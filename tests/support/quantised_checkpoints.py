"""Tiny checkpoints in the quantised formats of the hub, and the models of the packed matrices.

- Tiny checkpoints in the quantised formats of the hub: FP8 by blocks, MXFP4, compressed-tensors.
- The models of the packed matrices: each format that stays quantised, dense and as a mixture where it has one.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file


BLOCK = 16


def _save(model: transformers.PreTrainedModel, folder: Path) -> dict[str, torch.Tensor]:
    """Save `model` with random values in bf16; returns the tensors of its only shard."""
    torch.manual_seed(0)
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(std=0.3)
    model.to(torch.bfloat16).save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def _write(folder: Path, tensors: dict[str, torch.Tensor], quantization: dict[str, Any]) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))


# ------------------------------------------------------------------------------------------------ FP8 by blocks


def _deepseek_v3(width: int) -> transformers.PreTrainedModel:
    config = transformers.DeepseekV3Config(
        vocab_size=48,
        hidden_size=2 * width,
        intermediate_size=3 * width,
        moe_intermediate_size=width,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=24,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=16,
    )
    return transformers.DeepseekV3ForCausalLM(config)


_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK], "fmt": "e4m3"}


def fp8(folder: Path, width: int = 16) -> None:
    """DeepSeek's block FP8: each linear weight in e4m3 with one fp32 scale per block."""
    quantise_in_blocks(_deepseek_v3(width), folder)


def dense_fp8(folder: Path, width: int = 32) -> None:
    """Qwen3's block FP8, without experts."""
    quantise_in_blocks(_qwen3(0, width, intermediate_size=3 * width), folder)


def quantise_in_blocks(model: transformers.PreTrainedModel, folder: Path) -> None:
    """Save `model` in block FP8, with all that is named as a projection quantised."""
    tensors = _save(model, folder)
    for name, weight in list(tensors.items()):
        if name.endswith("proj.weight") and "_a_proj" not in name and "_b_proj" not in name:
            tensors[name], tensors[name.replace(".weight", ".weight_scale_inv")] = _in_blocks(weight)
    _write(folder, tensors, _FP8)


def fp8_with_a_short_block(folder: Path) -> dict[str, torch.Tensor]:
    """As DeepSeek-V3's `kv_a_proj_with_mqa`: 40 rows in blocks of 16. Returns what they are when dequantised."""
    tensors = _save(_deepseek_v3(16), folder)
    expected = {}
    for name, weight in list(tensors.items()):
        if name.endswith("kv_a_proj_with_mqa.weight"):
            tensors[name], scale = _in_blocks(weight)
            tensors[name.replace(".weight", ".weight_scale_inv")] = scale
            each = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[: weight.shape[0], : weight.shape[1]]
            expected[name] = (tensors[name].float() * each).bfloat16()
    _write(folder, tensors, _FP8)
    return expected


def _in_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.reshape(padded.shape[0] // BLOCK, BLOCK, -1, BLOCK)
    scale = blocks.abs().amax((1, 3)) / 448
    quantised = (blocks / scale[:, None, :, None]).reshape(padded.shape)[:rows, :columns]
    return quantised.to(torch.float8_e4m3fn).contiguous(), scale


def fp4_experts(folder: Path, width: int = 16) -> None:
    """DeepSeek-V4's layout: the experts as pairs of float4 values in a byte, with a power of two for 16 of them."""
    tensors = _save(_deepseek_v3(width), folder)
    for name, weight in list(tensors.items()):
        if ".experts." in name:
            rows, columns = weight.shape
            tensors[name] = torch.randint(-128, 128, (rows, columns // 2), dtype=torch.int8)
            scale = torch.randint(118, 132, (rows, columns // BLOCK), dtype=torch.uint8)
            tensors[name.replace(".weight", ".weight_scale_inv")] = scale.view(torch.float8_e8m0fnu)
    _write(folder, tensors, _FP8)


# -------------------------------------------------------------------------------------------------------- MXFP4


def mxfp4(folder: Path, width: int = 32) -> None:
    """gpt-oss's MXFP4: experts as nibbles in `_blocks`, one exponent per 32 values in `_scales`."""
    config = transformers.GptOssConfig(
        vocab_size=48,
        hidden_size=2 * width,
        intermediate_size=3 * width,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_local_experts=3,
        num_experts_per_tok=2,
    )
    tensors = _save(transformers.GptOssForCausalLM(config), folder)
    for name, weight in list(tensors.items()):
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inner, outer = weight.shape
            blocks = torch.randint(256, (experts, outer, inner // 32, 16), dtype=torch.uint8)
            tensors[f"{name}_blocks"] = blocks
            tensors[f"{name}_scales"] = torch.randint(110, 135, (experts, outer, inner // 32), dtype=torch.uint8)
            del tensors[name]
    _write(folder, tensors, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]})


# ------------------------------------------------------------------------------------------- compressed-tensors


def _qwen3(experts: int, width: int, **changes: int) -> transformers.PreTrainedModel:
    sizes = {
        "vocab_size": 48,
        "hidden_size": 2 * width,
        "intermediate_size": width + 8,  # no multiple of a block: the last ones are cut short
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        **changes,
    }
    if not experts:
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes))
    of_experts = {
        "num_experts": experts,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": sizes["intermediate_size"],
    }
    config = transformers.Qwen3MoeConfig(**sizes, **of_experts, mlp_only_layers=[1])
    return transformers.Qwen3MoeForCausalLM(config)


_FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
_INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "dynamic": False}
SCHEMES: dict[str, tuple[str, dict[str, Any]]] = {
    "float8 by channel": ("float-quantized", {**_FLOAT8, "strategy": "channel"}),
    "float8 by tensor": ("float-quantized", {**_FLOAT8, "strategy": "tensor"}),
    "float8 by block": ("float-quantized", {**_FLOAT8, "strategy": "block", "block_structure": [BLOCK, BLOCK]}),
    "int8 by channel": ("int-quantized", {**_INT4, "num_bits": 8, "strategy": "channel"}),
    "packed int8 by channel": ("pack-quantized", {**_INT4, "num_bits": 8, "strategy": "channel"}),
    "packed int8 by group": ("pack-quantized", {**_INT4, "num_bits": 8, "strategy": "group", "group_size": 8}),
    "int4 by channel": ("pack-quantized", {**_INT4, "strategy": "channel"}),
    "int4 by group": ("pack-quantized", {**_INT4, "strategy": "group", "group_size": 8}),
    "int4 with zero points": ("pack-quantized", {**_INT4, "symmetric": False, "strategy": "group", "group_size": 8}),
    "int4 with zero points by channel": ("pack-quantized", {**_INT4, "symmetric": False, "strategy": "channel"}),
}


def compressed_tensors(
    folder: Path,
    scheme_name: str,
    width: int = 32,
    experts: bool | None = None,
    input_activations: dict[str, Any] | None = None,
) -> None:
    """A checkpoint made by the package itself; by default with `experts` where transformers can dequantise them."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    format_name, weights = SCHEMES[scheme_name]
    # Of a mixture's experts, transformers dequantises neither blocks nor int8 nor zero points.
    if experts is None:
        experts = weights["strategy"] != "block" and weights["symmetric"] and format_name != "int-quantized"
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights), format=format_name)
    compressor = BaseCompressor.get_value_from_registry(format_name)
    tensors = _save(_qwen3(3 if experts else 0, width), folder)
    for name, weight in list(tensors.items()):
        if not name.endswith("proj.weight"):
            continue
        low, high = _ranges_of(weight.float(), weights)
        scale, zero_point = calculate_qparams(low, high, scheme.weights)
        state = {"weight": weight, "weight_scale": scale.to(torch.bfloat16)}
        if not weights["symmetric"]:
            state["weight_zero_point"] = zero_point
        del tensors[name]
        for key, value in compressor.compress(state, scheme).items():
            tensors[name.removesuffix("weight") + key] = value.contiguous()
    group = {"targets": ["Linear"], "weights": weights, "input_activations": input_activations, "format": format_name}
    groups = {"group_0": group}
    _write(
        folder,
        tensors,
        {
            "quant_method": "compressed-tensors",
            "format": format_name,
            "config_groups": groups,
            "ignore": ["lm_head"],
            "quantization_status": "compressed",
        },
    )


def _ranges_of(weight: torch.Tensor, weights: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest and largest value for each scale."""
    rows, columns = weight.shape
    match weights["strategy"]:
        case "tensor":
            return weight.amin().reshape(1), weight.amax().reshape(1)
        case "channel":
            return weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
        case "group":
            groups = weight.reshape(rows, -1, weights["group_size"])
            return groups.amin(-1), groups.amax(-1)
    padded = torch.nn.functional.pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.reshape(padded.shape[0] // BLOCK, BLOCK, -1, BLOCK)
    return blocks.amin((1, 3)), blocks.amax((1, 3))


# ------------------------------------------------------------------------------------------------- bitsandbytes


def unquantised(folder: Path, experts: int = 0, width: int = 64, kind: str = "qwen3", **changes: int) -> None:
    """A checkpoint in bf16, to be quantised while it is loaded; weights of the `kind` "gpt2" lie transposed.

    `changes` are those of Qwen3's config.
    """
    if kind == "gpt2":
        config = transformers.GPT2Config(vocab_size=48, n_embd=2 * width, n_layer=2, n_head=2, n_positions=32)
        _save(transformers.GPT2LMHeadModel(config), folder)
    else:
        _save(_qwen3(experts, width, **changes), folder)


def bitsandbytes(folder: Path, kind: str, width: int = 32, dequantised: Path | None = None, experts: int = 0) -> None:
    """A checkpoint quantised by the package itself: `kind` is "nf4", "fp4", "double nf4" or "int8".

    In `dequantised` the same model is saved with the values that bitsandbytes gives it back.
    """
    from bitsandbytes import functional

    model = _qwen3(experts, width)
    tensors = _save(model, folder)
    plain = dict(tensors)
    for name, weight in list(tensors.items()):
        if not name.endswith("proj.weight"):
            continue
        if kind == "int8":
            values, scales, _ = functional.int8_vectorwise_quant(weight.half())
            tensors[name], tensors[name.replace("weight", "SCB")] = values, scales
            tensors[name.replace("weight", "weight_format")] = torch.tensor(0, dtype=torch.uint8)
            plain[name] = functional.int8_vectorwise_dequant(values, scales)
            continue
        packed, state = functional.quantize_4bit(weight, quant_type=kind[-3:], compress_statistics="double" in kind)
        tensors[name] = packed
        tensors.update({f"{name}.{key}": value for key, value in state.as_dict(packed=True).items()})
        # bitsandbytes 0.50 on a CPU takes wrong scales for rows that end within a block, but not for a single row.
        state.shape = torch.Size((1, weight.numel()))
        plain[name] = functional.dequantize_4bit(packed, state).view_as(weight)
    quantization = {"quant_method": "bitsandbytes", "load_in_8bit": kind == "int8", "load_in_4bit": kind != "int8"}
    if kind != "int8":
        quantization |= {"bnb_4bit_quant_type": kind[-3:], "bnb_4bit_use_double_quant": "double" in kind}
    if dequantised is not None:
        model.save_pretrained(dequantised)
        save_file(plain, dequantised / "model.safetensors", metadata={"format": "pt"})
    _write(folder, tensors, quantization)


WITHOUT_EXPERTS = ("float8 by block", "int8 by channel", "int4 with zero points", "int4 with zero points by channel")
"""Schemes of compressed-tensors in which transformers dequantises no experts."""

BITSANDBYTES = ("nf4", "fp4", "double nf4", "int8")


def _bitsandbytes(folder: Path, kind: str, experts: int, width: int = 64) -> None:
    bitsandbytes(folder, kind, width=width, dequantised=folder / "plain", experts=experts)


MODELS: dict[str, Callable[..., Any]] = {
    "FP8 by blocks, dense": dense_fp8,
    "FP8 by blocks, mixture": fp8,
    "FP8 with experts in float4, mixture": fp4_experts,
    "MXFP4, mixture": mxfp4,
    **{f"{name}, dense": partial(compressed_tensors, scheme_name=name, experts=False) for name in SCHEMES},
    **{
        f"{name}, mixture": partial(compressed_tensors, scheme_name=name, experts=True)
        for name in SCHEMES
        if name not in WITHOUT_EXPERTS
    },
    **{f"{kind}, dense": partial(_bitsandbytes, kind=kind, experts=0) for kind in BITSANDBYTES},
    **{f"{kind}, mixture": partial(_bitsandbytes, kind=kind, experts=3) for kind in BITSANDBYTES},
}
"""Each makes a checkpoint in a folder; the argument `width` makes it larger."""


class Folders:
    """Checkpoints of `MODELS`, made when they are first asked for."""

    def __init__(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        self._factory = tmp_path_factory
        self._made: dict[tuple[str, int], Path] = {}

    def __call__(self, name: str, width: int = 0) -> Path:
        if (name, width) not in self._made:
            folder = self._made[name, width] = self._factory.mktemp("checkpoint")
            MODELS[name](folder, **{"width": width} if width else {})
        return self._made[name, width]


def in_file(folder: Path) -> int:
    """Bytes of the tensors of the checkpoint in `folder`."""
    with open(folder / "model.safetensors", "rb") as file:
        header = int.from_bytes(file.read(8), "little")
    return (folder / "model.safetensors").stat().st_size - 8 - header
