"""The ranks of a host have a checkpoint cached together, ahead of the reads and no further than they should."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import save_file

from hf_zero_stream import StreamingAutoModelForCausalLM
from hf_zero_stream.checkpoint import formats
from hf_zero_stream.engine import execute, host_part, opened
from hf_zero_stream.engine import reader as reading
from hf_zero_stream.errors import CheckpointError
from hf_zero_stream.planning.plan import Read, Target, plan_batch
from hf_zero_stream.ranks.coordinator import Coordinator
from hf_zero_stream.settings.config import StreamingConfig
from hf_zero_stream.sources import local, page_cache
from hf_zero_stream.sources.local import LocalFiles
from hf_zero_stream.sources.page_cache import WINDOW_BYTES, ReadAhead, drop_from_cache
from tests.support.cluster import run_ranks
from tests.support.parity import ds_config
from tests.support.zoo import Checkpoint


MIDDLE = WINDOW_BYTES // 2
"""Where to look in a window: Linux may bring in more than was asked for around its ends."""


@pytest.fixture
def cold_files(tmp_path: Path) -> list[str]:
    """Files of three windows and of one and a half, of which nothing is cached."""
    paths = [tmp_path / "first", tmp_path / "second"]
    paths[0].write_bytes(os.urandom(3 * WINDOW_BYTES))
    paths[1].write_bytes(os.urandom(WINDOW_BYTES + MIDDLE))
    drop_from_cache(paths)
    assert not any(is_cached(str(path), MIDDLE) for path in paths)
    return [str(path) for path in paths]


def is_cached(path: str, position: int) -> bool:
    """Asked of ``mincore(2)``: looking by a read, even with RWF_NOWAIT, would bring the page in."""
    resident = ctypes.c_ubyte()
    begin = position // mmap.PAGESIZE * mmap.PAGESIZE
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), mmap.PAGESIZE, offset=begin) as page:
        address = ctypes.addressof(ctypes.c_char.from_buffer(page))
        length = ctypes.c_size_t(mmap.PAGESIZE)
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), length, ctypes.byref(resident)) == 0
    return bool(resident.value & 1)


def ahead_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "hf_zero_stream-ahead"]


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def finish(ahead: ReadAhead) -> None:
    wait_until(lambda: not ahead_threads())
    ahead.stop()


def test_one_rank_has_everything_cached(cold_files: list[str]) -> None:
    finish(ReadAhead(cold_files, 0, 1))
    assert all(is_cached(cold_files[0], number * WINDOW_BYTES + MIDDLE) for number in range(3))
    assert all(is_cached(cold_files[1], position) for position in (MIDDLE, WINDOW_BYTES + MIDDLE - 1))


def test_two_ranks_take_turns(cold_files: list[str]) -> None:
    """Windows are counted through all files: the first of the second file is number 3."""

    def cached() -> list[bool]:
        places = [(0, 0), (0, 1), (0, 2), (1, 0)]
        return [is_cached(cold_files[file], window * WINDOW_BYTES + MIDDLE) for file, window in places]

    finish(ReadAhead(cold_files, 0, 2))
    assert cached() == [True, False, True, False]
    drop_from_cache(cold_files)
    finish(ReadAhead(cold_files, 1, 2))
    assert cached() == [False, True, False, True]


def test_lead_is_bounded(cold_files: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_cache, "LEAD_BYTES", WINDOW_BYTES)
    ahead = ReadAhead(cold_files, 0, 1)
    try:
        wait_until(lambda: is_cached(cold_files[0], WINDOW_BYTES + MIDDLE))
        time.sleep(0.2)
        assert not is_cached(cold_files[0], 2 * WINDOW_BYTES + MIDDLE)
        ahead.set_progress(0.5)
        wait_until(lambda: is_cached(cold_files[1], MIDDLE))
    finally:
        ahead.stop()
    assert ahead_threads() == []


def test_what_is_cached_is_left_alone(cold_files: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Mapping it would cost a warm load a tenth of its time."""
    found: list[bool] = []
    populated: list[int] = []
    ask, tell = page_cache.is_resident, page_cache.advise

    def is_resident(address: int, nbytes: int) -> bool:
        found.append(ask(address, nbytes))
        return found[-1]

    def advise(address: int, nbytes: int, advice: int) -> bool:
        populated.extend([nbytes] * (advice == page_cache.MADV_POPULATE_READ))
        return tell(address, nbytes, advice)

    monkeypatch.setattr(page_cache, "is_resident", is_resident)
    monkeypatch.setattr(page_cache, "advise", advise)
    finish(ReadAhead(cold_files, 0, 1))
    assert not any(found[:3])
    assert len(found) == 5
    # A machine whose memory is short may drop pages between any two steps: what was found is what counts.
    wait_until(lambda: ask_again(cold_files, found))
    assert len(populated) == found.count(False)
    before, asked = len(populated), len(found)
    monkeypatch.setattr(page_cache, "_can_query_page_cache", lambda handle: False)  # a file of somebody else
    finish(ReadAhead(cold_files, 0, 1))
    assert len(populated) == before + 5
    assert len(found) == asked


