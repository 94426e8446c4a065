"""Positional reads, what they lie on, and what a reader counts.

- Positional reads: every way of reading gives the same bytes, and says where it failed.
- Threads and request sizes follow the storage that a checkpoint lies on.
- What a load's reader counts.
"""

import ctypes
import errno
import mmap
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hf_zero_stream import accelerators
from hf_zero_stream.engine import opened
from hf_zero_stream.engine.execute import run_in_threads
from hf_zero_stream.engine.opened import OpenCheckpoint, choose_threads
from hf_zero_stream.errors import CheckpointError, ReadError
from hf_zero_stream.ranks.coordinator import Coordinator
from hf_zero_stream.settings.config import StreamingConfig
from hf_zero_stream.sources import local as source
from hf_zero_stream.sources.base import Hints, SourceFile
from hf_zero_stream.sources.local import LocalFiles, is_on_network, kind_of_file_system
from hf_zero_stream.sources.page_cache import drop_from_cache, is_resident
from tests.support.disk import disk
from tests.support.memory_files import MemoryFiles


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


MIB = 2**20
MOUNTS = [("/", "ext4"), ("/data", "nfs4"), ("/data/local", "xfs"), ("/bucket", "fuse.gcsfuse"), ("/over", "overlay")]


@pytest.mark.parametrize(
    ("path", "kind", "network"),
    [
        ("/home/model", "ext4", False),
        ("/data", "nfs4", True),
        ("/data/model/shard", "nfs4", True),
        ("/database/model", "ext4", False),
        ("/data/local/model", "xfs", False),
        ("/bucket/model", "fuse.gcsfuse", True),
        ("/over/model", "overlay", False),
    ],
)
def test_kind_is_that_of_the_nearest_mount(path: str, kind: str, network: bool) -> None:
    assert kind_of_file_system(path, MOUNTS) == kind
    assert is_on_network(path, MOUNTS) is network


def test_later_mount_hides_an_earlier_one() -> None:
    assert kind_of_file_system("/data/model", [*MOUNTS, ("/data", "lustre")]) == "lustre"


def test_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").symlink_to(tmp_path / "blobs")
    mounts = [("/", "ext4"), (str(tmp_path / "blobs"), "lustre")]
    assert is_on_network(str(tmp_path / "snapshot" / "shard"), mounts)


def test_this_host_has_an_answer(tmp_path: Path) -> None:
    assert kind_of_file_system(str(tmp_path))
    assert kind_of_file_system("/proc/self") == "proc"


def hints_of(on_network: bool, monkeypatch: pytest.MonkeyPatch) -> Hints:
    """What a disk of this host, or a mount of another one, is said to be read best."""
    monkeypatch.setattr("hf_zero_stream.sources.local.is_on_network", lambda path: on_network)
    return LocalFiles().hints(["/anywhere/model.safetensors"])


def request_bytes_of(staging_bytes: int, hints: Hints) -> int:
    """What is asked for at once from a source with these hints."""
    settings = StreamingConfig(staging_bytes=staging_bytes)
    return OpenCheckpoint(settings, Coordinator(0, 1, alone=True), lambda: MemoryFiles({}, hints=hints)).request_bytes


