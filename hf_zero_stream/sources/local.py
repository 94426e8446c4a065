"""Byte sources: positional reads from the shards of a checkpoint through one reused handle per file."""

from __future__ import annotations

import errno
import mmap
import os
import stat
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import NamedTuple

from ..checkpoint.index import Shard
from ..errors import CheckpointError, ReadError
from .madvise import HUGE_PAGE_BYTES
from .retries import Retries


__all__ = ["IOV_MAX", "Identity", "ShardFiles", "advance"]

IOV_MAX = 1024
"""Most buffers that one ``preadv`` or ``pwritev`` takes on Linux."""

DIRECT_ALIGNMENT = 4096
"""What O_DIRECT wants file positions, lengths and addresses to be multiples of; enough for every common device."""


def advance(pending: list[memoryview], count: int) -> None:
    """Take the first `count` bytes off `pending`, after a read or write that did only these."""
    while pending and count >= len(pending[0]):
        count -= len(pending.pop(0))
    if count:
        pending[0] = pending[0][count:]


class Identity(NamedTuple):
    """What changes when a file is written to, cut short or replaced by another.

    Compared with what the same host saw before: of one file, two hosts may see times of different precision.
    """

    device: int
    inode: int
    size_bytes: int
    mtime_ns: int

    @classmethod
    def of(cls, file: str | int) -> Identity:
        """The identity of a path or of an open handle."""
        found = os.stat(file)
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)

    @classmethod
    def of_readable(cls, path: str) -> Identity:
        """The same, of a file whose header is about to be read.

        Raises:
            ReadError: it is missing or cannot be looked at.
        """
        try:
            return cls.of(path)
        except OSError as error:
            raise ReadError(
                f"{path}: cannot read the safetensors header: {error.strerror or error}. "
                "Check that the file exists on every node and may be read."
            ) from error


