"""The interface of a source of a checkpoint's files, retries, and the source that serves files and URLs."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol, TypeVar

from ..errors import ReadError


T = TypeVar("T")

RETRIES = 4
"""Retries of an open or a read of a load, if it may succeed: for 1.5 s in all.

The kernel itself waits for what takes longer, such as a file server that restarts.
"""


_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]+://|(s3|gs|az|https?|hf):/", re.IGNORECASE)
"""The beginning of a URL of any scheme. The second form is what is left of one of ours in a ``Path``."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file, by its name in the source, and the size that it had when some rank read its header.

    `tag` changes with the contents and is the same for all ranks, as an object's ETag is; "" if there is none.
    """

    path: str
    size_bytes: int
    tag: str = field(default="", kw_only=True)


class ReadableFile(Protocol):
    """One open file, for reading its header; used by one thread."""

    size_bytes: int
    tag: str

    def read(self, start: int, nbytes: int) -> bytes:
        """The bytes from `start` on; fewer than `nbytes` only where the file ends."""


@dataclass(frozen=True, slots=True)
class Hints:
    """Sizes and counts with which a source is best read, within the user's settings. Streams count if `is_remote`."""

    request_bytes: int
    device_request_bytes: int = 0
    """`request_bytes` for bytes that pass through pinned memory to a device, where each request costs; 0: the same."""
    is_remote: bool = False
    """Each request waits for another machine: more of them in flight give more bytes per second."""
    reads_ahead: bool = False
    """The files are on this host, and it pays to bring them into the page cache in advance."""
    streams_per_host: int = 0
    """Requests in flight that use all of the bandwidth."""
    streams_per_rank: int = 0
    """Most requests that one rank has in flight."""
    grows_requests: bool = False
    """`request_bytes` are for many streams: a rank that has few asks for more at once, to use all staging buffers."""
    seek_bytes: int = 4096
    """A hole of up to this size costs less than another request."""
    reads_per_exchange: int = 1
    """Bytes that are read, about, in the time in which a rank gets one from another; equal on all ranks."""
    is_everywhere: bool = False
    """All ranks read the same files, whose tags rank 0 shares with the headers: there are no copies to compare."""


class ByteSource(Protocol):
    """Gives the bytes of a checkpoint's files. Calls come in this order:

    1. :meth:`open_file`, for each file whose header this rank reads. The source remembers the file's state at the
       first time.
    2. :meth:`add`, with the headers' files. They are numbered in this order, from 0 on. It may be called again later.
    3. :meth:`hints`, with the paths of all files.
    4. :meth:`open`, with the numbers of files that are going to be read. Optional: a read opens what is not open.
    5. :meth:`read_into`, by many threads at once.
    6. :meth:`check_unchanged`, when all has been read.
    7. :meth:`finish`, where nothing failed.
    8. :meth:`close`, always.

    :meth:`open`, :meth:`read_into` and the counters must be safe to use from several threads. No call is collective.
    A source itself tries again what fails for a passing reason (:class:`Retries`).

    The *state* of a file can be anything that changes with its contents: device, inode, size and time of a local file,
    the ETag of an object. It is compared with the state that the same rank saw before; a tag is the same on all ranks.

    Raises:
        ReadError: a file cannot be opened or read, or ends too early.
        CheckpointError: a file has another size than :meth:`add` was told, is not the one whose header was read, or
            (:meth:`check_unchanged`) has been written to, cut short, replaced or removed.
    """

    @property
    def bytes_read(self) -> int:
        """Bytes that :meth:`read_into` was asked for so far, with the holes between wanted bytes."""

    @property
    def reads(self) -> int:
        """Calls of :meth:`read_into` so far."""

    def open_file(self, path: str) -> AbstractContextManager[ReadableFile]:
        """Open one file to read its header, or a few bytes elsewhere.

        Raises:
            OSError: it is missing or cannot be read; the source's own error, not yet tried again.
            CheckpointError: it is no file.
        """

    def is_transient(self, error: BaseException | None) -> bool:
        """Whether an error of :meth:`open_file`, or of reading from its file, may be gone a moment later."""

    def add(self, files: Sequence[SourceFile]) -> None:
        """Number these files, after those that were added before; opens nothing."""

    def hints(self, paths: Sequence[str]) -> Hints:
        """The hints for these files; does not read them."""

    def open(self, numbers: Iterable[int]) -> None:
        """Open these files, so that one that cannot be opened is found before anything is read."""

    def read_into(self, number: int, start: int, buffers: Sequence[memoryview]) -> None:
        """Fill `buffers` (writable, contiguous, of format ``B``) in order with a file's bytes from `start` on."""

    def check_unchanged(self) -> None:
        """Check that the files that this rank read from have not changed."""

    def finish(self) -> None:
        """Wait until no other rank reads through this source; a ReadError if a read for one failed."""

    def close(self) -> None:
        """Close all files. May be called again."""


class Retries:
    """Tries each call again up to `limit` times, after 0.1 s, 0.2 s, 0.4 s and so on to 5 s; threads may share it."""

    def __init__(self, limit: int = 0) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self.count = 0
        """Calls that were tried again so far."""

    def call(
        self, function: Callable[[], T], is_transient: Callable[[BaseException], bool], *, jitter: bool = False
    ) -> T:
        """Return what `function` returns, or raise its last error; only transient errors are tried again.

        With `jitter`, pauses are random, from 0 to twice as long: clients of a server must not come back together.
        """
        retries = 0
        while True:
            try:
                return function()
            except BaseException as error:
                if retries >= self._limit or not is_transient(error):
                    raise
            pause_s = min(5.0, 0.1 * 2**retries)
            time.sleep(Random().uniform(0.0, 2 * pause_s) if jitter else pause_s)  # not by the training's numbers
            retries += 1
            with self._lock:
                self.count += 1


@contextmanager
def as_read_error(path: str, what: str) -> Iterator[None]:
    """Turn an error of reading the file at `path` into a ReadError, whose cause it is; `what` is in the file."""
    try:
        yield
    except ReadError:
        raise
    except OSError as error:
        raise ReadError(
            f"{path}: cannot read {what}: {error.strerror or error}. Check that the file exists on every node and may "
            "be read."
        ) from error


def is_url(path: Any) -> bool:
    """Whether `path` is a URL of any scheme; no URL is the name of a folder or of a repository."""
    return isinstance(path, (str, os.PathLike)) and _ADDRESS.match(str(path)) is not None


def has_url_argument(*args: Any, **kwargs: Any) -> bool:
    """Whether an argument of a call is a URL."""
    return any(map(is_url, (*args, *kwargs.values())))


def advance(pending: list[memoryview], count: int) -> None:
    """Drop the first `count` bytes of `pending`, after a read or write that did only these."""
    while pending and count >= len(pending[0]):
        count -= len(pending.pop(0))
    if count:
        pending[0] = pending[0][count:]


def is_plain_name(name: str) -> bool:
    """Whether `name` is that of something in a folder, and leads nowhere else."""
    return name not in ("", ".", "..") and "/" not in name and "\0" not in name
