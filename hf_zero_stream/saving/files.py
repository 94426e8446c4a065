"""Shards that are being written, by several ranks at once, each at its own places."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

from ..errors import SaveError
from ..sources.local import IOV_MAX, advance


__all__ = ["Comparison", "ShardWriter", "reserve"]


def reserve(path: Path, header: bytes, size_bytes: int) -> None:
    """Make a new file of its final size that begins with `header`, so that a full disk shows at once.

    Raises:
        SaveError: there is no room, or the file cannot be made.
    """
    try:
        with open(path, "xb") as file:
            file.write(header)
            file.flush()
            try:
                os.posix_fallocate(file.fileno(), 0, size_bytes)
            except OSError as error:
                if error.errno not in _NO_FALLOCATE:
                    raise
                os.ftruncate(file.fileno(), size_bytes)
    except OSError as error:
        raise SaveError(
            f"{path}: cannot make a file of {size_bytes} bytes: {error.strerror or error}. What was there before has "
            "not been touched."
        ) from error


_NO_FALLOCATE = {22, 38, 95}
"""EINVAL, ENOSYS, EOPNOTSUPP: the file system does not know how to reserve."""


class _Files:
    """Files that are opened at their first use; safe to use from several threads."""

    def __init__(self, paths: Sequence[Path], flags: int) -> None:
        self._paths = paths
        self._flags = flags
        self._handles: dict[int, int] = {}
        self._lock = threading.Lock()

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

    def close(self) -> None:
        """Close every file."""
        with self._lock:
            handles, self._handles = self._handles, {}
        for handle in handles.values():
            os.close(handle)

    def _error(self, shard: int, position: int, nbytes: int, what: str) -> SaveError:
        return SaveError(
            f"{self._paths[shard]}: bytes {position} to {position + nbytes}: {what}. What was there before has not "
            "been touched."
        )


class ShardWriter(_Files):
    """Positional writes; see :class:`.write.Sink`.

    Args:
        paths: the shards, all of which exist.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        super().__init__(paths, os.O_WRONLY)
        self.bytes_written = 0

    def put(self, shard: int, position: int, buffers: Sequence[memoryview]) -> None:
        """Write `buffers`, one after the other, from byte `position` on.

        Raises:
            SaveError: a write failed.
        """
        handle = self._handle(shard)
        pending = [buffer for buffer in buffers if len(buffer)]
        nbytes = sum(map(len, pending))
        try:
            while pending:
                written = os.pwritev(handle, pending[:IOV_MAX], position)
                position += written
                advance(pending, written)
        except OSError as error:
            raise self._error(shard, position, sum(map(len, pending)), error.strerror or str(error)) from error
        with self._lock:
            self.bytes_written += nbytes

    def sync(self) -> None:
        """Wait until what was written is on the disk.

        Raises:
            SaveError: the disk reports that it is not.
        """
        for shard, handle in list(self._handles.items()):
            try:
                os.fsync(handle)
            except OSError as error:
                raise self._error(shard, 0, os.fstat(handle).st_size, error.strerror or str(error)) from error


class Comparison(_Files):
    """Compares with what is in the files, read past the page cache where the system lets go of it."""

    def __init__(self, paths: Sequence[Path]) -> None:
        super().__init__(paths, os.O_RDONLY)

    def put(self, shard: int, position: int, buffers: Sequence[memoryview]) -> None:
        """Raise if the bytes from `position` on are not those of `buffers`.

        Raises:
            SaveError: they differ, or cannot be read.
        """
        handle = self._handle(shard)
        os.posix_fadvise(handle, position, sum(map(len, buffers)), os.POSIX_FADV_DONTNEED)
        for buffer in buffers:
            try:
                found = os.pread(handle, len(buffer), position)
            except OSError as error:
                raise self._error(shard, position, len(buffer), error.strerror or str(error)) from error
            if found != buffer:
                raise self._error(shard, position, len(buffer), "the file does not hold what was written to it")
            position += len(buffer)
