"""Positional reads: every way of reading gives the same bytes, and says where it failed."""

import os
import random
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from hf_zero_stream.errors import CheckpointError, ReadError
from hf_zero_stream.sources import local as source
from hf_zero_stream.sources.base import SourceFile
from hf_zero_stream.sources.local import LocalFiles
from tests.support.disk import disk


SIZE = 50_001


@pytest.fixture
def shard(tmp_path: Path) -> SourceFile:
    path = tmp_path / "x.safetensors"
    path.write_bytes(random.Random(0).randbytes(SIZE))
    return SourceFile(str(path), SIZE)


@pytest.mark.parametrize("settings", [{}, {"cache_bytes": 0}], ids=str)
def test_every_range(shard: SourceFile, settings: dict[str, Any]) -> None:
    data = Path(shard.path).read_bytes()
    rng = random.Random(1)
    with closing(LocalFiles([shard], **settings)) as files:
        for _ in range(200):
            start = rng.randrange(SIZE)
            lengths = [rng.choice([0, 1, 7, 4096, 5000]) for _ in range(rng.randint(1, 5))]
            lengths = [length for length in lengths if start + sum(lengths) <= SIZE]
            buffers = [memoryview(bytearray(length)) for length in lengths]
            files.read_into(0, start, buffers)
            assert b"".join(buffers) == data[start : start + sum(lengths)]
        read = bytearray(SIZE)
        files.read_into(0, 0, [memoryview(read)])
        assert bytes(read) == data


def test_short_reads_go_on(shard: SourceFile) -> None:
    """A kernel may return less than was asked for."""

    def read_little(real: Callable[..., int], handle: int, buffers: list[memoryview], position: int) -> int:
        return real(handle, [buffers[0][:8192]], position)

    buffers = [memoryview(bytearray(20_000)), memoryview(bytearray(20_000))]
    with closing(LocalFiles([shard])) as files, disk(read_little):
        files.read_into(0, 123, buffers)
    assert b"".join(buffers) == Path(shard.path).read_bytes()[123:40_123]


def test_many_buffers(shard: SourceFile) -> None:
    buffers = [memoryview(bytearray(1)) for _ in range(source.IOV_MAX * 2 + 3)]
    with closing(LocalFiles([shard])) as files:
        files.read_into(0, 5, buffers)
        assert (files.bytes_read, files.reads) == (len(buffers), 1)
    assert b"".join(buffers) == Path(shard.path).read_bytes()[5 : 5 + len(buffers)]


def test_past_the_end(shard: SourceFile) -> None:
    with closing(LocalFiles([shard])) as files, pytest.raises(ReadError, match="the file ends here") as e:
        files.read_into(0, SIZE - 5, [memoryview(bytearray(5000))])
    assert shard.path in str(e.value)


def test_missing_and_replaced(shard: SourceFile, tmp_path: Path) -> None:
    nowhere = SourceFile(str(tmp_path / "nowhere"), 5)
    with closing(LocalFiles([nowhere])) as files, pytest.raises(ReadError, match="nowhere"):
        files.read_into(0, 0, [memoryview(bytearray(1))])
    Path(shard.path).write_bytes(b"shorter")
    with closing(LocalFiles([shard])) as files, pytest.raises(CheckpointError, match="truncated here or was replaced"):
        files.read_into(0, 0, [memoryview(bytearray(1))])


def test_handles_are_reused_and_closed(shard: SourceFile) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with closing(LocalFiles([shard])) as files:
        for start in range(10):
            files.read_into(0, start, [memoryview(bytearray(1))])
        assert len(os.listdir("/proc/self/fd")) == before + 1
    assert len(os.listdir("/proc/self/fd")) == before
