"""A rank that is slow, for whatever reason, is waited for as long as its process is there."""

import ctypes
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.faults.test_dying_ranks import load, look_as_behind_firewalls, look_as_on_other_hosts
from tests.support.cluster import run_ranks
from tests.support.disk import replace_reads
from tests.support.zoo import Checkpoint


def load_slowly(folder: Path, slow: int, pause: Callable[[], None], prepare: Callable[[], None] | None) -> int:
    """The slow rank pauses in its first read; returns how many ranks took part."""
    if prepare is not None:
        prepare()
    if dist.get_rank() == slow:
        paused = []

        def pausing(real: Callable[..., int], *args: Any) -> int:
            if not paused:
                paused.append(1)
                pause()
            return real(*args)

        replace_reads(pausing)
    return len(load(folder, {}).streaming_report.ranks)


def hold_the_lock() -> None:
    """No other thread of this process runs meanwhile."""
    ctypes.PyDLL(None).usleep(5_000_000)


def stop_the_process() -> None:
    """As by SIGSTOP, for some seconds: somebody else wakes it up."""
    waker = subprocess.Popen(["sh", "-c", f"sleep 5; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)
    waker.wait()


@pytest.mark.parametrize(
    ("slow", "pause", "prepare"),
    [
        (1, hold_the_lock, look_as_behind_firewalls),
        (0, hold_the_lock, None),
        (1, hold_the_lock, None),
        (0, hold_the_lock, look_as_on_other_hosts),
        (2, hold_the_lock, look_as_on_other_hosts),
        (0, stop_the_process, look_as_on_other_hosts),
        (1, stop_the_process, None),
    ],
)
def test_a_slow_rank_alarms_nobody(
    cluster: None, zoo_checkpoint: Checkpoint, slow: int, pause: Callable[[], None], prepare: Callable[[], None] | None
) -> None:
    """Its process is there, or nobody can look for it."""
    assert run_ranks(3, load_slowly, zoo_checkpoint("qwen3_moe"), slow, pause, prepare) == [3, 3, 3]
