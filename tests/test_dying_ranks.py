"""A rank that is killed while loading is named by all others within seconds; one that is slow alarms nobody."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers

from tests.cluster import Outcome, free_port, run_ranks, run_ranks_expecting_errors
from tests.parity import ds_config


def kill_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_in_first_read() -> None:
    os.preadv = lambda *args: kill_this_process()


def kill_in_second_all_gather() -> None:
    from hf_zero_stream.partition import replicated

    real, calls = replicated.all_gather, []

    def gather(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return real(*args, **kwargs) if len(calls) < 2 else kill_this_process()

    replicated.all_gather = gather


def kill_in_a_request() -> None:
    from hf_zero_stream.engine import relay

    relay.RelayedFiles._ask = lambda *args: kill_this_process()


def look_as_on_other_hosts() -> None:
    """Ranks do not see each other's processes."""
    from hf_zero_stream import liveness

    liveness._host = lambda: ""


def load(folder: Path, zero: dict[str, Any] | None, **settings: Any) -> Any:
    import hf_zero_stream

    if zero is None:
        with hf_zero_stream.streaming(hf_zero_stream.StreamingConfig(**settings)):
            return transformers.AutoModelForCausalLM.from_pretrained(folder)
    config = {**ds_config(**zero), "hf_zero_stream": settings}
    return hf_zero_stream.StreamingAutoModelForCausalLM.from_pretrained(folder, ds_config=config)


def load_with_a_victim(
    folder: Path,
    victim: int,
    kill: Callable[[], None],
    prepare: Callable[[], None] | None,
    zero: dict[str, Any] | None,
    settings: dict[str, Any],
) -> dict[str, Any]:
    """What a survivor's load raised, and what it left behind."""
    before = transformers.PreTrainedModel.from_pretrained
    handles = len(os.listdir("/proc/self/fd"))
    if prepare is not None:
        prepare()
    if dist.get_rank() == victim:
        kill()
    try:
        load(folder, zero, **settings)
    except Exception as error:
        caught = (type(error).__name__, str(error))
    else:
        caught = ("nothing", "")
    gc.collect()  # errors and their tracebacks
    return {
        "caught": caught,
        "patched": transformers.PreTrainedModel.from_pretrained != before,
        "threads": [thread.name for thread in threading.enumerate() if "hf_zero_stream" in thread.name],
        "shards open": [path for path in open_files() if path.endswith(".safetensors")],
        "handles": len(os.listdir("/proc/self/fd")) - handles,
    }


def open_files() -> list[str]:
    found = []
    for handle in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{handle}"))
        except OSError:
            pass
    return found


def assert_survivors_name(victim: int, outcomes: list[Outcome]) -> None:
    assert outcomes[victim].error_type == "Died", outcomes[victim]
    for rank, outcome in enumerate(outcomes):
        if rank == victim:
            continue
        assert outcome.error_type is None, outcome.traceback
        kind, message = outcome.value["caught"]
        assert kind == "PeerError", outcome.value
        assert f"rank {victim} " in message
        assert not outcome.value["patched"]
        assert outcome.value["threads"] == [] and outcome.value["shards open"] == []
        assert outcome.value["handles"] <= 1
        assert outcome.seconds < 10


@pytest.mark.parametrize(
    ("world_size", "victim", "kill", "zero", "settings"),
    [
        (3, 0, kill_in_first_read, {}, {}),
        (4, 2, kill_in_first_read, {}, {}),
        (3, 1, kill_in_first_read, None, {}),
        (4, 1, kill_in_second_all_gather, None, {"staging_bytes": 2**16, "request_bytes": 2**12}),
        (3, 0, kill_in_first_read, {}, {"read_from": "rank0"}),
        (3, 2, kill_in_a_request, {}, {"read_from": "rank0"}),
    ],
    ids=["ZeRO-3, rank 0", "ZeRO-3", "shared", "shared, in a collective", "reader for others", "read for by another"],
)
def test_killed(
    cluster: None,
    zoo_checkpoint: Callable[..., Path],
    world_size: int,
    victim: int,
    kill: Callable[[], None],
    zero: dict[str, Any] | None,
    settings: dict[str, Any],
) -> None:
    folder = zoo_checkpoint("qwen3_moe")
    outcomes = run_ranks_expecting_errors(
        world_size, load_with_a_victim, folder, victim, kill, None, zero, settings, timeout=60
    )
    assert_survivors_name(victim, outcomes)


