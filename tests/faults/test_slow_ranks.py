"""A rank that is slow, for whatever reason, is waited for as long as its process is there."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.faults.test_dying_ranks import load, look_as_behind_firewalls, look_as_on_other_hosts
from tests.support.cluster import run_ranks, run_ranks_expecting_errors
from tests.support.disk import replace_reads


def load_slowly(
    folder: Path, slow: int, pause: Callable[[], None], prepare: Callable[[], None] | None, timeout_s: int
) -> int:
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
    return len(load(folder, {}, peer_timeout_s=timeout_s).streaming_report.ranks)


def sleep_long() -> None:
    time.sleep(6)


def hold_the_lock() -> None:
    """No other thread of this process runs meanwhile."""
    ctypes.PyDLL(None).usleep(5_000_000)


def hold_the_lock_for_long() -> None:
    ctypes.PyDLL(None).usleep(9_000_000)


def stop_the_process() -> None:
    """As by SIGSTOP, for some seconds: somebody else wakes it up."""
    waker = subprocess.Popen(["sh", "-c", f"sleep 5; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)
    waker.wait()


@pytest.mark.parametrize(
    ("slow", "pause", "prepare", "timeout_s"),
    [
        (1, sleep_long, look_as_behind_firewalls, 4),
        (0, hold_the_lock, None, 2),
        (1, hold_the_lock, None, 2),
        (0, hold_the_lock, look_as_on_other_hosts, 2),
        (2, hold_the_lock, look_as_on_other_hosts, 2),
        (1, stop_the_process, None, 2),
    ],
)
def test_a_slow_rank_alarms_nobody(
    cluster: None,
    zoo_checkpoint: Callable[..., Path],
    slow: int,
    pause: Callable[[], None],
    prepare: Callable[[], None] | None,
    timeout_s: int,
) -> None:
    """It is slow for longer than a heartbeat may stay away, but its process is there, or its heartbeat."""
    assert run_ranks(3, load_slowly, zoo_checkpoint("qwen3_moe"), slow, pause, prepare, timeout_s) == [3, 3, 3]


def test_a_frozen_rank_that_nobody_can_look_at(cluster: None, zoo_checkpoint: Callable[..., Path]) -> None:
    """Then its heartbeat decides."""
    outcomes = run_ranks_expecting_errors(
        2, load_slowly, zoo_checkpoint("qwen3_moe"), 1, hold_the_lock_for_long, look_as_behind_firewalls, 4, timeout=60
    )
    assert outcomes[0].error_type == "PeerError"
    assert "rank 1 gave no sign of life for 4 s" in str(outcomes[0].error_message)
