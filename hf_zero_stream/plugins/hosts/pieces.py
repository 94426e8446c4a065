"""The source of files whose bytes lie in *pieces*, each on one or several of the hosts.

A piece has the bytes that one rank wrote, of many files, one run of bytes after the other. The runs of all pieces
cover the files between them. A rank reads a piece that its host has; another one through a rank of a host that has it
(see :mod:`..relay`). What a file begins with, its header, lies on every host in a file of the same name.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

import numpy

from ...errors import CheckpointError, ReadError, SaveError
from ...plugin_api import (
    READS_PER_EXCHANGE,
    ByteSource,
    Hints,
    ReadableFile,
    SourceFile,
    open_nonblocking,
    status_of_regular,
)


REQUEST_BYTES = 2 * 2**20


_ROWS_PER_BLOCK = 1024


def packed_runs(of_ranks: Sequence[numpy.ndarray], headers: Sequence[int], sizes: Sequence[int]) -> bytes:
    """Where the bytes of all shards lie, for :class:`RunTable`.

    Args:
        of_ranks: for each rank, the int64 rows (shard, start, stop) of what its piece has, in this order.
        headers, sizes: of each shard, in bytes.

    Raises:
        SaveError: a byte behind the headers is in no piece, or in two.
    """
    table = numpy.concatenate([numpy.insert(rows, 0, rank, axis=1) for rank, rows in enumerate(of_ranks)])
    table = table[table[:, 3] > table[:, 2]]
    piece, shard, start, stop = table[numpy.lexsort((table[:, 2], table[:, 1]))].T
    is_first = numpy.diff(shard, prepend=-1) != 0
    expected = numpy.where(is_first, numpy.asarray(headers)[shard], numpy.roll(stop, 1))
    is_last = numpy.roll(is_first, -1)
    there = {number for number, size in enumerate(sizes) if size > headers[number]}
    if (start != expected).any() or (stop != numpy.asarray(sizes)[shard])[is_last].any() or there != {*shard.tolist()}:
        raise SaveError("the pieces of this state do not cover its shards. This is a fault of hf_zero_stream.")
    nbytes = stop - start
    follows = ~is_first & (numpy.diff(piece, prepend=0) == 1) & (numpy.diff(nbytes, prepend=0) == 0)
    begins = numpy.flatnonzero(~follows)
    count = numpy.diff(begins, append=len(piece))
    rows = numpy.stack([piece[begins], count, nbytes[begins], shard[begins]], axis=1)
    return zlib.compress(rows.astype("<i8").tobytes(), 1)


class RunTable:
    """Where the bytes of all shards of a state lie in its pieces.

    A row is `count` runs of `nbytes` bytes each: the first one in the piece `first`, the next one in the piece after
    that. The rows of a shard cover what is behind its header, in order; and a piece has its runs in the order of rows.
    So ZeRO's partitions of a parameter are a row or two, whatever the number of ranks.

    Args:
        data: from :func:`packed_runs`.
        headers, sizes: of each shard, in bytes.
        pieces: the size of each, in bytes.

    Raises:
        ValueError: the rows are not sound.
    """

    def __init__(self, data: bytes, headers: Sequence[int], sizes: Sequence[int], pieces: Sequence[int]) -> None:
        try:
            rows = numpy.frombuffer(zlib.decompress(data), dtype="<i8").reshape(-1, 4)
        except zlib.error as error:
            raise ValueError(str(error)) from error
        self._first, self._count, self._nbytes, shard = (numpy.ascontiguousarray(column) for column in rows.T)
        last = self._first + self._count
        if len(rows) and (self._first.min() < 0 or min(self._count.min(), self._nbytes.min()) < 1):
            raise ValueError("a row is negative")
        if (last > len(pieces)).any() or (numpy.diff(shard) < 0).any() or (shard >= len(sizes)).any():
            raise ValueError("a row is of a piece or a shard that there is not")
        self._rows = numpy.searchsorted(shard, numpy.arange(len(sizes) + 1))
        ends = numpy.cumsum(self._count * self._nbytes)
        totals = numpy.diff(numpy.concatenate([[0], ends])[self._rows])
        if (totals != numpy.asarray(sizes) - numpy.asarray(headers)).any():
            raise ValueError("the pieces do not cover the shards")
        before = numpy.cumsum(totals) - totals - numpy.asarray(headers)
        self._starts = ends - self._count * self._nbytes - numpy.repeat(before, numpy.diff(self._rows))
        # The bytes of each piece before each block of rows.
        blocks = -(-len(rows) // _ROWS_PER_BLOCK)
        changes = numpy.zeros((blocks + 1, len(pieces) + 1), dtype=numpy.int64)
        block = numpy.arange(len(rows)) // _ROWS_PER_BLOCK + 1
        numpy.add.at(changes, (block, self._first), self._nbytes)
        numpy.subtract.at(changes, (block, last), self._nbytes)
        self._before = changes.cumsum(axis=1)[:, :-1].cumsum(axis=0)
        if self._before[-1].tolist() != [*pieces]:
            raise ValueError("the pieces have other sizes")

    def parts(self, shard: int, start: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
        """The places of these bytes of a shard, in order: (piece, position in it, bytes)."""
        begin, end = self._rows[shard], self._rows[shard + 1]
        row = int(begin + numpy.searchsorted(self._starts[begin:end], start, "right")) - 1
        while nbytes > 0:
            if not begin <= row < end:
                raise ReadError(f"bytes from {start} on of shard {shard} are in no piece.")
            size = int(self._nbytes[row])
            number, inside = divmod(start - int(self._starts[row]), size)
            if number < self._count[row]:
                count = min(nbytes, size - inside)
                piece = int(self._first[row]) + number
                yield piece, self._position(piece, row) + inside, count
                start, nbytes = start + count, nbytes - count
            else:
                row += 1

    def _position(self, piece: int, row: int) -> int:
        """Bytes of the `piece` before those of the `row`."""
        block = row // _ROWS_PER_BLOCK
        rows = slice(block * _ROWS_PER_BLOCK, row)
        has_it = (self._first[rows] <= piece) & (piece < self._first[rows] + self._count[rows])
        return int(self._before[block, piece]) + int(self._nbytes[rows][has_it].sum())


class PiecedFile(NamedTuple):
    """A file of `size_bytes`, the shard number `shard` of a table; its first `header_bytes` are in no piece."""

    path: str
    header_bytes: int
    size_bytes: int
    shard: int


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
        table: where their bytes lie.
        here: the pieces that this host has, numbered as all pieces are.
        elsewhere: for each other piece, the client of a rank whose host has it.
        tag: is another one for files of the same names with other contents.
        reading: a context for reads from other hosts.
    """

    def __init__(
        self,
        files: Mapping[str, PiecedFile],
        table: RunTable,
        here: ByteSource,
        elsewhere: Mapping[int, ByteSource],
        tag: str,
        reading: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self._files, self._here, self._elsewhere, self._tag, self._reading = files, here, elsewhere, tag, reading
        self._table = table
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
            for piece, at, count in self._table.parts(file.shard, start, len(buffer)):
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
