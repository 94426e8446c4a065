"""A rank that is killed, in a load or a save or on its way there, is named by all others within seconds."""

import random
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers

import hf_zero_stream
from hf_zero_stream.errors import PeerError
from hf_zero_stream.ranks.coordinator import Coordinator
from hf_zero_stream.ranks.presence import Presence
from hf_zero_stream.ranks.watchdog import Watchdog
from tests.support.cluster import SOON_S, free_port, run_ranks, run_ranks_expecting_errors
from tests.support.deaths import (
    assert_survivors_name,
    kill_in_a_request,
    kill_in_first_read,
    kill_in_second_all_gather,
    kill_this_process,
    load,
    load_with_a_victim,
    look_as_on_other_hosts,
    look_as_without_power,
    make_contact,
)
from tests.support.messages import error_of
from tests.support.zoo import Checkpoint


@pytest.mark.parametrize(
    ("world_size", "victim", "kill", "zero", "settings"),
    [
        (3, 0, kill_in_first_read, {}, {}),
        (4, 2, kill_in_first_read, {}, {}),
        (3, 1, kill_in_first_read, None, {}),
        (4, 1, kill_in_second_all_gather, None, {"staging_bytes": 2**15}),
        pytest.param(3, 0, kill_in_first_read, {}, {"read_from": "rank0"}, marks=pytest.mark.plugin("relay")),
        pytest.param(3, 2, kill_in_a_request, {}, {"read_from": "rank0"}, marks=pytest.mark.plugin("relay")),
    ],
    ids=["ZeRO-3, rank 0", "ZeRO-3", "shared", "shared, in a collective", "reader for others", "read for by another"],
)
def test_killed(
    cluster: None,
    zoo_checkpoint: Checkpoint,
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
@pytest.mark.parametrize(
    ("prepare", "how"),
    [(look_as_on_other_hosts, "has died (process "), (look_as_without_power, "has not answered for 30 s (process ")],
)
def test_killed_on_another_host(
    cluster: None, zoo_checkpoint: Checkpoint, victim: int, prepare: Callable[[], None], how: str
) -> None:
    """The kernel of its host tells, or says nothing any more."""
    outcomes = run_ranks_expecting_errors(
        3, load_with_a_victim, zoo_checkpoint("qwen3_moe"), victim, kill_in_first_read, prepare, {}, {}, timeout=60
    )
    assert_survivors_name(victim, outcomes)
    assert any(how in outcome.value["caught"][1] for outcome in outcomes if outcome.value)


# ------------------------------------------------------------------------------------------- killed before a meeting


def enter_without_a_victim(
    folder: Path, victim: int, what: str, prepare: Callable[[], None] | None, own: Path
) -> dict[str, Any]:
    """The victim is killed while it is on its way to what the others have come to already, or are about to."""
    if prepare is not None:
        prepare()
    model = load(folder, None if what == "shared" else {})
    dist.barrier()
    if dist.get_rank() == victim:
        time.sleep(random.Random(own.name).uniform(0.0, 0.15))
        kill_this_process()
    began = time.monotonic()
    try:
        if what == "save":
            hf_zero_stream.save_pretrained(model, own)
        else:
            load(folder, None if what == "shared" else {})
    except RuntimeError as error:
        return {"caught": (type(error).__name__, str(error)), "seconds": time.monotonic() - began}
    raise AssertionError("did without a rank that is dead")


@pytest.mark.parametrize(
    ("what", "victim", "prepare"),
    [
        ("load", 0, None),
        ("load", 2, None),
        ("shared", 1, None),
        ("save", 0, None),
        ("save", 1, None),
        ("save", 0, look_as_on_other_hosts),
        ("load", 1, look_as_on_other_hosts),
    ],
)
def test_killed_before_it_enters(
    cluster: None,
    zoo_checkpoint: Checkpoint,
    tmp_path: Path,
    what: str,
    victim: int,
    prepare: Callable[[], None] | None,
) -> None:
    outcomes = run_ranks_expecting_errors(
        3, enter_without_a_victim, zoo_checkpoint("llama"), victim, what, prepare, tmp_path, timeout=60
    )
    for rank, outcome in enumerate(outcomes):
        if rank != victim:
            assert outcome.error_type is None, outcome.traceback
            assert outcome.value["caught"][0] == "PeerError"
            assert f"rank {victim} has died (process " in outcome.value["caught"][1], outcome.value
            assert outcome.value["seconds"] < SOON_S


def load_before_rank_0(folder: Path) -> Any:
    """Rank 0, which looks at all others, comes late; rank 2 waits there, and rank 1 is dead."""
    make_contact()
    if dist.get_rank() == 1:
        kill_this_process()
    if dist.get_rank() == 0:
        time.sleep(8)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"rank 1 has died \(process "):
        load(folder, {})
    return time.monotonic() - began