def ask_again(files: list[str], found: list[bool]) -> bool:
    """Read ahead once more; whether all five windows were found in the page cache."""
    finish(ReadAhead(files, 0, 1))
    return all(found[-5:])


def test_what_fails_is_left_to_the_reads(cold_files: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    failures: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", failures.append)
    monkeypatch.setattr(page_cache, "LEAD_BYTES", 0)
    ahead = ReadAhead(cold_files, 0, 1)
    os.truncate(cold_files[0], WINDOW_BYTES)
    os.remove(cold_files[1])
    ahead.set_progress(1.0)
    finish(ahead)
    monkeypatch.setattr(page_cache, "advise", lambda *args: False)
    finish(ReadAhead(cold_files[:1], 0, 1))
    assert failures == []


# ------------------------------------------------------------------------------------------------ when it is used


class Recorded(ReadAhead):
    """Remembers what it was asked for, and whether it was stopped."""

    made: ClassVar[list[Recorded]] = []

    def __init__(self, paths: Sequence[str], share: int, shares: int) -> None:
        self.asked = (tuple(paths), share, shares)
        self.is_kept = True
        self.made.append(self)
        super().__init__(paths, share, shares)

    def stop(self) -> None:
        self.is_kept = False
        super().stop()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Recorded]]:
    monkeypatch.setattr(opened, "ReadAhead", Recorded)
    Recorded.made.clear()
    yield Recorded.made
    assert ahead_threads() == []


@pytest.mark.parametrize(
    ("settings", "ranks_on_host", "on_network", "free_memory", "used"),
    [
        ({}, 4, False, 2**40, True),
        ({}, 2, False, 2**40, False),
        ({}, 4, True, 2**40, False),
        ({}, 4, False, WINDOW_BYTES, False),
        ({"read_from": "rank0"}, 4, False, 2**40, False),
    ],
    ids=["one host", "two hosts", "over a network", "too large", "read by another rank"],
)
def test_only_where_it_is_of_use(
    cold_files: list[str],
    monkeypatch: pytest.MonkeyPatch,
    made: list[Recorded],
    settings: dict[str, Any],
    ranks_on_host: int,
    on_network: bool,
    free_memory: int,
    used: bool,
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks_on_host))
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(local, "is_on_network", lambda path: on_network)
    monkeypatch.setattr(opened, "free_memory", lambda: free_memory)
    coordinator = Coordinator(1, 4, alone=True)
    checkpoint = opened.OpenCheckpoint(StreamingConfig(**settings), coordinator)
    checkpoint.read_ahead(cold_files)
    checkpoint.read_ahead(cold_files)
    checkpoint.read_ahead([*cold_files, "missing"])
    checkpoint.close()
    assert [ahead.asked for ahead in made] == ([(tuple(cold_files), 1, 4)] if used else [])


def load(folder: Path, kwargs: dict[str, Any]) -> dict[str, Any]:
    """What was read ahead in a load, whether it still was while reading, where that began, and what is left of it."""
    kept: list[bool] = []
    begins: list[float] = []
    real = reading.execute_reads

    def execute_reads(*args: Any, begin: float, **others: Any) -> Any:
        kept.append(Recorded.made[-1].is_kept)
        begins.append(begin)
        return real(*args, begin=begin, **others)

    opened.ReadAhead = Recorded  # type: ignore[misc]
    reading.execute_reads = execute_reads  # type: ignore[assignment]
    error = ""
    try:
        StreamingAutoModelForCausalLM.from_pretrained(folder, ds_config=ds_config(), **kwargs)
    except CheckpointError as caught:
        error = str(caught)
    return {
        "rank": dist.get_rank(),
        "asked": [(len(paths), share, shares) for paths, share, shares in (ahead.asked for ahead in Recorded.made)],
        "kept": kept,
        "begins": begins,
        "left": len(ahead_threads()),
        "error": error,
    }


@pytest.mark.parametrize("world_size", [1, 2])
def test_ranks_of_one_host_read_ahead_together(cluster: None, zoo_checkpoint: Checkpoint, world_size: int) -> None:
    folder = zoo_checkpoint("qwen3_moe")
    files = len(list(folder.glob("*.safetensors")))
    for result in run_ranks(world_size, load, folder, {}):
        assert result["asked"] == [(files, result["rank"], world_size)], "once, and each rank its own share"
        assert result["kept"] == [True]
        assert result["begins"] == [0.0]
        assert result["left"] == 0
        assert result["error"] == ""


