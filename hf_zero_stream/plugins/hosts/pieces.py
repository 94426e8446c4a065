"""The source of files whose bytes lie in *pieces*, each on one or several of the hosts.

A piece has the bytes that one rank wrote, of many files, one run of bytes after the other. The runs of all pieces
cover the files between them. A rank reads a piece that its host has; another one through a rank of a host that has it
(see :mod:`...sources.relay`). What a file begins with, its header, lies on every host in a file of the same name.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

from ...errors import CheckpointError, ReadError
from ...sources.base import ByteSource, Hints, ReadableFile, SourceFile
from ...sources.local import READS_PER_EXCHANGE, open_nonblocking, status_of_regular


REQUEST_BYTES = 2 * 2**20


class Run(NamedTuple):
    """Bytes ``[start, stop)`` of the file number `file`; they lie in the piece number `piece` from byte `at` on."""

    file: int
    start: int
    stop: int
    piece: int
    at: int


@dataclass(frozen=True)
class PiecedFile:
    """A file of `size_bytes`, of which the first `header_bytes` are in no piece; the `runs` are in file order.

    Raises:
        CheckpointError: the runs leave a hole, or overlap.
    """

    path: str
    header_bytes: int
    size_bytes: int
    runs: Sequence[Run]

    def __post_init__(self) -> None:
        covered = self.header_bytes
        for run in self.runs:
            if run.start != covered:
                raise CheckpointError(f"{self.path}: expected the bytes from {covered} on in a piece; found {run}.")
            covered = run.stop
        if covered != self.size_bytes:
            raise CheckpointError(
                f"{self.path}: expected {self.size_bytes} bytes; pieces have {covered}. Go on from another state."
            )

    def parts(self, start: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
        """The places of these bytes, in order: (piece, position in it, bytes)."""
        number = bisect_right(self.runs, start, key=lambda run: run.start) - 1
        while nbytes > 0:
            if not 0 <= number < len(self.runs):
                raise ReadError(f"{self.path}: bytes from {start} on are in no piece.")
            run = self.runs[number]
            count = min(nbytes, run.stop - start)
            yield run.piece, run.at + start - run.start, count
            start, nbytes, number = start + count, nbytes - count, number + 1


@dataclass
class _HeaderOfPieced:
    size_bytes: int
    tag: str
    file: BinaryIO

    def read(self, start: int, nbytes: int) -> bytes:
        self.file.seek(start)
        return self.file.read(nbytes)


class PiecedFiles:
    """Files in pieces, for one load (see :class:`...sources.base.ByteSource`); loads share the sources of the pieces.

    Args:
        files: all files, by their paths.
        here: the pieces that this host has, numbered as all pieces are.
        elsewhere: for each other piece, the client of a rank whose host has it.
        tag: is another one for files of the same names with other contents.
        reading: a context for reads from other hosts.
    """

    def __init__(
        self,
        files: Mapping[str, PiecedFile],
        here: ByteSource,
        elsewhere: Mapping[int, ByteSource],
        tag: str,
        reading: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self._files, self._here, self._elsewhere, self._tag, self._reading = files, here, elsewhere, tag, reading
        self._numbered: list[PiecedFile] = []
        self._lock = threading.Lock()
        self.bytes_read = self.reads = 0

    @contextmanager
    def open_file(self, path: str) -> Iterator[ReadableFile]:
        found = self._file_at(path)
        with open(path, "rb", opener=open_nonblocking) as file:
            status = status_of_regular(path, file.fileno())
            if status.st_size != found.header_bytes:
                raise CheckpointError(
                    f"{path}: expected the {found.header_bytes} bytes of its header; found {status.st_size}."
                )
            yield _HeaderOfPieced(found.size_bytes, self._tag, file)

    def is_transient(self, error: BaseException | None) -> bool:
        return self._here.is_transient(error)

    def add(self, files: Sequence[SourceFile]) -> None:
        self._numbered += [self._file_at(file.path) for file in files]

    def hints(self, paths: Sequence[str]) -> Hints:
        del paths
        return Hints(request_bytes=REQUEST_BYTES, reads_per_exchange=READS_PER_EXCHANGE, is_everywhere=True)

    def open(self, numbers: Iterable[int]) -> None:
        """Do nothing: whether all pieces are there was seen before."""

    def read_into(self, number: int, start: int, buffers: Sequence[memoryview]) -> None:
        with self._lock:
            self.reads += 1
            self.bytes_read += sum(map(len, buffers))
        file = self._numbered[number]
        for buffer in buffers:
            done = 0
            for piece, at, count in file.parts(start, len(buffer)):
                part = buffer[done : done + count]
                if piece in self._elsewhere:
                    with self._reading():
                        self._elsewhere[piece].read_into(piece, at, [part])
                else:
                    self._here.read_into(piece, at, [part])
                done += count
            start += len(buffer)

    def check_unchanged(self) -> None:
        self._here.check_unchanged()

    def finish(self) -> None:
        """Do nothing: the sources of the pieces serve the next load too."""

    def close(self) -> None:
        """Do nothing, as :meth:`finish`."""

    def _file_at(self, path: str) -> PiecedFile:
        found = self._files.get(os.path.abspath(path))
        if found is None:
            raise CheckpointError(f"{path}: expected one of the files of this state: {', '.join([*self._files][:8])}")
        return found
