"""Checkpoints of true size that take no disk: headers as in the hub's layout, data a hole in the file.

Names and shapes come from the model itself, built on the meta device, with transformers' conversions reversed as
``save_pretrained`` does. A sparse file reads as zeros at the speed of memory, and only its header is stored.
"""

from __future__ import annotations

import json
from itertools import accumulate
from math import prod
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.core_model_loading import revert_weight_conversion


SHARD_BYTES = 8_000_000_000
BLOCK = 128

Entry = tuple[str, tuple[int, ...]]
"""Dtype, as safetensors names it, and shape."""


def make_sparse_checkpoint(
    folder: Path, config: PreTrainedConfig, fp8: bool = False, shard_bytes: int = SHARD_BYTES
) -> Path:
    """Write a checkpoint of `config`'s model into `folder`, unless it is there already; returns the folder.

    Args:
        fp8: as DeepSeek publishes its models: linear layers in e4m3 with an fp32 scale for each 128 x 128 block, the
            rest in bf16; otherwise all in bf16.
    """
    if (folder / "model.safetensors.index.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    entries = {name: ("BF16", shape) for name, shape in hub_shapes(config).items()}
    if fp8:
        entries = in_fp8(entries)
    sizes = [nbytes(*entry) for entry in entries.values()]
    shard_of = [before // shard_bytes for before in accumulate(sizes, initial=0)][:-1]
    count = shard_of[-1] + 1
    weight_map: dict[str, str] = {}
    for number in range(count):
        name = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
        group = [key for key, shard in zip(entries, shard_of, strict=True) if shard == number]
        if group:
            write_shard(folder / name, {key: entries[key] for key in group})
        weight_map |= dict.fromkeys(group, name)
    config.dtype = torch.bfloat16
    config.architectures = [type(meta_model(config)).__name__]
    if fp8:
        config.quantization_config = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
        }
    config.save_pretrained(folder)
    index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def in_fp8(entries: dict[str, Entry]) -> dict[str, Entry]:
    """The same checkpoint with quantised linear layers, in order of name."""
    quantised: dict[str, Entry] = {}
    for name, (dtype, shape) in entries.items():
        if name.endswith("_proj.weight") or "_proj_with_mqa.weight" in name:
            quantised[name] = ("F8_E4M3", shape)
            quantised[f"{name}_scale_inv"] = ("F32", tuple(-(-size // BLOCK) for size in shape))
        else:
            quantised[name] = (dtype, shape)
    return quantised


def nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    return {"BF16": 2, "F32": 4, "F8_E4M3": 1}[dtype] * prod(shape)


def meta_model(config: PreTrainedConfig) -> torch.nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def hub_shapes(config: PreTrainedConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that ``save_pretrained`` would write, in order of name."""
    model = meta_model(config)
    saved = revert_weight_conversion(model, model.state_dict())
    return {name: tuple(tensor.shape) for name, tensor in sorted(saved.items())}


def write_shard(path: Path, entries: dict[str, Entry]) -> None:
    """A safetensors file with these tensors, whose data is a hole."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape) in entries.items():
        size = nbytes(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)
