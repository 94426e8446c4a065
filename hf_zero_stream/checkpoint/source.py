"""Byte sources: positional reads from the shards of a checkpoint through one reused handle per file."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Sequence
from types import TracebackType

from ..errors import CheckpointError, ReadError
from .index import Shard


__all__ = ["ShardFiles"]

IOV_MAX = 1024
"""Most buffers that one ``preadv`` takes on Linux."""

DIRECT_ALIGNMENT = 4096
"""What O_DIRECT wants file positions, lengths and addresses to be multiples of; enough for every common device."""


class ShardFiles:
    """The open shards of a checkpoint; safe to use from several threads.

    A file is opened at its first read and closed with the object. Opening anew for each read costs 0.7 ms on a network
    file system where reusing the handle costs 0.05 (hyper-parallel #624).

    Args:
        shards: the checkpoint's shards, as its index has them.
        direct_io: read with O_DIRECT, past the page cache; a file system that refuses is read with buffers instead.
        keep_cached: leave what was read in the page cache; False drops it behind the reader.
    """

    def __init__(self, shards: Sequence[Shard], *, direct_io: bool = False, keep_cached: bool = True) -> None:
        self._shards = tuple(shards)
        self._direct_io = direct_io and hasattr(os, "O_DIRECT")
        self._keep_cached = keep_cached
        self._handles: dict[int, int] = {}
        self._lock = threading.Lock()
        self._aligned = threading.local()
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
        length = sum(len(buffer) for buffer in buffers)
        with self._lock:
            self.bytes_read += length
            self.reads += 1
        if self._direct_io:
            self._read_direct(shard, handle, start, length, buffers)
            return
        self._read_buffered(shard, handle, start, [buffer for buffer in buffers if len(buffer)])
        if not self._keep_cached:
            os.posix_fadvise(handle, start, length, os.POSIX_FADV_DONTNEED)

    def prefetch(self, shard: int, start: int, stop: int) -> None:
        """Have these bytes brought into the page cache meanwhile: advice, which never fails."""
        if self._direct_io:
            return
        try:
            os.posix_fadvise(self._handle(shard), start, stop - start, os.POSIX_FADV_WILLNEED)
        except (OSError, CheckpointError, ReadError):
            pass  # reading them will say what is wrong

    def _read_buffered(self, shard: int, handle: int, position: int, pending: list[memoryview]) -> None:
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

    def _read_direct(self, shard: int, handle: int, start: int, length: int, buffers: Sequence[memoryview]) -> None:
        """Read the aligned range around ``[start, start + length)`` and copy the buffers' parts out of it."""
        begin = start // DIRECT_ALIGNMENT * DIRECT_ALIGNMENT
        end = -(-(start + length) // DIRECT_ALIGNMENT) * DIRECT_ALIGNMENT
        staging = self._aligned_buffer(end - begin)
        filled = 0
        while filled < start + length - begin:
            # A read that was cut short goes on from an aligned position, so its last block is read twice.
            again = filled // DIRECT_ALIGNMENT * DIRECT_ALIGNMENT
            try:
                count = os.preadv(handle, [staging[again : end - begin]], begin + again)
            except OSError as error:
                raise self._failure(shard, start, list(buffers), error.strerror or str(error)) from error
            if again + count <= filled:
                raise self._failure(shard, start, list(buffers), "the file ends here")
            filled = again + count
        position = start - begin
        for buffer in buffers:
            buffer[:] = staging[position : position + len(buffer)]
            position += len(buffer)

    def _aligned_buffer(self, nbytes: int) -> memoryview:
        """This thread's page-aligned buffer of at least `nbytes`."""
        buffer = getattr(self._aligned, "buffer", None)
        if buffer is None or len(buffer) < nbytes:
            buffer = self._aligned.buffer = memoryview(mmap.mmap(-1, nbytes))
        return buffer

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
                self._handles[shard] = self._open(self._shards[shard])
            return self._handles[shard]

    def _open(self, shard: Shard) -> int:
        flags = os.O_RDONLY | os.O_CLOEXEC
        try:
            handle = os.open(shard.path, flags | os.O_DIRECT) if self._direct_io else os.open(shard.path, flags)
        except OSError as error:
            if self._direct_io and error.errno == errno.EINVAL:  # this file system has no O_DIRECT
                self._direct_io = False
                return self._open(shard)
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