def test_of_a_single_file_too(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """It has no index, with which reading ahead begins elsewhere."""
    transformers.AutoModelForCausalLM.from_pretrained(zoo_checkpoint("qwen3_moe")).save_pretrained(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) == 1
    assert [result["asked"] for result in run_ranks(2, load, tmp_path, {})] == [[(1, 0, 2)], [(1, 1, 2)]]


def test_not_for_a_part_of_the_files(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    """A model that takes only some of the tensors: the rest of the files is not brought in."""
    for result in run_ranks(2, load, zoo_checkpoint("qwen3_moe"), {"num_hidden_layers": 1}):
        assert len(result["asked"]) == 1
        assert result["kept"] == [False]
        assert result["begins"] == [result["rank"] / 2]
        assert result["left"] == 0


# --------------------------------------------------------------------------------- what stays, and in which pages


def shard(folder: Path, config: dict[str, Any]) -> int:
    """How often a rank drops pages of files that do not fit into memory."""
    dropped: list[int] = []
    advise, read = os.posix_fadvise, os.preadv
    os.posix_fadvise = lambda *args: dropped.append(1) or advise(*args)  # type: ignore[func-returns-value]
    os.preadv = lambda *args: dropped.extend(args[3:]) or read(*args)  # type: ignore[func-returns-value]
    opened.free_memory = lambda: 1
    distributed_config = transformers.distributed.DistributedConfig(**config)
    StreamingAutoModelForCausalLM.from_pretrained(folder, distributed_config=distributed_config)
    return len(dropped)


def test_what_two_ranks_of_a_host_read_stays_cached(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    """Replicas read the same bytes, not at the same time; what one rank alone reads is dropped."""
    folder = zoo_checkpoint("llama")
    assert all(run_ranks(2, shard, folder, {"fsdp_size": 2}))
    assert run_ranks(2, shard, folder, {"dp_replicate_size": 2}) == [0, 0]


def test_memory_that_huge_pages_were_slow_for_may_have_them_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a load has filled it: a training goes on in that memory."""
    values = torch.randn(execute.HUGE_PAGE_BYTES)
    save_file({"weight": values}, tmp_path / "model.safetensors")
    found = formats.read_map([str(tmp_path / "model.safetensors")])
    view = found.slices(lambda view: values)["weight"][...].view_of_node
    target = Target.whole("weight", values.dtype, values.numel())
    plan, _ = plan_batch([(target, view)], request_bytes=2**20, seek_bytes=0)
    memory = torch.empty_like(values)
    advice: list[int] = []
    monkeypatch.setattr(execute, "advise", lambda start, nbytes, how: advice.append(how) or True)
    monkeypatch.setattr(execute, "SMALL_PAGES_BYTES_PER_SECOND", 1e30)  # nothing is as fast as that
    monkeypatch.setattr(execute, "CREDIT_SECONDS", 1e-12)
    execute.execute_reads(plan, [memory], LocalFiles(found.shards), threads=2)
    assert torch.equal(memory, values)
    given = [how for how in advice if how != page_cache.MADV_POPULATE_WRITE]
    assert given == [page_cache.MADV_HUGEPAGE, page_cache.MADV_NOHUGEPAGE, page_cache.MADV_HUGEPAGE]


def test_ends_with_a_load_that_fails(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = shutil.copytree(zoo_checkpoint("qwen3_moe"), tmp_path / "bad")
    shard = sorted(folder.glob("*.safetensors"))[0]
    os.truncate(shard, shard.stat().st_size - 100)
    for result in run_ranks(2, load, folder, {}):
        assert "truncated" in result["error"]
        assert len(result["asked"]) == 1
        assert result["left"] == 0


# --------------------------------------------------------------------------------------------- a host's part at once


@pytest.mark.parametrize(("position", "brought"), [(0, 5000), (1, 0)])
def test_turns_of_a_host_s_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, position: int, brought: int) -> None:
    """A host may read less often than it has ranks."""
    path = tmp_path / "shard"
    path.write_bytes(bytes(8000))
    monkeypatch.setattr(host_part, "_reads_of_host", lambda *args: (Read(0, 3000, 8000, ()),))
    topology = SimpleNamespace(position=position, ranks_of_host=[0, 1, 2])
    coordinator = SimpleNamespace(topology=topology, check=lambda: None)
    shards = [SimpleNamespace(path=str(path))]
    checkpoint: Any = SimpleNamespace(coordinator=coordinator, shards=shards, threads=lambda: 2)
    nothing: Any = None
    assert host_part.bring_in(checkpoint, nothing, nothing) == brought
