"""The :class:`.format.Format` of any file of a checkpoint, by the end of its name."""

from __future__ import annotations

from collections.abc import Sequence

from ..sources.base import ByteSource
from . import safetensors, torch_files
from .format import Format, Shard, ShardHeader, TensorEntry


def _format_of(path: str) -> Format:
    return torch_files if path.endswith((".bin", ".pt", ".pth")) else safetensors


def read_header(source: ByteSource, path: str) -> ShardHeader:
    """See :meth:`.format.Format.read_header`."""
    return _format_of(path).read_header(source, path)


def parse_header(path: str, number: int, header: ShardHeader) -> tuple[Shard, Sequence[TensorEntry]]:
    """See :meth:`.format.Format.parse_header`."""
    return _format_of(path).parse_header(path, number, header)
