"""Shards that are being written, by several ranks at once, each at its own places."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from ..checkpoint.safetensors import ShardToWrite
from ..errors import SaveError
from ..sources.local import IOV_MAX, advance


__all__ = ["Comparison", "ShardWriter", "reserve"]


def reserve(folder: Path, shards: Sequence[ShardToWrite]) -> None:
    """Make each shard in `folder`, at its final size and with its header, so that a full disk shows immediately."""
    for shard in shards:
        path, size_bytes = folder / shard.name, shard.size_bytes
        try:
            with open(path, "xb") as file:
                file.write(shard.header)
                file.flush()
                try:
                    os.posix_fallocate(file.fileno(), 0, size_bytes)
                except OSError as error:
                    if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
                        raise
                    # The file system cannot reserve space.
                    os.ftruncate(file.fileno(), size_bytes)
        except OSError as error:
            raise SaveError(
                f"{path}: cannot make a file of {size_bytes} bytes: {error.strerror or error}. What was there before "
                "has not been touched."
            ) from error


class ShardWriter:
    """Writes into shards, which must exist already; opens each at its first use. Safe to use from several threads."""

    _flags = os.O_WRONLY

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._handles: dict[int, int] = {}
        self._lock = threading.Lock()

    def put(self, shard: int, position: int, buffers: Sequence[memoryview]) -> None:
        """Write `buffers`, one after the other, from byte `position` on."""
        handle = self._handle(shard)
        pending = [buffer for buffer in buffers if len(buffer)]
        try:
            while pending:
                written = os.pwritev(handle, pending[:IOV_MAX], position)
                position += written
                advance(pending, written)
        except OSError as error:
            raise self._error(shard, position, sum(map(len, pending)), error) from error

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
