"""The source of files that this host mounts: positional reads through one reused handle per file."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO

import psutil

from ..errors import CheckpointError, ReadError
from ..settings.config import DEVICE_REQUEST_BYTES
from .base import Hints, Retries, SourceFile, advance


IOV_MAX = 1024
"""Most buffers that one ``preadv`` or ``pwritev`` takes on Linux."""

RWF_DONTCACHE = 0x80
"""Flag of ``preadv2`` since Linux 6.14, from <linux/fs.h>: what was not cached before is not afterwards."""

READS_PER_EXCHANGE = 4
"""See :attr:`.base.Hints.reads_per_exchange`. Ranks of a host share in the page cache what one of them has read. At
two ranks, holes are read faster than gloo exchanges the bytes beside them (``benchmarks.sharded --ways tp2``)."""

TRANSIENT = frozenset(
    getattr(errno, name)
    for name in "EIO ESTALE EAGAIN EINTR EBUSY ETIMEDOUT ECONNRESET ECONNABORTED "
    "ENETDOWN ENETUNREACH EHOSTDOWN EHOSTUNREACH EREMOTEIO".split()
)
"""Errors that may be gone a moment later. ENOENT, EACCES and a file's end are not: those need a person."""

NETWORK_FILE_SYSTEMS = frozenset(
    "9p afs beegfs ceph cifs daos glusterfs gpfs lustre ncpfs nfs nfs4 ocfs2 orangefs panfs pvfs2 smb2 smb3 smbfs "
    "virtiofs wekafs".split()
)
"""File systems whose data comes from another machine (or the host of a virtual one), as the kernel names them.

Those that begin with ``fuse.`` count too: s3fs, gcsfuse and juicefs do. overlayfs and the like count as local.
"""


def open_nonblocking(path: str, flags: int) -> int:
    """An opener for ``open``: a plain open of a pipe without a writer waits for ever. Regular files are the same."""
    return os.open(path, flags | os.O_NONBLOCK)


def status_of_regular(path: str, handle: int | None = None) -> os.stat_result:
    """The status of the file at `path`, or of its open handle; a CheckpointError if it is not a regular file."""
    status = os.stat(path) if handle is None else os.fstat(handle)
    if not stat.S_ISREG(status.st_mode):
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe, a socket or a device"
        link = f", to which it is a link: {os.path.realpath(path)}" if os.path.islink(path) else ""
        raise CheckpointError(f"{path}: expected a regular file, found {kind}{link}.")
    return status


def kind_of_file_system(path: str, mounts: Iterable[Sequence[str]] | None = None) -> str:
    """The type of the file system that `path` lies on, such as ``"ext4"`` or ``"lustre"``; ``""`` if not known.

    `mounts` has (mount point, type) of each file system; default: those of this host.
    """
    if mounts is None:
        mounts = [(mount.mountpoint, mount.fstype) for mount in psutil.disk_partitions(all=True)]
    path = os.path.realpath(path)  # the hub's cache is made of links
    # Of two at one mount point the later one hides the earlier.
    above = [mount for mount in mounts if os.path.commonpath([path, mount[0]]) == mount[0]]
    return max(reversed(above), key=lambda mount: len(mount[0]), default=("", ""))[1]


def is_on_network(path: str, mounts: Iterable[Sequence[str]] | None = None) -> bool:
    """Whether reading `path` waits for another machine."""
    kind = kind_of_file_system(path, mounts)
    return kind in NETWORK_FILE_SYSTEMS or kind.startswith("fuse.")


def identity_of(paths: Iterable[str]) -> str:
    """A digest that is the same on hosts which see the same files of a network file system, and of no copies."""
    digest, device = hashlib.blake2b(digest_size=8), None
    for path in paths:
        status = os.stat(path)
        if status.st_dev != device:
            device = status.st_dev
            digest.update(kind_of_file_system(path).encode())
        digest.update(f" {status.st_ino} {status.st_size} {status.st_mtime_ns}".encode())
    return digest.hexdigest()


@dataclass
class _HeaderFile:
    size_bytes: int
    file: BinaryIO
    tag: str = ""

    def read(self, start: int, nbytes: int) -> bytes:
        self.file.seek(start)
        return self.file.read(nbytes)


