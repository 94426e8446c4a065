"""A shard to be written: what goes into it, and where in it each tensor will lie."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from safetensors.torch import save


__all__ = ["NotedShard", "ShardLayout", "lay_out_shard"]


@dataclass(frozen=True)
class NotedShard:
    """What transformers would write into the file `name`: lazy `tensors`, and `metadata` for its header."""

    name: str
    tensors: Mapping[str, torch.Tensor]
    metadata: Mapping[str, str]


@dataclass(frozen=True)
class ShardLayout:
    """Where everything lies in a safetensors file of `size_bytes`."""

    header: bytes
    """The file's first bytes: the length of the header (8 bytes) and its JSON text."""
    starts: Mapping[str, int]
    """File position of each tensor's first byte, by name, in file order."""
    size_bytes: int


def lay_out_shard(noted: NotedShard) -> ShardLayout:
    """The header that ``safetensors.torch.save_file`` would write, from names, dtypes and shapes alone.

    The library writes a header for tensors without elements; sizes and offsets are then filled in.
    """
    empty = {tensor.dtype: torch.empty(0, dtype=tensor.dtype) for tensor in noted.tensors.values()}
    without_elements = save(
        {name: empty[tensor.dtype] for name, tensor in noted.tensors.items()}, dict(noted.metadata) or None
    )
    fields = json.loads(without_elements[8:])
    starts: dict[str, int] = {}
    stop = 0
    for name, field in fields.items():
        if name == "__metadata__":
            continue
        tensor = noted.tensors[name]
        starts[name] = stop
        stop += tensor.nbytes
        field["shape"], field["data_offsets"] = list(tensor.shape), [starts[name], stop]
    text = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8
    header = len(text).to_bytes(8, "little") + text
    return ShardLayout(header, {name: len(header) + start for name, start in starts.items()}, len(header) + stop)