@pytest.mark.parametrize(
    ("cores", "ranks", "on_network", "threads"),
    [(2, 2, False, 4), (64, 8, False, 8), (32, 8, False, 4), (64, 1, False, 8), (2, 1, True, 32), (64, 8, True, 8)],
)
def test_threads(monkeypatch: pytest.MonkeyPatch, cores: int, ranks: int, on_network: bool, threads: int) -> None:
    monkeypatch.setattr(opened.os, "sched_getaffinity", lambda pid: set(range(cores)))
    hints = hints_of(on_network, monkeypatch)
    request_bytes = request_bytes_of(64 * MIB, hints)
    assert request_bytes == 2 * MIB
    assert choose_threads(0, 64 * MIB // request_bytes, ranks, hints) == threads


def test_settings_win_and_the_staging_bound_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    local, remote = hints_of(False, monkeypatch), hints_of(True, monkeypatch)
    assert request_bytes_of(8 * MIB, local) == request_bytes_of(8 * MIB, remote) == MIB
    assert choose_threads(7, 8, 1, local) == 7
    assert choose_threads(7, 2, 1, local) == 2
    assert choose_threads(0, 1, 8, remote) == 1
    assert choose_threads(0, 0, 8, remote) == 1


def test_threads_run_near_their_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The helpers do, where this process may use cores of more than one NUMA node; the caller's thread is let be."""
    own = sorted(os.sched_getaffinity(0))
    found = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    monkeypatch.setattr(accelerators, "_PCI_DEVICES", str(tmp_path))
    device = torch.device("cuda", 0)
    assert accelerators.near_cores(device) == frozenset(), "nothing tells"
    (tmp_path / "0000:1b:00.0").mkdir()
    cores = tmp_path / "0000:1b:00.0" / "local_cpulist"
    cores.write_text(f"{own[0]},{own[-1] + 1}-{own[-1] + 4}\n")
    assert accelerators.near_cores(device) == (frozenset() if len(own) == 1 else {own[0]})
    cores.write_text(f"0-{own[-1]}\n")
    assert accelerators.near_cores(device) == frozenset(), "all of them are near"
    seen: dict[str, set[int]] = {}

    def work(items: Iterator[int]) -> None:
        for _ in items:
            seen[threading.current_thread().name] = os.sched_getaffinity(0)
            time.sleep(0.05)

    run_in_threads(range(4), work, 2, {own[0]})
    helper = seen.pop("hf_zero_stream-1")
    assert helper == {own[0]} and [*seen.values()] == [{*own}] and os.sched_getaffinity(0) == {*own}


def test_reads_of_all_checkpoints_count(tmp_path: Path) -> None:
    """Also those that planning made before another checkpoint was added."""
    checkpoint = OpenCheckpoint(StreamingConfig(), Coordinator(0, 1, alone=True))
    values = torch.arange(10.0)
    for number in (1, 2):
        file = str(tmp_path / f"{number}.safetensors")
        save_file({"weight": number * values}, file)
        found = checkpoint.map_from_headers([file], checkpoint.read_headers([file]))
        checkpoint.add(found.shards)
        slices = found.slices(checkpoint.materialise)
        read = slices["weight"][...].materialise()
        assert torch.equal(read, number * values)
        assert (checkpoint.source.bytes_read, checkpoint.source.reads) == (number * values.nbytes, number)
    checkpoint.close()


def cached_bytes(path: str) -> int:
    """How much of a file is in the page cache, to the page."""
    size = os.path.getsize(path)
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), size) as pages:
        address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        return sum(mmap.PAGESIZE * is_resident(address + at, 1) for at in range(0, size, mmap.PAGESIZE))


@pytest.mark.parametrize("takes_flag", [True, False], ids=["Linux drops it", "by advice"])
def test_what_does_not_fit_leaves_the_page_cache(tmp_path: Path, takes_flag: bool) -> None:
    """Advice alone leaves what goes beyond one read, so that one reads all here."""
    path, flags = tmp_path / "x.safetensors", list[int]()
    content = random.Random(0).randbytes(8 * MIB)
    path.write_bytes(content)
    drop_from_cache([path])

    def noted(real: Callable[..., int], handle: int, buffers: list[memoryview], position: int, *flag: int) -> int:
        flags.extend(flag)
        if flag and not takes_flag:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return real(handle, buffers, position, *flag)

    step = 2 * MIB if takes_flag else 8 * MIB
    with closing(LocalFiles([SourceFile(str(path), 8 * MIB)], cache_bytes=0)) as files, disk(noted):
        for start in range(0, 8 * MIB, step):
            buffer = bytearray(step)
            files.read_into(0, start, [memoryview(buffer)])
            assert buffer == content[start : start + step]
    assert cached_bytes(str(path)) <= MIB
    assert flags[0] == source.RWF_DONTCACHE and (takes_flag or len(flags) == 1), "a refusal is asked for once"


def test_what_fits_stays_in_the_page_cache(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(bytes(MIB))
    drop_from_cache([path])
    with closing(LocalFiles([SourceFile(str(path), MIB)], cache_bytes=2 * MIB)) as files:
        files.read_into(0, 0, [memoryview(bytearray(MIB))])
    assert cached_bytes(str(path)) == MIB
