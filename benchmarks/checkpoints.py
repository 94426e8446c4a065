"""The checkpoints that benchmarks load: three layouts, of any size, in bf16 or fp32, written once and kept.

| name | model | what it tries |
|---|---|---|
| moe | Qwen3-MoE, one tensor per expert in the file | thousands of small tensors stacked into fused ones |
| dense | Llama, untied | few large tensors, no conversion |
| transposed | Qwen3-VL-MoE, fused experts transposed in the file | a partition that is strided in the file |
"""

import shutil
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedConfig

from benchmarks.moe_checkpoint import moe_config, tensor_shapes, write_checkpoint


CACHE = Path(__file__).parent / ".cache"
KINDS = ("moe", "dense", "transposed")
NUM_SHARDS = 4

Shapes = list[tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk and how to load it."""

    kind: str
    folder: Path
    auto_class: str
    """Name of transformers' Auto class that loads it."""

    dtype: str
    """Dtype of its tensors, as torch calls it."""

    @property
    def shards(self) -> list[Path]:
        return sorted(self.folder.glob("*.safetensors"))

    @property
    def nbytes(self) -> int:
        """Size of all shards with their headers, in bytes."""
        return sum(path.stat().st_size for path in self.shards)


def cached_checkpoint(kind: str, gigabytes: float, fp32: bool = False) -> Checkpoint:
    """The checkpoint of this kind and size, in units of 10^9 bytes; written unless an earlier run has."""
    dtype = torch.float32 if fp32 else torch.bfloat16
    name = f"{kind}-{gigabytes:g}GB-{str(dtype).removeprefix('torch.')}"
    folder = CACHE / name
    if not folder.exists():
        partial = CACHE / f"{name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        config, shapes = _geometry(kind, gigabytes * 1e9 * 2 / dtype.itemsize)
        config.dtype = dtype
        write_checkpoint(partial, config, shapes, NUM_SHARDS, dtype)
        partial.rename(folder)
    auto_class = "AutoModelForImageTextToText" if kind == "transposed" else "AutoModelForCausalLM"
    return Checkpoint(kind, folder, auto_class, str(dtype).removeprefix("torch."))


def _geometry(kind: str, bf16_bytes: float) -> tuple[PreTrainedConfig, Shapes]:
    """A configuration whose weights in bf16 take about so many bytes, and the checkpoint's tensors."""
    if kind == "moe":
        config = moe_config(bf16_bytes)
        return config, list(tensor_shapes(config))
    if kind == "dense":
        config = _dense_config(bf16_bytes)
        return config, _model_shapes(transformers.LlamaForCausalLM, config)
    if kind == "transposed":
        config = _transposed_config(bf16_bytes)
        shapes = _model_shapes(transformers.Qwen3VLMoeForConditionalGeneration, config)
        return config, [(name, _transpose(shape) if ".experts." in name else shape) for name, shape in shapes]
    raise ValueError(f"checkpoint: expected one of {', '.join(KINDS)}; got {kind!r}")


def _dense_config(bf16_bytes: float) -> transformers.LlamaConfig:
    num_layers = 16
    hidden_size = max(64, 64 * round((bf16_bytes / 2 / num_layers / 10.75) ** 0.5 / 64))
    config = transformers.LlamaConfig(
        vocab_size=32003 if bf16_bytes >= 1e9 else 1009,
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 64,
        num_key_value_heads=hidden_size // 64,
        intermediate_size=8,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
    )
    # The feed-forward layers take what the rest leaves.
    others = sum(prod(shape) for name, shape in _model_shapes(transformers.LlamaForCausalLM, config))
    width = 8 + (bf16_bytes / 2 - others) / (num_layers * 3 * hidden_size)
    config.intermediate_size = max(8, 8 * round(width / 8))
    return config


def _transposed_config(bf16_bytes: float) -> transformers.Qwen3VLMoeConfig:
    text = moe_config(bf16_bytes)
    if text.hidden_size in (text.moe_intermediate_size, 2 * text.moe_intermediate_size):
        text.moe_intermediate_size += 8  # transformers tells the layouts apart by their shapes
    quarter = text.head_dim // 8
    names = (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
        "moe_intermediate_size",
        "num_experts",
        "num_experts_per_tok",
        "max_position_embeddings",
    )
    rope = {
        "rope_type": "default",
        "rope_theta": 1e6,
        "mrope_section": [2 * quarter, quarter, quarter],
        "mrope_interleaved": True,
    }
    vision = dict(
        depth=2,
        hidden_size=64,
        intermediate_size=128,
        num_heads=4,
        out_hidden_size=text.hidden_size,
        num_position_embeddings=256,
        deepstack_visual_indexes=[0],
    )
    return transformers.Qwen3VLMoeConfig(
        text_config={**{name: getattr(text, name) for name in names}, "rope_parameters": rope},
        vision_config=vision,
        tie_word_embeddings=False,
        image_token_id=3,
        vision_start_token_id=4,
        vision_end_token_id=5,
        video_token_id=6,
        architectures=["Qwen3VLMoeForConditionalGeneration"],
    )


def _model_shapes(model_class: type, config: PreTrainedConfig) -> Shapes:
    """Names and shapes of a model's state dict, from a model without memory."""
    with torch.device("meta"):
        model = model_class(config)
    return [(name, tuple(tensor.shape)) for name, tensor in model.state_dict().items()]


def _transpose(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-2], shape[-1], shape[-2])
