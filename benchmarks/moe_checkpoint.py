"""Write a Qwen3-MoE checkpoint of any size, in the hub's layout, without ever building the model.

python -m benchmarks.moe_checkpoint FOLDER --gigabytes 3.4
"""

import argparse
import json
import time
from collections.abc import Iterator
from math import prod
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PreTrainedConfig, Qwen3MoeConfig


BLOCK_NUMEL = 1 << 22


def moe_config(target_bytes: float, num_layers: int = 8, num_experts: int = 128) -> Qwen3MoeConfig:
    """A geometry whose bf16 weights take about `target_bytes` (within 1% from 1.5 GB up, 6% at 100 MB).

    Proportions follow Qwen3-30B-A3B: experts 3/8 as wide as the model, heads of 128, four queries per key.
    """
    expert_rows = num_layers * num_experts * 3
    hidden_size = max(64, 64 * round((target_bytes / (2 * expert_rows * 3 / 8)) ** 0.5 / 64))
    keys = max(1, hidden_size // 512)
    config = Qwen3MoeConfig(
        vocab_size=8011 if target_bytes >= 1e9 else 1009,
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=keys * max(4, hidden_size // 128 // keys),
        num_key_value_heads=keys,
        head_dim=128 if hidden_size >= 512 else 16,
        intermediate_size=3 * hidden_size,
        moe_intermediate_size=8,
        num_experts=num_experts,
        num_experts_per_tok=min(8, num_experts),
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=False,
        bos_token_id=None,
        architectures=["Qwen3MoeForCausalLM"],
        dtype=torch.bfloat16,
    )
    # Everything but the experts is settled now; they take what is left, in the steps of 8 that kernels like.
    others = sum(prod(shape) for name, shape in tensor_shapes(config) if ".experts." not in name)
    width = (target_bytes / 2 - others) / (expert_rows * hidden_size)
    config.moe_intermediate_size = max(8, 8 * round(width / 8))
    return config


def tensor_shapes(config: Qwen3MoeConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor of the checkpoint, in the hub's order: one per expert and projection."""
    hidden, expert_width, head = config.hidden_size, config.moe_intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.self_attn.q_proj.weight", (queries, hidden)
        yield f"{prefix}.self_attn.k_proj.weight", (keys, hidden)
        yield f"{prefix}.self_attn.v_proj.weight", (keys, hidden)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, queries)
        yield f"{prefix}.self_attn.q_norm.weight", (head,)
        yield f"{prefix}.self_attn.k_norm.weight", (head,)
        yield f"{prefix}.mlp.gate.weight", (config.num_experts, hidden)
        for expert in range(config.num_experts):
            yield f"{prefix}.mlp.experts.{expert}.gate_proj.weight", (expert_width, hidden)
            yield f"{prefix}.mlp.experts.{expert}.up_proj.weight", (expert_width, hidden)
            yield f"{prefix}.mlp.experts.{expert}.down_proj.weight", (hidden, expert_width)
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (config.vocab_size, hidden)


def make_moe_checkpoint(
    folder: str | Path, target_bytes: float, num_layers: int = 8, num_experts: int = 128, num_shards: int = 4
) -> Path:
    """Write shards, index and configuration; holds one shard in memory at a time. Returns the folder."""
    config = moe_config(target_bytes, num_layers, num_experts)
    return write_checkpoint(folder, config, list(tensor_shapes(config)), num_shards)


def write_checkpoint(
    folder: str | Path,
    config: PreTrainedConfig,
    shapes: list[tuple[str, tuple[int, ...]]],
    num_shards: int = 4,
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    """Write tensors of these names and shapes, with random values, beside `config`. Returns the folder."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)

    shards = _split(shapes, num_shards)
    values = _Values(dtype)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        # Not kept in a variable: the next shard would be made while this one is still held.
        save_file(values.tensors(shard), folder / file_name, metadata={"format": "pt"})
        weight_map |= {name: file_name for name, _ in shard}
    total_bytes = sum(dtype.itemsize * prod(shape) for _, shape in shapes)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return folder


def _split(tensors: list[tuple[str, tuple[int, ...]]], num_shards: int) -> list[list[tuple[str, tuple[int, ...]]]]:
    """Cut the list, in order, into `num_shards` parts of about the same number of bytes."""
    total = sum(prod(shape) for _, shape in tensors)
    shards: list[list[tuple[str, tuple[int, ...]]]] = [[] for _ in range(num_shards)]
    before = 0
    for name, shape in tensors:
        shards[before * num_shards // total].append((name, shape))
        before += prod(shape)
    return [shard for shard in shards if shard]


class _Values:
    """Random weights at the speed of a copy: every tensor is another stretch of one random block."""

    def __init__(self, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        # An odd length, so that repeating it never lines up with a row.
        self.block = torch.randn(BLOCK_NUMEL + 1, generator=generator).mul_(0.02).to(dtype)
        self.position = 0

    def tensors(self, shard: list[tuple[str, tuple[int, ...]]]) -> dict[str, torch.Tensor]:
        return {name: self._tensor(name, shape) for name, shape in shard}

    def _tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        flat = torch.empty(prod(shape), dtype=self.block.dtype)
        done = 0
        while done < flat.numel():
            count = min(flat.numel() - done, self.block.numel() - self.position)
            flat[done : done + count] = self.block[self.position : self.position + count]
            self.position = (self.position + count) % self.block.numel()
            done += count
        # Tensors one lap of the block apart must differ too; and norms sit around one.
        flat[:1] += 1.0 / 64 * (_hash(name) % 61)
        return (flat + 1 if "norm" in name else flat).view(shape)


def _hash(name: str) -> int:
    """A small hash that, unlike Python's, is the same in every process."""
    return sum((position + 1) * byte for position, byte in enumerate(name.encode()))


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a Qwen3-MoE checkpoint of random bf16 weights.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gigabytes", type=float, default=3.4, help="total size, in units of 10^9 bytes")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--shards", type=int, default=4)
    arguments = parser.parse_args()
    start = time.perf_counter()
    make_moe_checkpoint(
        arguments.folder, arguments.gigabytes * 1e9, arguments.layers, arguments.experts, arguments.shards
    )
    written = sum(path.stat().st_size for path in arguments.folder.glob("*.safetensors"))
    print(f"{arguments.folder}: {written / 1e9:.2f} GB in {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