class ShardFiles:
    """The open shards of a checkpoint; safe to use from several threads.

    A file is opened at its first read and closed with the object. Opening anew for each read costs 0.7 ms on a network
    file system where reusing the handle costs 0.05 (hyper-parallel #624).

    Args:
        shards: the checkpoint's shards, as its index has them.
        direct_io: read with O_DIRECT, past the page cache; a file system that refuses is read with buffers instead.
        keep_cached: leave what was read in the page cache; False drops it behind the reader.
        retries: how what fails for a passing reason is tried again.
        identities: what the files were when this rank read their headers; default: what they are when they are opened.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        *,
        direct_io: bool = False,
        keep_cached: bool = True,
        retries: Retries | None = None,
        identities: Sequence[Identity] = (),
    ) -> None:
        self._shards = tuple(shards)
        self._retries = retries or Retries()
        self._identities = dict(enumerate(identities))
        self._direct_io = direct_io and hasattr(os, "O_DIRECT")
        self._keep_cached = keep_cached
        self._handles: dict[int, int] = {}
        self._stale: list[int] = []
        self._lock = threading.Lock()
        self._aligned = threading.local()
        self.bytes_read = 0
        """Bytes read so far, holes that were read through included."""
        self.reads = 0
        """Calls of :meth:`read_into` so far."""

    @property
    def retries(self) -> int:
        """Opens and reads that were tried again so far."""
        return self._retries.count

    def __enter__(self) -> ShardFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close every handle; a later read opens its file again."""
        with self._lock:
            handles, self._handles = [*self._handles.values(), *self._stale], {}
            self._stale = []
        for handle in handles:
            os.close(handle)

    def read_into(self, shard: int, start: int, buffers: Sequence[memoryview]) -> None:
        """Fill `buffers`, one after the other, with the bytes of `shard` from file position `start` on.

        Args:
            buffers: writable, contiguous, of format ``B``.

        Raises:
            ReadError: the file cannot be opened or read, or ends before the last buffer is full.
            CheckpointError: the file's size is not that of the header which the index was made from.
        """
        self._handle(shard)
        length = sum(len(buffer) for buffer in buffers)
        with self._lock:
            self.bytes_read += length
            self.reads += 1
        if self._direct_io:
            self._read_direct(shard, start, length, buffers)
            return
        self._read_buffered(shard, start, [buffer for buffer in buffers if len(buffer)])
        if not self._keep_cached:
            os.posix_fadvise(self._handle(shard), start, length, os.POSIX_FADV_DONTNEED)

    def open(self, shards: Iterable[int]) -> None:
        """Open `shards` now: what cannot be opened is found before anything is read.

        Raises:
            ReadError, CheckpointError: as :meth:`read_into`.
        """
        for shard in shards:
            self._handle(shard)

    def check_unchanged(self) -> None:
        """Check that the files which were read from are still what they were when they were opened.

        Raises:
            CheckpointError: one has been written to, cut short, replaced or removed.
        """
        with self._lock:
            handles = dict(self._handles)
        for shard, handle in handles.items():
            self._check_identity(shard, handle)
            try:
                by_name = Identity.of(self._shards[shard].path)
            except FileNotFoundError:
                by_name = None
            if by_name != self._identities[shard]:
                raise self._change(shard, "replaced" if by_name else "removed")

    def _check_identity(self, shard: int, handle: int) -> None:
        """Compare an open file with what it was before, if it was looked at before."""
        found = Identity.of(handle)
        before = self._identities.setdefault(shard, found)
        if found != before:
            what = "replaced" if found[:2] != before[:2] else "written to"
            raise self._change(shard, "truncated" if found.size_bytes < before.size_bytes else what)

    def _change(self, shard: int, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self._shards[shard].path}: was {what} while it was being loaded, so that the model may hold parts of "
            "two versions. Wait until whoever writes it is done, then load again."
        )

    def _read_some(self, shard: int, buffers: list[memoryview], position: int) -> int:
        """One ``preadv``, again if it failed for a passing reason; by a new handle if the old one is stale."""

        def again(error: BaseException) -> None:
            if getattr(error, "errno", None) == errno.ESTALE:
                with self._lock:
                    handle = self._handles.pop(shard, None)
                    if handle is not None:
                        self._stale.append(handle)  # another thread may be reading from it

        return self._retries.call(lambda: os.preadv(self._handle(shard), buffers, position), again)

    def _read_buffered(self, shard: int, position: int, pending: list[memoryview]) -> None:
        while pending:
            try:
                count = self._read_some(shard, pending[:IOV_MAX], position)
            except OSError as error:
                raise self._failure(shard, position, pending, error) from error
            if count == 0:
                raise self._failure(shard, position, pending, None)
            position += count
            advance(pending, count)

    def _read_direct(self, shard: int, start: int, length: int, buffers: Sequence[memoryview]) -> None:
        """Read the aligned range around ``[start, start + length)`` and copy the buffers' parts out of it."""
        begin = start // DIRECT_ALIGNMENT * DIRECT_ALIGNMENT
        end = -(-(start + length) // DIRECT_ALIGNMENT) * DIRECT_ALIGNMENT
        staging = self._aligned_buffer(end - begin)
        filled = 0
        while filled < start + length - begin:
            # A read that was cut short goes on from an aligned position, so its last block is read twice.
            again = filled // DIRECT_ALIGNMENT * DIRECT_ALIGNMENT
            try:
                count = self._read_some(shard, [staging[again : end - begin]], begin + again)
            except OSError as error:
                raise self._failure(shard, start, list(buffers), error) from error
            if again + count <= filled:
                raise self._failure(shard, start, list(buffers), None)
            filled = again + count
        position = start - begin
        for buffer in buffers:
            buffer[:] = staging[position : position + len(buffer)]
            position += len(buffer)

    def _aligned_buffer(self, nbytes: int) -> memoryview:
        """This thread's page-aligned buffer of at least `nbytes`.

        In huge pages if they are to be had: a request to the device lists the pages that it fills, and has no room for
        as many as 8 MiB are of 4 KiB each.
        """
        buffer = getattr(self._aligned, "buffer", None)
        if buffer is None or len(buffer) < nbytes:
            length = -(-nbytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
            memory = mmap.mmap(-1, length, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with suppress(AttributeError, OSError):  # not on Linux, or a kernel without them
                memory.madvise(mmap.MADV_HUGEPAGE)
            buffer = self._aligned.buffer = memoryview(memory)
        return buffer

    def _failure(
        self, shard: int, position: int, pending: list[memoryview], error: OSError | None
    ) -> ReadError | CheckpointError:
        """What to raise for `error`, or for a file that ends too early."""
        if isinstance(error, (ReadError, CheckpointError)):
            return error  # the file could not be opened again
        if error is None:
            try:
                self._check_identity(shard, self._handle(shard))
            except CheckpointError as change:
                return change
        cause = "the file ends here" if error is None else error.strerror or str(error)
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
                self._handles[shard] = self._open(shard)
            return self._handles[shard]

    def _open(self, number: int) -> int:
        shard = self._shards[number]
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe that took the file's place would never open
        try:
            handle = self._retries.call(lambda: os.open(shard.path, flags | (os.O_DIRECT if self._direct_io else 0)))
        except OSError as error:
            if self._direct_io and error.errno == errno.EINVAL:  # this file system has no O_DIRECT
                self._direct_io = False
                return self._open(number)
            raise ReadError(
                f"{shard.path}: cannot open: {error.strerror or error}. "
                "Check that the file exists on every node and may be read."
            ) from error
        try:
            self._check_size(shard, handle)
            self._check_identity(number, handle)
        except BaseException:
            os.close(handle)
            raise
        return handle

    @staticmethod
    def _check_size(shard: Shard, handle: int) -> None:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise CheckpointError(f"{shard.path}: expected a regular file, found a pipe, a socket or a device.")
        size = found.st_size
        if size != shard.size_bytes:
            raise CheckpointError(
                f"{shard.path}: expected {shard.size_bytes} bytes as when its header was read, found {size}. "
                "The file is truncated here or was replaced; make it the same on every node."
            )