def test_killed_while_rank_0_is_elsewhere(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    first, _, third = run_ranks_expecting_errors(3, load_before_rank_0, zoo_checkpoint("llama"), timeout=60)
    assert first.error_type is None and third.error_type is None, (first, third)
    assert third.value < 7, "long before rank 0 comes"


def go_on_alone(folder: Path) -> str:
    """Rank 1 ends, with nothing amiss; rank 0 makes a load that all must make, and one that needs nobody."""
    make_contact()
    if dist.get_rank() == 1:
        return ""
    message = error_of(lambda: load(folder, None))[1]
    with hf_zero_stream.streaming():
        assert not transformers.AutoModelForCausalLM.from_pretrained(folder).streaming_report.streamed
    return message


def test_a_rank_that_has_ended(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    message, _ = run_ranks(2, go_on_alone, zoo_checkpoint("llama"))
    assert message.startswith("Rank 1 has ended (process ") and "so it does not come here" in message


# ------------------------------------------------------------------------------------------------------- the watch


def watch_with_own_store(port: int) -> str:
    """Rank 0's process holds the store, and dies; the others are about to meet it."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    store = dist.TCPStore("127.0.0.1", port, world_size, rank == 0, timedelta(seconds=30))
    watch = Watchdog(Presence(store, rank, world_size, holds_store=True), "a/meeting/0")
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
        assert outcome.seconds < SOON_S


def load_many_times(folder: Path) -> int:
    """How many keys the second and the third load add to the store."""
    from torch.distributed.distributed_c10d import _get_default_store as default_store

    counts = []
    for _ in range(3):
        load(folder, {})
        dist.barrier()
        counts.append(default_store().num_keys())
        dist.barrier()
    return max(later - earlier for earlier, later in zip(counts, counts[1:], strict=False))


def test_loads_leave_nothing_in_the_store(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    assert max(run_ranks(2, load_many_times, zoo_checkpoint("llama"))) <= 0


def give_up(folder: Path) -> str:
    """Rank 1 leaves the load, as by a second Ctrl-C, without waiting for anybody."""
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


_GLOO = "[/src/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:5339."
_ENFORCE = "[enforce fail at /src/third_party/gloo/gloo/transport/tcp/pair.cc:446] op.nbytes. 8 vs 4"
_NCCL = "NCCL error: remote process exited\nncclRemoteError: A call failed possibly due to a network error"
_NO_MEMORY = "NCCL error: unhandled cuda error\nncclUnhandledCudaError: Call to CUDA function failed. out of memory"


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (RuntimeError(_GLOO), True),
        (dist.DistBackendError(_NCCL), True),
        (dist.DistNetworkError("Failed to recv, got 0 bytes. Connection was likely closed."), True),
        (RuntimeError("user's conversion op: Connection matrix has the wrong shape"), False),
        (RuntimeError("model: gloo and NCCL are not layers"), False),
        (RuntimeError(_ENFORCE), False),
        (dist.DistBackendError(_NO_MEMORY), False),
    ],
    ids=str,
)
def test_which_errors_are_of_connections(error: RuntimeError, is_lost: bool) -> None:
    """By what backends raise when a rank is gone; every other error passes as it is."""
    with pytest.raises(RuntimeError) as caught, Coordinator(0, 2, alone=False).naming_dead_rank():
        raise error
    if is_lost:
        assert isinstance(caught.value, PeerError) and caught.value.__cause__ is error
    else:
        assert caught.value is error


class InterruptedWatchdog:
    """Stands for a :class:`Watchdog` whose rank gets a Ctrl-C while it waits for the others."""

    verdict = None

    def __init__(self) -> None:
        self.announced: list[tuple[str, bool]] = []

    def meet(self) -> None:
        raise KeyboardInterrupt

    def announce(self, error: BaseException, *, comes: bool) -> None:
        self.announced.append((type(error).__name__, comes))


def test_a_rank_interrupted_inside_an_agreement_gives_up() -> None:
    """It must not come to another agreement: the others count arrivals, and would wait for it in a collective."""
    coordinator, watch = Coordinator(0, 2, alone=False), InterruptedWatchdog()
    coordinator._watchdog = watch  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt), coordinator.reporting():
        coordinator.agree()
    assert watch.announced == [("KeyboardInterrupt", False)]
