"""A compiler that was killed leaves a lock, for which torch waits without end: it is found, and told."""

import os
import threading
from pathlib import Path

import pytest
from deepspeed.ops.op_builder.builder import OpBuilder
from torch.utils.file_baton import FileBaton

from hf_zero_stream.extensions import stale_lock_advice, stale_locks
from tests.support.extensions import load_extension


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "cpu_adam").mkdir()
    return tmp_path / "cpu_adam" / "lock"


def test_a_lock_that_nobody_holds(lock: Path) -> None:
    lock.touch()
    assert list(stale_locks()) == [lock]
    assert f"{lock}: most likely one that compiled cpu_adam" in stale_lock_advice(lock)
    lock.unlink()
    assert list(stale_locks()) == []


def test_a_lock_of_a_compiler_that_runs(lock: Path) -> None:
    baton = FileBaton(str(lock))
    assert baton.try_acquire() and list(stale_locks()) == []
    os.close(baton.fd)  # type: ignore[arg-type]


def test_a_lock_that_is_being_released(lock: Path) -> None:
    """torch closes the file before it removes it, and for that moment nobody holds it."""
    lock.touch()
    remove = threading.Timer(0.05, lock.unlink)
    remove.start()
    assert list(stale_locks()) == []
    remove.join()


def test_whoever_compiles_keeps_its_lock(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of tests that begins removes what a killed compiler left, and not the lock of another run's rank."""
    monkeypatch.setattr(OpBuilder, "load", lambda builder, verbose: builder.name)
    left = lock.parents[1] / "async_io" / "lock"
    left.parent.mkdir()
    left.touch()
    baton = FileBaton(str(lock))
    assert baton.try_acquire()
    assert load_extension("ShareMemCommBuilder") == "deepspeed_shm_comm"
    assert not left.exists()
    baton.release()  # fails if the lock is gone