class LocalFiles:
    """Files of this host, or of one that it mounts (see :class:`.base.ByteSource`).

    A file is opened at its first read and closed with the object: opening it anew for each read costs 0.7 ms on a
    network file system where reusing the handle costs 0.05 (hyper-parallel #624).

    Where the files together are larger than `cache_bytes`, what was read is dropped from the page cache: it would push
    out all else, then its own beginning. Linux does that itself where it can (:data:`RWF_DONTCACHE`),
    since advice leaves large pages that go beyond one read: of 800 MiB of ext4 that were read by 2 MiB, 730. (Past the
    page cache, by ``O_DIRECT``, a load was no faster: what the kernel does not copy then, we must.)
    """

    def __init__(
        self,
        files: Sequence[SourceFile] = (),
        *,
        cache_bytes: int = sys.maxsize,
        retries: Retries | None = None,
    ) -> None:
        self._files: tuple[SourceFile, ...] = ()
        self._retries = retries or Retries()
        self.first_status: dict[str, os.stat_result] = {}
        """The status of each file when this rank first saw it, by path."""
        self._cache_bytes = cache_bytes
        self._on_network: dict[str, bool] = {}
        """By file, and by folder."""
        self._handles: dict[int, int] = {}
        self._stale: list[int] = []
        self._takes_flag = True
        """Whether no file system has refused :data:`RWF_DONTCACHE` yet."""
        self._lock = threading.Lock()
        self.bytes_read = self.reads = 0
        self.add(files)

    @contextmanager
    def open_file(self, path: str) -> Iterator[_HeaderFile]:
        with open(path, "rb", opener=open_nonblocking) as file:
            status = status_of_regular(path, file.fileno())
            self.first_status.setdefault(path, status)
            yield _HeaderFile(status.st_size, file)

    def is_transient(self, error: BaseException | None) -> bool:
        return isinstance(error, OSError) and error.errno in TRANSIENT

    def add(self, files: Sequence[SourceFile]) -> None:
        self._files = (*self._files, *files)
        self._keep_cached = sum(file.size_bytes for file in self._files) < self._cache_bytes

    def keep_cached(self) -> None:
        """Drop nothing, however large the files are: another rank of this host reads it too."""
        self._cache_bytes, self._keep_cached = sys.maxsize, True

    def hints(self, paths: Sequence[str]) -> Hints:
        on_network = any(map(self._is_on_network, paths))
        # From a local disk, the system reads ahead while they are copied. Over a network, the default of 64 MiB of
        # staging buffers gives 32 streams: Linux asks a server for 128 to 256 KiB of each at a time. Where 8 ranks of
        # a host have 8 streams each, requests of 8 MiB are as many bytes in flight, and fewer seeks of a disk.
        return Hints(
            request_bytes=2 * 2**20,
            device_request_bytes=0 if on_network else DEVICE_REQUEST_BYTES,
            is_remote=on_network,
            grows_requests=on_network,
            reads_ahead=not on_network,
            streams_per_host=64,  # Lustre gives an H100 node 2.0 GiB/s for 1 stream, 8.5 for 32 (transformers #48227)
            streams_per_rank=32,
            reads_per_exchange=READS_PER_EXCHANGE,
        )

    def _is_on_network(self, path: str) -> bool:
        """Whether this file is, asked once for each file and each file system."""
        if path not in self._on_network:
            # The hub's cache is made of links, and its files may lie elsewhere; a missing file is found later.
            there = os.path.realpath(path) if os.path.islink(path) else path
            folder = os.path.dirname(there)
            if folder not in self._on_network:
                self._on_network[folder] = is_on_network(folder)
            self._on_network[path] = self._on_network[folder]
        return self._on_network[path]

    def open(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._handle(number)

    def read_into(self, number: int, start: int, buffers: Sequence[memoryview]) -> None:
        self._handle(number)
        length = sum(map(len, buffers))
        with self._lock:
            self.bytes_read += length
            self.reads += 1
        try:
            self._read(number, start, [buffer for buffer in buffers if len(buffer)])
        except ReadError:  # the file could not be opened again
            raise
        except (OSError, EOFError) as error:
            path = self._files[number].path
            if isinstance(error, EOFError):
                self._check_identity(path, os.fstat(self._handle(number)))
            raise ReadError(
                f"{path}: cannot read bytes {start} to {start + length}: "
                f"{getattr(error, 'strerror', None) or error}. Check the file system, then load again."
            ) from error
        if not self._keep_cached and not self._takes_flag:
            os.posix_fadvise(self._handle(number), start, length, os.POSIX_FADV_DONTNEED)

    def check_unchanged(self) -> None:
        for path in self.check_open():
            try:
                self._check_identity(path, os.stat(path))
            except FileNotFoundError:
                raise _changed_error(path, "removed") from None

    def check_open(self) -> list[str]:
        """The paths of the files that are open; a CheckpointError if one of these was written to or truncated."""
        with self._lock:
            handles = {self._files[number].path: handle for number, handle in self._handles.items()}
        for path, handle in handles.items():
            self._check_identity(path, os.fstat(handle))
        return [*handles]

    def finish(self) -> None:
        pass

    def close(self) -> None:
        """Close every handle; a later read opens its file again."""
        with self._lock:
            handles, self._handles, self._stale = [*self._handles.values(), *self._stale], {}, []
        for handle in handles:
            os.close(handle)

    def _read(self, number: int, position: int, pending: list[memoryview]) -> None:
        while pending:
            count = self._read_some(number, pending[:IOV_MAX], position)
            if count == 0:
                raise EOFError("the file ends here")
            position += count
            advance(pending, count)

    def _read_some(self, number: int, buffers: list[memoryview], position: int) -> int:
        """One ``preadv``, tried again if it failed for a passing reason; with a new handle if the old one is stale."""

        def read() -> int:
            try:
                return self._preadv(self._handle(number), buffers, position)
            except OSError as error:
                if error.errno == errno.ESTALE:
                    with self._lock:
                        if number in self._handles:  # not closed yet: another thread may be reading from it
                            self._stale.append(self._handles.pop(number))
                raise

        return self._retries.call(read, self.is_transient)

    def _preadv(self, handle: int, buffers: list[memoryview], position: int) -> int:
        if not self._keep_cached and self._takes_flag:
            try:
                return os.preadv(handle, buffers, position, RWF_DONTCACHE)
            except OSError as error:
                if error.errno != errno.EOPNOTSUPP:
                    raise
                self._takes_flag = False
        return os.preadv(handle, buffers, position)

    def _handle(self, number: int) -> int:
        handle = self._handles.get(number)  # without the lock: every read comes through here
        if handle is not None:
            return handle
        with self._lock:
            if number not in self._handles:
                self._handles[number] = self._open(number)
            return self._handles[number]

    def _open(self, number: int) -> int:
        file = self._files[number]
        flags = os.O_RDONLY | os.O_CLOEXEC
        try:
            handle = self._retries.call(lambda: open_nonblocking(file.path, flags), self.is_transient)
        except OSError as error:
            advice = "Check that the file exists on every node and may be read."
            if error.errno in (errno.EMFILE, errno.ENFILE):
                advice = "This process, or its host, may open no more: raise the limit (ulimit -n)."
            raise ReadError(f"{file.path}: cannot open: {error.strerror or error}. {advice}") from error
        try:
            status = status_of_regular(file.path, handle)
            if status.st_size != file.size_bytes:
                raise CheckpointError(
                    f"{file.path}: expected {file.size_bytes} bytes as when its header was read, found "
                    f"{status.st_size}. The file is truncated here or was replaced; make it the same on every node."
                )
            self._check_identity(file.path, status)
        except BaseException:
            os.close(handle)
            raise
        return handle

    def _check_identity(self, path: str, now: os.stat_result) -> None:
        """Compare a file's status with the first one that this rank saw: other hosts may see times less precisely."""
        before = self.first_status.setdefault(path, now)
        if not os.path.samestat(before, now):
            raise _changed_error(path, "replaced")
        if now.st_size < before.st_size:
            raise _changed_error(path, "truncated")
        if (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
            raise _changed_error(path, "written to")


def _changed_error(path: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: was {what} while it was being loaded, so that the model may hold parts of two versions. Wait until "
        "whoever writes it is done, then load again."
    )
