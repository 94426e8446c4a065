"""Where bytes of shards lie in pieces: a table that stays small, and refuses what does not fit together."""

from __future__ import annotations

import random
import zlib

import numpy
import pytest

from hf_zero_stream.errors import SaveError
from hf_zero_stream.plugins.hosts.pieces import RunTable, packed_runs


def cut(seed: int, ranks: int) -> tuple[list[bytes], list[int], list[numpy.ndarray], list[bytes]]:
    """Shards, the size of their headers, the runs of each rank, and the pieces with their bytes."""
    draw = random.Random(seed)
    shards, headers, runs = [], [], [list[list[int]]() for _ in range(ranks)]
    for shard in range(3):
        position = draw.randrange(1, 9)
        headers.append(position)
        for _ in range(draw.choice([0, 5, 3000])):
            each = draw.choice([1, 2, 7])
            for rank in range(ranks) if draw.random() < 0.8 else [draw.randrange(ranks)]:
                nbytes = each if draw.random() < 0.95 else draw.randrange(9)
                runs[rank].append([shard, position, position + nbytes])
                position += nbytes
        shards.append(draw.randbytes(position))
    tables = [numpy.array(of_rank, dtype="<i8").reshape(-1, 3) for of_rank in runs]
    pieces = [b"".join(shards[shard][start:stop] for shard, start, stop in of_rank) for of_rank in runs]
    return shards, headers, tables, pieces


@pytest.mark.parametrize("ranks", [1, 5])
@pytest.mark.parametrize("seed", range(4))
def test_bytes_are_found(seed: int, ranks: int) -> None:
    shards, headers, tables, pieces = cut(seed, ranks)
    sizes = [*map(len, shards)]
    table = RunTable(packed_runs(tables, headers, sizes), headers, sizes, [*map(len, pieces)])
    draw = random.Random(seed)
    for shard, data in enumerate(shards):
        for _ in range(50 if len(data) > headers[shard] else 0):
            start = draw.randrange(headers[shard], len(data))
            nbytes = draw.randrange(min(200, len(data) - start) + 1)
            parts = table.parts(shard, start, nbytes)
            assert b"".join(pieces[piece][at : at + count] for piece, at, count in parts) == data[start:][:nbytes]


def test_what_does_not_fit_together() -> None:
    shards, headers, tables, pieces = cut(1, 3)
    sizes, lengths = [*map(len, shards)], [*map(len, pieces)]
    data = packed_runs(tables, headers, sizes)
    longest = max(range(3), key=sizes.__getitem__)
    for broken in (sizes[:longest] + [sizes[longest] + 1] + sizes[longest + 1 :], [size - 1 for size in sizes]):
        with pytest.raises(SaveError):
            packed_runs(tables, headers, broken)
        with pytest.raises(ValueError):
            RunTable(data, headers, broken, lengths)
    rows = numpy.frombuffer(zlib.decompress(data), dtype="<i8").reshape(-1, 4)
    for column in range(4):
        for value in (-1, 10**6):
            other = rows.copy()
            other[len(rows) // 2, column] = value
            with pytest.raises(ValueError):
                RunTable(zlib.compress(other.tobytes()), headers, sizes, lengths)
    for other_data in (data[:-9], b""):
        with pytest.raises(ValueError):
            RunTable(other_data, headers, sizes, lengths)


def test_many_small_tensors() -> None:
    """ZeRO's partitions of 18,000 tensors on 64 ranks: a run for each of both is not written down."""
    starts = 8 + numpy.arange(18_000) * 64 * 16
    tables = [
        numpy.stack([starts * 0, starts + rank * 16, starts + (rank + 1) * 16], axis=1).astype("<i8")
        for rank in range(64)
    ]
    size = 8 + 18_000 * 64 * 16
    assert len(packed_runs(tables, [8], [size])) < 2**20