@pytest.mark.parametrize("victim", [0, 2])
def test_killed_on_another_host(cluster: None, zoo_checkpoint: Callable[..., Path], victim: int) -> None:
    """Only its heartbeat tells."""
    outcomes = run_ranks_expecting_errors(
        3,
        load_with_a_victim,
        zoo_checkpoint("qwen3_moe"),
        victim,
        kill_in_first_read,
        look_as_on_other_hosts,
        {},
        {"peer_timeout_s": 4},
        timeout=60,
    )
    assert_survivors_name(victim, outcomes)
    assert any("no sign of life for 4 s" in outcome.value["caught"][1] for outcome in outcomes if outcome.value)


# ------------------------------------------------------------------------------------------------------- slow ranks


def load_slowly(folder: Path, pause: Callable[[], None], zero: dict[str, Any] | None, timeout_s: int) -> float:
    """The slow rank pauses in its first read; returns the loaded model's first value."""
    look_as_on_other_hosts()
    if dist.get_rank() == 1:
        real, paused = os.preadv, []

        def slow(*args: Any) -> int:
            if not paused:
                paused.append(1)
                pause()
            return real(*args)

        os.preadv = slow
    return len(load(folder, zero, peer_timeout_s=timeout_s).streaming_report.ranks)


def sleep_long() -> None:
    time.sleep(6)


def hold_the_lock() -> None:
    """No other thread of this process runs meanwhile."""
    ctypes.PyDLL(None).usleep(3_000_000)


@pytest.mark.parametrize(("pause", "timeout_s"), [(sleep_long, 4), (hold_the_lock, 8)])
def test_a_slow_rank_alarms_nobody(
    cluster: None, zoo_checkpoint: Callable[..., Path], pause: Callable[[], None], timeout_s: int
) -> None:
    assert run_ranks(3, load_slowly, zoo_checkpoint("qwen3_moe"), pause, {}, timeout_s) == [3, 3, 3]


# ------------------------------------------------------------------------------------------------------- the watch


def watch_with_own_store(port: int) -> str:
    """Rank 0's process holds the store, and dies; the others are about to meet it."""
    from hf_zero_stream.errors import PeerError
    from hf_zero_stream.liveness import Watch

    rank, world_size = dist.get_rank(), dist.get_world_size()
    store = dist.TCPStore("127.0.0.1", port, world_size, rank == 0, timedelta(seconds=30))
    watch = Watch(store, rank, world_size)
    try:
        watch.meet()
        if rank == 0:
            kill_this_process()
        watch.meet()
    except PeerError as error:
        watch.close()
        return str(error)
    raise AssertionError("met a dead rank")


def test_the_store_dies_with_rank_0(cluster: None) -> None:
    _, *survivors = run_ranks_expecting_errors(3, watch_with_own_store, free_port(), timeout=60)
    for outcome in survivors:
        assert outcome.error_type is None, outcome.traceback
        assert "rank 0 has died" in outcome.value
        assert outcome.seconds < 10


def load_many_times(folder: Path) -> int:
    """How many keys the second and the third load add to the store."""
    from hf_zero_stream.liveness import default_store

    counts = []
    for _ in range(3):
        load(folder, {})
        dist.barrier()
        counts.append(default_store().num_keys())
        dist.barrier()
    return max(later - earlier for earlier, later in zip(counts, counts[1:], strict=False))


def test_loads_leave_nothing_in_the_store(cluster: None, zoo_checkpoint: Callable[..., Path]) -> None:
    assert max(run_ranks(2, load_many_times, zoo_checkpoint("llama"))) <= 0


def give_up(folder: Path) -> str:
    """Rank 1 leaves the load, as by a second Ctrl-C, without waiting for anybody."""
    from hf_zero_stream.coordination import Coordinator

    coordinator = Coordinator.of_default_group()
    try:
        with coordinator.watched():
            coordinator.agree()
            if coordinator.rank == 1:
                raise KeyboardInterrupt
            coordinator.agree()
    except (RuntimeError, KeyboardInterrupt) as error:
        caught = f"{type(error).__name__}: {error}"
    assert torch.equal(sum_over_ranks(), torch.tensor(float(coordinator.world_size))), "the group is in order"
    return caught


def sum_over_ranks() -> torch.Tensor:
    one = torch.tensor(1.0)
    dist.all_reduce(one)
    return one


def test_a_rank_that_leaves_says_so(cluster: None, tmp_path: Path) -> None:
    first, second, third = run_ranks(3, give_up, tmp_path)
    assert second.startswith("KeyboardInterrupt")
    for message in (first, third):
        assert message.startswith("PeerError: rank 1 has given up this load (KeyboardInterrupt")
