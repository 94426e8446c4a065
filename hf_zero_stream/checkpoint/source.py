"""Byte sources: positional reads from the shards of a checkpoint through one reused handle per file."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from types import TracebackType

from ..errors import CheckpointError, ReadError
from .index import Shard


__all__ = ["ShardFiles"]

IOV_MAX = 1024
"""Most buffers that one ``preadv`` takes on Linux."""


class ShardFiles:
    """The open shards of a checkpoint; safe to use from several threads.

    A file is opened at its first read and closed with the object. Opening anew for each read costs 0.7 ms on a network
    file system where reusing the handle costs 0.05 (hyper-parallel #624).
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = tuple(shards)
        self._handles: dict[int, int] = {}
        self._lock = threading.Lock()
        self.bytes_read = 0
        """Bytes read so far, holes that were read through included."""
        self.reads = 0
        """Calls of :meth:`read_into` so far."""

    def __enter__(self) -> ShardFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close every handle; a later read opens its file again."""
        with self._lock:
            handles, self._handles = self._handles, {}
        for handle in handles.values():
            os.close(handle)

    def read_into(self, shard: int, start: int, buffers: Sequence[memoryview]) -> None:
        """Fill `buffers`, one after the other, with the bytes of `shard` from file position `start` on.

        Args:
            buffers: writable, contiguous, of format ``B``.

        Raises:
            ReadError: the file cannot be opened or read, or ends before the last buffer is full.
            CheckpointError: the file's size is not that of the header which the index was made from.
        """
        handle = self._handle(shard)
        position = start
        length = sum(len(buffer) for buffer in buffers)
        with self._lock:
            self.bytes_read += length
            self.reads += 1
        pending = [buffer for buffer in buffers if len(buffer)]
        while pending:
            try:
                count = os.preadv(handle, pending[:IOV_MAX], position)
            except OSError as error:
                raise self._failure(shard, position, pending, error.strerror or str(error)) from error
            if count == 0:
                raise self._failure(shard, position, pending, "the file ends here")
            position += count
            while pending and count >= len(pending[0]):
                count -= len(pending.pop(0))
            if count:
                pending[0] = pending[0][count:]

    def _failure(self, shard: int, position: int, pending: list[memoryview], cause: str) -> ReadError:
        stop = position + sum(len(buffer) for buffer in pending)
        return ReadError(
            f"{self._shards[shard].path}: cannot read bytes {position} to {stop}: {cause}. "
            "Check the file system, then load again."
        )

    def _handle(self, shard: int) -> int:
        handle = self._handles.get(shard)
        if handle is not None:
            return handle
        with self._lock:
            if shard not in self._handles:
                self._handles[shard] = _open(self._shards[shard])
            return self._handles[shard]


def _open(shard: Shard) -> int:
    try:
        handle = os.open(shard.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ReadError(
            f"{shard.path}: cannot open: {error.strerror or error}. "
            "Check that the file exists on every node and may be read."
        ) from error
    size = os.fstat(handle).st_size
    if size != shard.size_bytes:
        os.close(handle)
        raise CheckpointError(
            f"{shard.path}: expected {shard.size_bytes} bytes as when its header was read, found {size}. "
            "The file is truncated here or was replaced; make it the same on every node."
        )
    return handle
