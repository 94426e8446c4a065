"""The source for files that this host mounts: positional reads through one reused handle per file."""

from __future__ import annotations

import errno
import mmap
import os
import stat
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import BinaryIO, NamedTuple

from ..errors import CheckpointError, ReadError
from .base import Hints, SourceFile
from .madvise import HUGE_PAGE_BYTES
from .mounts import is_on_network
from .retries import Retries


__all__ = ["IOV_MAX", "Identity", "LocalFiles", "advance", "open_nonblocking", "status_of_regular"]

IOV_MAX = 1024
"""Most buffers that one ``preadv`` or ``pwritev`` takes on Linux."""

DIRECT_ALIGNMENT = 4096
"""What O_DIRECT wants file positions, lengths and addresses to be multiples of; enough for every common device."""

TRANSIENT = frozenset(
    {
        errno.EIO,
        errno.ESTALE,
        errno.EAGAIN,
        errno.EINTR,
        errno.EBUSY,
        errno.ETIMEDOUT,
        errno.ECONNRESET,
        errno.ECONNABORTED,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.EREMOTEIO,
    }
)
"""Numbers of errors that may be gone a moment later. ENOENT, EACCES and a file's end are not: those want a person."""

MIB = 2**20

STREAMS_PER_HOST = 32
"""Lustre gives an H100 node 2.0 GiB/s for one stream and 8.5 GiB/s for 32 (transformers #48227)."""


def open_nonblocking(path: str, flags: int) -> int:
    """For ``open(opener=...)``: to open a pipe without a writer would wait for ever; regular files do not care."""
    return os.open(path, flags | os.O_NONBLOCK)


def status_of_regular(path: str, handle: int) -> os.stat_result:
    """The status of the open file at `path`.

    Raises:
        CheckpointError: it is no regular file.
    """
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path}: expected a regular file, found a pipe, a socket or a device.")
    return status


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
        return cls.of_status(os.stat(file))

    @classmethod
    def of_status(cls, status: os.stat_result) -> Identity:
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


class _HeaderFile:
    """One open file, for reading its header."""

    def __init__(self, path: str, size_bytes: int, file: BinaryIO) -> None:
        self.path = path
        self.size_bytes = size_bytes
        self._file = file

    def read(self, start: int, nbytes: int) -> bytes:
        self._file.seek(start)
        return self._file.read(nbytes)


