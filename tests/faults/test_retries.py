"""Faults that pass are tried again, a bounded number of times, and counted; others are not."""

import errno
import os
import shutil
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import hf_zero_stream
from hf_zero_stream.errors import CheckpointError, ReadError
from hf_zero_stream.sources.base import Retries, SourceFile
from hf_zero_stream.sources.local import LocalFiles
from tests.support.cluster import run_ranks
from tests.support.disk import disk, failing, replace_reads
from tests.support.parity import ds_config
from tests.support.zoo import Checkpoint


SIZE = 20_000


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses between attempts, which are not made."""
    made: list[float] = []
    monkeypatch.setattr(time, "sleep", made.append)
    return made


@pytest.fixture
def shard(tmp_path: Path) -> SourceFile:
    path = tmp_path / "x.safetensors"
    path.write_bytes(bytes(number % 251 for number in range(SIZE)))
    return SourceFile(str(path), SIZE)


def read(files: LocalFiles, start: int = 3, length: int = 100) -> bytes:
    buffer = bytearray(length)
    files.read_into(0, start, [memoryview(buffer)])
    return bytes(buffer)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN])
def test_a_fault_that_passes(
    shard: SourceFile, pauses: list[float], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(os, "open", partial(failing(number, 1), os.open))
    before = len(os.listdir("/proc/self/fd"))
    retries = Retries(4)
    with closing(LocalFiles([shard], retries=retries)) as files, disk(failing(number, 3)):
        assert read(files) == Path(shard.path).read_bytes()[3:103]
        assert retries.count == 4
        assert pauses == [0.1, 0.1, 0.2, 0.4], "each call begins anew, and waits twice as long each time"
        files.check_unchanged()
    assert len(os.listdir("/proc/self/fd")) == before, "stale handles are closed too"


def test_the_number_is_bounded(shard: SourceFile, pauses: list[float]) -> None:
    for limit in (2, 0):
        with closing(LocalFiles([shard], retries=Retries(limit))) as files, disk(failing(errno.EIO)):
            with pytest.raises(ReadError, match="Input/output error"):
                read(files)
        assert len(pauses) == limit
        pauses.clear()


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EACCES, errno.EINVAL])
def test_a_fault_that_stays(
    shard: SourceFile, pauses: list[float], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(os, "open", partial(failing(number, 1), os.open))
    with closing(LocalFiles([shard], retries=Retries(4))) as files, pytest.raises(ReadError, match="cannot open"):
        read(files)
    assert pauses == []


def test_a_short_file_is_not_read_again(shard: SourceFile, pauses: list[float]) -> None:
    with (
        closing(LocalFiles([shard], retries=Retries(4))) as files,
        pytest.raises(ReadError, match="the file ends here"),
    ):
        read(files, SIZE - 5)
    assert pauses == []


# --------------------------------------------------------------------------------------------------- changed files


def replace(path: Path) -> None:
    shutil.copy2(path, path.with_suffix(".new"))
    os.replace(path.with_suffix(".new"), path)


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def overwrite(path: Path) -> None:
    path.write_bytes(path.read_bytes())
    os.utime(path, ns=(0, 1))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (replace, "replaced"),
        (overwrite, "written to"),
        (append, "written to"),
        (lambda path: os.truncate(path, SIZE - 1), "truncated"),
        (Path.unlink, "removed"),
    ],
    ids=["replaced", "overwritten", "appended", "truncated", "removed"],
)
def test_a_file_that_changes_while_it_is_read(shard: SourceFile, change: Callable[[Path], None], what: str) -> None:
    with closing(LocalFiles([shard])) as files:
        read(files)
        files.check_unchanged()
        change(Path(shard.path))
        with pytest.raises(CheckpointError, match=f"was {what} while it was being loaded"):
            files.check_unchanged()


def test_a_file_that_changed_since_its_header_was_read(shard: SourceFile) -> None:
    with closing(LocalFiles()) as files:
        with files.open_file(shard.path) as file:
            assert (file.size_bytes, file.read(3, 2)) == (SIZE, bytes([3, 4]))
        replace(Path(shard.path))
        files.add([shard])
        with pytest.raises(CheckpointError, match="was replaced"):
            read(files)


def test_a_stale_handle_to_a_replaced_file(shard: SourceFile, pauses: list[float]) -> None:
    with closing(LocalFiles([shard], retries=Retries(4))) as files:
        read(files)
        replace(Path(shard.path))
        with disk(failing(errno.ESTALE, 1)), pytest.raises(CheckpointError, match="was replaced"):
            read(files)


# --------------------------------------------------------------------------------------------------------- loads


def load_through_faults(folder: Path) -> dict[str, Any]:
    """Rank 1 has a file system with hiccups; rank 0's first open, of a header, fails once."""
    real_open = os.open
    if dist.get_rank() == 1:
        replace_reads(failing(errno.EIO, 2))
    else:
        failing_open = partial(failing(errno.ESTALE, 3), real_open)  # reading ahead leaves what fails to the reads
        os.open = lambda path, *args, **kwargs: (failing_open if str(path).endswith(".safetensors") else real_open)(
            path, *args, **kwargs
        )
    config = ds_config()
    model = hf_zero_stream.StreamingAutoModelForCausalLM.from_pretrained(folder, ds_config=config)
    os.open = real_open
    report = model.streaming_report
    return {"retries": [rank.retries for rank in report.ranks], "table": report.table()}


def test_loads_count_what_they_tried_again(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    for result in run_ranks(2, load_through_faults, zoo_checkpoint("qwen3_moe")):
        assert result["retries"][1] == 2 and result["retries"][0] >= 1
        assert "Tried again after passing faults of the file system" in result["table"]
        assert "rank 1: 2" in " ".join(result["table"].split())  # lines are wrapped
