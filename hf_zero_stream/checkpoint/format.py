"""What a checkpoint's files hold, whatever their format, and what a format must be able to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from ..sources.base import ByteSource, SourceFile


class TensorEntry(NamedTuple):
    """One tensor of a shard: bytes ``[start, stop)`` of the file, row-major and little-endian.

    `shard` is the position of its shard in :attr:`.index.CheckpointIndex.shards`. Where elements lie in another order,
    `strides` (in elements, of each dimension) says in which, and the bytes reach from its first element to its last.
    """

    name: str
    shard: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int
    strides: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class ShardHeader:
    """What one rank reads of a shard and all ranks share; `text` is unchecked, and equal for equal shards.

    For `tag` see :class:`..sources.base.SourceFile`.
    """

    size_bytes: int
    text: bytes
    tag: str = ""


@dataclass(frozen=True, slots=True)
class Shard(SourceFile):
    """A file whose header has been checked; `metadata` is from the header."""

    metadata: Mapping[str, str]


class Format(Protocol):
    """Finds the tensors in files; a module can be one.

    For each file one rank calls :meth:`read_header`, and then every rank :meth:`parse_header` with what it read.
    """

    def read_header(self, source: ByteSource, path: str) -> ShardHeader:
        """Read what says which tensors are in a file; the cost is bounded whatever the file holds.

        Raises:
            ReadError: the file is missing or cannot be read; its cause is the source's error.
            CheckpointError: it is no regular file, or cannot be of this format.
        """

    def parse_header(self, path: str, number: int, header: ShardHeader) -> tuple[Shard, Sequence[TensorEntry]]:
        """Check a header, which is untrusted, in time linear in its length; a CheckpointError names file and field.

        `path` is where this rank sees the file; `number` is the shard's, for its entries.
        """
