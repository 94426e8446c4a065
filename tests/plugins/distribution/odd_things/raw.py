"""A format: a file is one tensor of bytes, by the file's name without its ending."""

from __future__ import annotations

from pathlib import Path

import torch

from hf_zero_stream.plugin_api import ByteSource, CheckpointMap, Shard, ShardHeader, TensorEntry


def read_header(source: ByteSource, path: str) -> ShardHeader:
    with source.open_file(path) as file:
        return ShardHeader(file.size_bytes, b"", file.tag)


def parse_header(path: str, number: int, header: ShardHeader) -> CheckpointMap:
    size = header.size_bytes
    entry = TensorEntry(Path(path).stem, number, torch.uint8, (size,), 0, size)
    return CheckpointMap.of_entries(Shard(path, size, {}, tag=header.tag), [entry])
