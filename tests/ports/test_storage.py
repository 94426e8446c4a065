"""Threads and request sizes follow the storage that a checkpoint lies on."""

from pathlib import Path

import pytest

from hf_zero_stream.engine import opened
from hf_zero_stream.engine.opened import OpenCheckpoint, choose_threads
from hf_zero_stream.ranks.coordinator import Coordinator
from hf_zero_stream.settings.config import StreamingConfig
from hf_zero_stream.sources.base import Hints
from hf_zero_stream.sources.local import LocalFiles, is_on_network, kind_of_file_system
from tests.support.memory_files import MemoryFiles


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