class LocalFiles:
    """Files of this host, or of one that it mounts (see :class:`.base.ByteSource`).

    A file is opened at its first read and closed with the object. Opening anew for each read costs 0.7 ms on a network
    file system where reusing the handle costs 0.05 (hyper-parallel #624).

    Args:
        files: the first files (see :meth:`add`).
        direct_io: read with O_DIRECT, past the page cache; a file system that refuses is read with buffers instead.
        cache_bytes: if the files together are larger, what was read is dropped from the page cache: it would only push
            its own beginning out, and all else first.
        retries: how what fails for a passing reason is tried again.
    """

    def __init__(
        self,
        files: Sequence[SourceFile] = (),
        *,
        direct_io: bool = False,
        cache_bytes: int = sys.maxsize,
        retries: Retries | None = None,
    ) -> None:
        self._files: tuple[SourceFile, ...] = ()
        self._retries = retries or Retries()
        self._seen: dict[str, Identity] = {}
        self._identities: dict[int, Identity] = {}
        self._direct_io = direct_io and hasattr(os, "O_DIRECT")
        self._cache_bytes = cache_bytes
        self._handles: dict[int, int] = {}
        self._stale: list[int] = []
        self._lock = threading.Lock()
        self._aligned = threading.local()
        self.bytes_read = 0
        self.reads = 0
        self.add(files)

    def __enter__(self) -> LocalFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def open_file(self, path: str) -> Iterator[_HeaderFile]:
        with open(path, "rb", opener=open_nonblocking) as file:
            status = status_of_regular(path, file.fileno())
            self._seen.setdefault(path, Identity.of_status(status))  # as it was when its header was read
            yield _HeaderFile(path, status.st_size, file)

    def is_transient(self, error: BaseException | None) -> bool:
        return isinstance(error, OSError) and error.errno in TRANSIENT

    def add(self, files: Sequence[SourceFile]) -> None:
        for number, file in enumerate(files, len(self._files)):
            if file.path in self._seen:
                self._identities[number] = self._seen[file.path]
        self._files = (*self._files, *files)
        self._keep_cached = sum(file.size_bytes for file in self._files) < self._cache_bytes

    def hints(self, paths: Sequence[str]) -> Hints:
        """2 MiB from a local disk: while they are copied, the system reads ahead. 8 MiB past the page cache, where
        nothing does. 4 MiB over a network: many streams are faster there than one long run.
        """
        # The hub's cache is made of links, and its files may lie elsewhere.
        folders = {os.path.dirname(os.path.realpath(path)) for path in paths}
        on_network = any(map(is_on_network, folders))
        return Hints(
            request_bytes=(4 if on_network else 8 if self._direct_io else 2) * MIB,
            is_remote=on_network,
            reads_ahead=not (on_network or self._direct_io),
            streams_per_host=STREAMS_PER_HOST,
            streams_per_rank=16,
        )

    def read_into(self, number: int, start: int, buffers: Sequence[memoryview]) -> None:
        self._handle(number)
        length = sum(len(buffer) for buffer in buffers)
        with self._lock:
            self.bytes_read += length
            self.reads += 1
        if self._direct_io:
            self._read_direct(number, start, length, buffers)
            return
        self._read_buffered(number, start, [buffer for buffer in buffers if len(buffer)])
        if not self._keep_cached:
            os.posix_fadvise(self._handle(number), start, length, os.POSIX_FADV_DONTNEED)

    def open(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._handle(number)

    def check_unchanged(self) -> None:
        with self._lock:
            handles = dict(self._handles)
        for number, handle in handles.items():
            self._check_identity(number, handle)
            try:
                by_name = Identity.of(self._files[number].path)
            except FileNotFoundError:
                by_name = None
            if by_name != self._identities[number]:
                raise self._change(number, "replaced" if by_name else "removed")

    def finish(self) -> None:
        pass

    def close(self) -> None:
        """Close every handle; a later read opens its file again."""
        with self._lock:
            handles, self._handles = [*self._handles.values(), *self._stale], {}
            self._stale = []
        for handle in handles:
            os.close(handle)

    def _check_identity(self, number: int, handle: int) -> None:
        """Compare an open file with what it was before, if it was looked at before."""
        found = Identity.of(handle)
        before = self._identities.setdefault(number, found)
        if found != before:
            what = "replaced" if found[:2] != before[:2] else "written to"
            raise self._change(number, "truncated" if found.size_bytes < before.size_bytes else what)

    def _change(self, number: int, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self._files[number].path}: was {what} while it was being loaded, so that the model may hold parts of "
            "two versions. Wait until whoever writes it is done, then load again."
        )

    def _read_some(self, number: int, buffers: list[memoryview], position: int) -> int:
        """One ``preadv``, again if it failed for a passing reason; by a new handle if the old one is stale."""

        def again(error: BaseException) -> None:
            if getattr(error, "errno", None) == errno.ESTALE:
                with self._lock:
                    handle = self._handles.pop(number, None)
                    if handle is not None:
                        self._stale.append(handle)  # another thread may be reading from it

        return self._retries.call(lambda: os.preadv(self._handle(number), buffers, position), self.is_transient, again)

    def _read_buffered(self, number: int, position: int, pending: list[memoryview]) -> None:
        while pending:
            try:
                count = self._read_some(number, pending[:IOV_MAX], position)
            except OSError as error:
                raise self._failure(number, position, pending, error) from error
            if count == 0:
                raise self._failure(number, position, pending, None)
            position += count
            advance(pending, count)

    def _read_direct(self, number: int, start: int, length: int, buffers: Sequence[memoryview]) -> None:
        """Read the aligned range around ``[start, start + length)`` and copy the buffers' parts out of it."""
        begin = start // DIRECT_ALIGNMENT * DIRECT_ALIGNMENT
        end = -(-(start + length) // DIRECT_ALIGNMENT) * DIRECT_ALIGNMENT
        staging = self._aligned_buffer(end - begin)
        filled = 0
        while filled < start + length - begin:
            # A read that was cut short goes on from an aligned position, so its last block is read twice.
            again = filled // DIRECT_ALIGNMENT * DIRECT_ALIGNMENT
            try:
                count = self._read_some(number, [staging[again : end - begin]], begin + again)
            except OSError as error:
                raise self._failure(number, start, list(buffers), error) from error
            if again + count <= filled:
                raise self._failure(number, start, list(buffers), None)
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
        self, number: int, position: int, pending: list[memoryview], error: OSError | None
    ) -> ReadError | CheckpointError:
        """What to raise for `error`, or for a file that ends too early."""
        if isinstance(error, (ReadError, CheckpointError)):
            return error  # the file could not be opened again
        if error is None:
            try:
                self._check_identity(number, self._handle(number))
            except CheckpointError as change:
                return change
        cause = "the file ends here" if error is None else error.strerror or str(error)
        stop = position + sum(len(buffer) for buffer in pending)
        return ReadError(
            f"{self._files[number].path}: cannot read bytes {position} to {stop}: {cause}. "
            "Check the file system, then load again."
        )

    def _handle(self, number: int) -> int:
        handle = self._handles.get(number)
        if handle is not None:
            return handle
        with self._lock:
            if number not in self._handles:
                self._handles[number] = self._open(number)
            return self._handles[number]

    def _open(self, number: int) -> int:
        file = self._files[number]
        flags = os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if self._direct_io else 0)
        try:
            handle = self._retries.call(lambda: open_nonblocking(file.path, flags), self.is_transient)
        except OSError as error:
            if self._direct_io and error.errno == errno.EINVAL:  # this file system has no O_DIRECT
                self._direct_io = False
                return self._open(number)
            raise ReadError(
                f"{file.path}: cannot open: {error.strerror or error}. "
                "Check that the file exists on every node and may be read."
            ) from error
        try:
            _check_size(file, handle)
            self._check_identity(number, handle)
        except BaseException:
            os.close(handle)
            raise
        return handle


def _check_size(file: SourceFile, handle: int) -> None:
    size = status_of_regular(file.path, handle).st_size
    if size != file.size_bytes:
        raise CheckpointError(
            f"{file.path}: expected {file.size_bytes} bytes as when its header was read, found {size}. "
            "The file is truncated here or was replaced; make it the same on every node."
        )
