"""Where each tensor of a shard that is going to be written will lie, known from names, dtypes and shapes alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from safetensors.torch import save


__all__ = ["ShardLayout", "lay_out_shard"]


@dataclass(frozen=True)
class ShardLayout:
    """The header of a safetensors file, and what comes after it.

    Attributes:
        header: the file's first bytes: the header's length (8 bytes) and its JSON text.
        starts: file position of each tensor's first byte, by name, in file order.
        size_bytes: size of the whole file.
    """

    header: bytes
    starts: Mapping[str, int]
    size_bytes: int


def lay_out_shard(
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]
) -> ShardLayout:
    """The very header that ``safetensors.torch.save_file`` would write for tensors of these dtypes and shapes.

    The order of tensors, the names of dtypes and the metadata are taken from what the library itself makes of tensors
    without elements; sizes and offsets are filled in.
    """
    empty = {dtype: torch.empty(0, dtype=dtype) for dtype, _ in tensors.values()}
    without_elements = save({name: empty[dtype] for name, (dtype, _) in tensors.items()}, dict(metadata) or None)
    fields = json.loads(without_elements[8:])
    starts: dict[str, int] = {}
    stop = 0
    for name, field in fields.items():
        if name == "__metadata__":
            continue
        dtype, shape = tensors[name]
        starts[name] = stop
        stop += prod(shape) * dtype.itemsize
        field["shape"], field["data_offsets"] = list(shape), [starts[name], stop]
    text = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8
    header = len(text).to_bytes(8, "little") + text
    return ShardLayout(header, {name: len(header) + start for name, start in starts.items()}, len(header) + stop)
