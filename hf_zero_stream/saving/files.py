"""The shards of a save on a disk: made at their final sizes, written by several ranks at once, and compared."""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..checkpoint.digests import digest_of_bytes
from ..checkpoint.safetensors import ShardToWrite
from ..errors import SaveError
from ..reports.text import bytes_text
from ..sources.base import advance
from ..sources.local import IOV_MAX


def reserve(paths: Sequence[Path], shards: Sequence[ShardToWrite], *, on_disk: bool = True) -> None:
    """Make each shard at its path, with its header; see :func:`make_file`."""
    for path, shard in zip(paths, shards, strict=True):
        make_file(path, shard.size_bytes, shard.header, on_disk=on_disk)


def make_file(path: Path, nbytes: int, header: bytes = b"", *, on_disk: bool = True, opener: Any = None) -> None:
    """Make a file at its final size, with its `header`, so that a full disk shows immediately.

    Unless it shall have room `on_disk`, it takes none but for the header. For `opener` see :func:`open`.
    """
    try:
        with open(path, "xb", opener=opener) as file:
            file.write(header)
            file.flush()
            if on_disk:
                try:
                    os.posix_fallocate(file.fileno(), 0, nbytes)
                    return
                except OSError as error:
                    if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
                        raise
            # It shall have no room, or the file system cannot reserve any.
            os.ftruncate(file.fileno(), nbytes)
    except OSError as error:
        raise SaveError(
            f"{path}: cannot make a file of {bytes_text(nbytes)}: {error.strerror or error}. What was there before "
            "has not been touched."
        ) from error


class ShardWriter:
    """Writes into shards, which must exist already; opens each at its first use. Safe to use from several threads.

    Args:
        has_digests: sum the :attr:`digests` of what is written.
    """

    _flags = os.O_WRONLY

    def __init__(self, paths: Sequence[Path], *, has_digests: bool = False) -> None:
        self.digests: Counter[int] = Counter()
        """By shard, the digest of the bytes that this writer has written (:mod:`..checkpoint.digests`)."""
        self._paths, self._has_digests = paths, has_digests
        self._handles: dict[int, int] = {}
        self._lock = threading.Lock()

    def put(self, shard: int, position: int, buffers: Sequence[memoryview]) -> None:
        """Write `buffers`, one after the other, from byte `position` on."""
        shard, position = self._located(shard, position)
        handle = self._handle(shard)
        pending, start = [buffer for buffer in buffers if len(buffer)], position
        try:
            while pending:
                written = os.pwritev(handle, pending[:IOV_MAX], position)
                position += written
                advance(pending, written)
            # Has the system begin to write to the disk at once, and not when all of it is in memory.
            os.posix_fadvise(handle, start, position - start, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise self._error(shard, position, sum(map(len, pending)), error) from error
        if self._has_digests:
            digest = digest_of_bytes(start, buffers)
            with self._lock:
                self.digests[shard] += digest

    def sync(self) -> None:
        """Wait until what was written is on the disk."""
        for shard, handle in list(self._handles.items()):
            try:
                os.fsync(handle)
            except OSError as error:
                raise self._error(shard, 0, os.fstat(handle).st_size, error) from error

    def close(self) -> None:
        with self._lock:
            handles, self._handles = self._handles, {}
        for handle in handles.values():
            os.close(handle)

    def _located(self, shard: int, position: int) -> tuple[int, int]:
        """The number of the file, and the position in it, where a byte of a shard lies."""
        return shard, position

    def _handle(self, shard: int) -> int:
        with self._lock:
            if shard not in self._handles:
                try:
                    self._handles[shard] = os.open(self._paths[shard], self._flags)
                except OSError as error:
                    raise SaveError(
                        f"{self._paths[shard]}: cannot be opened: {error.strerror or error}. All ranks write into the "
                        'files that rank 0 made. Where they do not see its disk, save with write_from="rank0" or '
                        '"auto".'
                    ) from error
            return self._handles[shard]

    def _error(self, shard: int, position: int, nbytes: int, cause: OSError | str) -> SaveError:
        problem = cause if isinstance(cause, str) else cause.strerror or str(cause)
        return SaveError(
            f"{self._paths[shard]}: bytes {position} to {position + nbytes}: {problem}. What was there before has not "
            "been touched."
        )


class Comparison(ShardWriter):
    """Compares with what was written; its reads bypass the page cache where the system drops those pages."""

    _flags = os.O_RDONLY

    def put(self, shard: int, position: int, buffers: Sequence[memoryview]) -> None:
        """Raise :class:`SaveError` if the bytes from `position` on are not those of `buffers`."""
        shard, position = self._located(shard, position)
        handle = self._handle(shard)
        os.posix_fadvise(handle, position, sum(map(len, buffers)), os.POSIX_FADV_DONTNEED)
        for buffer in buffers:
            try:
                found = os.pread(handle, len(buffer), position)
            except OSError as error:
                raise self._error(shard, position, len(buffer), error) from error
            if found != buffer:
                raise self._error(shard, position, len(buffer), "the file does not hold what was written to it")
            position += len(buffer)

    def compare(self, shard: int, position: int, nbytes: int, digest: int) -> None:
        """Raise :class:`SaveError` if the digest of these bytes is another one."""
        file, there = self._located(shard, position)
        handle = self._handle(file)
        os.posix_fadvise(handle, there, nbytes, os.POSIX_FADV_DONTNEED)
        try:
            found = os.pread(handle, nbytes, there)
        except OSError as error:
            raise self._error(file, there, nbytes, error) from error
        if digest_of_bytes(position, [found]) != digest:
            raise self._error(file, there, nbytes, "the file does not hold what was written to it")
