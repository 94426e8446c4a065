"""Make what the examples need where there is no GPU and no network, in the working folder.

    python examples/tiny.py

A Qwen3-MoE of 0.5 MB with its tokenizer (tiny-moe), the same in FP8 (tiny-moe-fp8), texts with a part for evaluation
(texts), and pairs of answers of which one is preferred (pairs).
"""

import json
import random
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM


SPECIAL = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
WORDS = ["a", "small", "large", "model", "reader", "learns", "forgets", "words", "numbers", "quickly", "slowly"]
SIZES = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
BLOCK = 16
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK], "fmt": "e4m3"}


def sentence() -> str:
    return " ".join(random.choices(WORDS, k=12))


def write(file: str, rows: list[dict[str, str]]) -> None:
    path = Path(file)
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def quantise(source: Path, target: Path) -> None:
    """Write a checkpoint in FP8: of each projection a scale for each block."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    tensors = load_file(source / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        blocks = tensors[name].unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
        scale = blocks.abs().amax((1, 3), keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
        tensors[name] = (blocks / scale).to(torch.float8_e4m3fn).flatten(2, 3).flatten(0, 1).contiguous()
        tensors[f"{name}_scale_inv"] = scale.flatten(2, 3).flatten(0, 1).contiguous()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "quantization_config": FP8}))


def main() -> None:
    random.seed(0)
    torch.manual_seed(0)
    numbered = {word: number for number, word in enumerate([*SPECIAL.values(), *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(numbered, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL).save_pretrained("tiny-moe")
    Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=128, **SIZES, **HEADS)).save_pretrained("tiny-moe")
    quantise(Path("tiny-moe"), Path("tiny-moe-fp8"))
    write("texts/train.jsonl", [{"text": sentence()} for _ in range(64)])
    write("texts/validation.jsonl", [{"text": sentence()} for _ in range(8)])
    write("pairs/train.jsonl", [{"prompt": "a small", "chosen": " model learns words", "rejected": " words"}] * 64)


if __name__ == "__main__":
    main()
