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


def make_sparse_checkpoint(folder: Path, config: PreTrainedConfig) -> Path:
    """Write a bf16 checkpoint of `config`'s model into `folder`, unless it is there already; returns the folder."""
    if (folder / "model.safetensors.index.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    shapes = hub_shapes(config)
    sizes = [2 * prod(shape) for shape in shapes.values()]
    shard_of = [before // SHARD_BYTES for before in accumulate(sizes, initial=0)][:-1]
    count = shard_of[-1] + 1
    weight_map: dict[str, str] = {}
    for number in range(count):
        name = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
        group = [key for key, shard in zip(shapes, shard_of, strict=True) if shard == number]
        if group:
            write_shard(folder / name, {key: shapes[key] for key in group})
        weight_map |= dict.fromkeys(group, name)
    config.dtype = torch.bfloat16
    config.architectures = [type(meta_model(config)).__name__]
    config.save_pretrained(folder)
    index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def meta_model(config: PreTrainedConfig) -> torch.nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def hub_shapes(config: PreTrainedConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that ``save_pretrained`` would write, in order of name."""
    model = meta_model(config)
    saved = revert_weight_conversion(model, model.state_dict())
    return {name: tuple(tensor.shape) for name, tensor in sorted(saved.items())}


def write_shard(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """A safetensors file with bf16 tensors of these shapes, whose data is a hole."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        size = 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)
