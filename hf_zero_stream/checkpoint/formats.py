"""The :class:`.format.Format` of any file of a checkpoint, by the end of its name."""

from __future__ import annotations

from collections.abc import Sequence

from ..sources.base import ByteSource
from . import safetensors
from .format import Format, Shard, ShardHeader, TensorEntry


def _format_of(path: str) -> Format:
    if not path.endswith((".bin", ".pt", ".pth")):
        return safetensors
    from . import torch_files  # few checkpoints have such files

    return torch_files


def read_header(source: ByteSource, path: str) -> ShardHeader:
    """See :meth:`.format.Format.read_header`."""
    return _format_of(path).read_header(source, path)


def parse_header(path: str, number: int, header: ShardHeader) -> tuple[Shard, Sequence[TensorEntry]]:
    """See :meth:`.format.Format.parse_header`."""
    return _format_of(path).parse_header(path, number, header)
