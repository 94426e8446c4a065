"""How ranks know that another one lives.

- From its first contact on a rank is known, and its death told; one without contact is not taken for a slow one.
- The kernel answers for a process that exists, whatever that does, and for no other.
"""

import errno
import logging
import os
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed.distributed_c10d import _get_default_store

import hf_zero_stream
from hf_zero_stream.loading import integration
from hf_zero_stream.plugins.watch.lines import ENDED, Line, Listener
from hf_zero_stream.ranks import rendezvous
from hf_zero_stream.ranks.presence import Presence
from tests.support.cluster import SOON_S, free_port, run_ranks, run_ranks_expecting_errors
from tests.support.commands import command_environment
from tests.support.deaths import kill_this_process, load, look_as_on_other_hosts
from tests.support.messages import message_of, warnings_of
from tests.support.zoo import Checkpoint


def forget_launcher() -> None:
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]


def caught_in(folder: Path, zero: dict[str, Any] | None) -> tuple[str, float]:
    began = time.monotonic()
    return message_of(lambda: load(folder, zero)), time.monotonic() - began


def slow_imports() -> None:
    """What `streaming()` needs for a load takes long to import, as from a network disk."""

    def sleep(*args: Any, **kwargs: Any) -> None:
        time.sleep(60)

    integration.from_pretrained = integration.auto_model = sleep  # type: ignore[assignment]


def load_or_die(folder: Path, victim: int, after_s: float, calls: bool, zero: dict[str, Any] | None) -> Any:
    """The victim is killed so long after it has entered ``streaming()``, where it calls ``from_pretrained`` or not."""
    forget_launcher()
    if dist.get_rank() == victim:
        slow_imports()
        with hf_zero_stream.streaming():
            threading.Timer(after_s, kill_this_process).start()
            if calls:
                load(folder, zero)
            time.sleep(60)
    return caught_in(folder, zero)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("victim", "after_s", "calls", "zero"),
    [(1, 0.1, True, {}), (2, 0.5, True, None), (0, 1.0, True, {}), (1, 1.5, True, None), (1, 0.1, False, {})],
)
def test_a_rank_that_dies_after_its_first_contact(
    cluster: None, zoo_checkpoint: Checkpoint, victim: int, after_s: float, calls: bool, zero: dict[str, Any] | None
) -> None:
    """However early, and without a launcher that says how many ranks a host has."""
    outcomes = run_ranks_expecting_errors(
        3, load_or_die, zoo_checkpoint("llama"), victim, after_s, calls, zero, timeout=60
    )
    for rank, outcome in enumerate(outcomes):
        if rank != victim:
            assert outcome.error_type is None, outcome.traceback
            message, seconds = outcome.value
            assert message.startswith(f"PeerError: rank {victim} has died (process "), message
            assert seconds < after_s + 10


def die_unseen(folder: Path) -> Any:
    """Rank 2, on a host of its own, is gone before any other rank looks for it in a load."""
    look_as_on_other_hosts()
    from hf_zero_stream.ranks.presence import make_contact

    if dist.get_rank() == 1:
        dist.barrier()  # comes last
    make_contact()
    if dist.get_rank() != 1:
        dist.barrier()
    if dist.get_rank() == 2:
        time.sleep(1)
        kill_this_process()
    time.sleep(2)
    return caught_in(folder, {})


def test_a_rank_on_another_host_that_dies_before_any_load(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    first, second, _ = run_ranks_expecting_errors(3, die_unseen, zoo_checkpoint("llama"), timeout=60)
    for outcome in (first, second):
        assert outcome.error_type is None, outcome.traceback
        assert outcome.value[0].startswith("PeerError: rank 2 has died (process "), outcome


def make_groups_in_the_block(folder: Path) -> Any:
    """The process group is made later than the block is entered, twice, by a function that was imported before."""
    look_as_on_other_hosts()
    rank, store, found = dist.get_rank(), _get_default_store(), []
    with hf_zero_stream.streaming():
        for number in range(2):
            destroy_process_group()
            init_process_group("gloo", store=dist.PrefixStore(str(number), store), rank=rank, world_size=3)
            if number == 1 and rank == 1:
                kill_this_process()
            found.append(caught_in(folder, {}))
    return found


def test_contact_is_made_when_the_group_is(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    first, _, third = run_ranks_expecting_errors(3, make_groups_in_the_block, zoo_checkpoint("llama"), timeout=90)
    for outcome in (first, third):
        assert outcome.error_type is None, outcome.traceback
        (loaded, _), (message, seconds) = outcome.value
        assert loaded == "nothing" and message.startswith("PeerError: rank 1 has died (process "), outcome
        assert seconds < SOON_S


def make_contact_anew(port: int) -> list[bool | None]:
    """What rank 0 sees of rank 1, which is in a second process group with the store of the first, a little later."""
    look_as_on_other_hosts()
    rank = dist.get_rank()
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, timedelta(seconds=30))
    earlier = Presence(store, rank, 2, holds_store=False)
    dist.barrier()
    if rank == 1:
        dist.barrier()
        time.sleep(0.5)
    later, seen = Presence(store, rank, 2, holds_store=False), []
    if rank == 0:
        dist.barrier()
        for _ in range(200):
            seen.append(later.watch._is_alive(1))  # type: ignore[union-attr]
            time.sleep(0.01)
    earlier.close()
    dist.barrier()
    later.close()
    return seen


def test_a_rank_that_makes_contact_anew_is_not_dead(cluster: None) -> None:
    seen, _ = run_ranks(2, make_contact_anew, free_port(), timeout=60)
    assert False not in seen and seen[-1] is True, seen


SCRIPT = """\
import os, signal, sys, threading, time
from torch.distributed import init_process_group
init_process_group("gloo")
assert "transformers" not in sys.modules
if os.environ["RANK"] == "1":
    threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    time.sleep(60)
from transformers import AutoModel
try:
    AutoModel.from_pretrained(sys.argv[1])
except RuntimeError as error:
    print(f"{type(error).__name__}: {error}")
"""


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_run_makes_contact_when_the_group_is_there(
    zoo_checkpoint: Checkpoint, tmp_path: Path, world_size: int
) -> None:
    """Without a launcher; the victim has imported neither transformers nor what streams."""
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "hf_zero_stream.run", "train.py", str(zoo_checkpoint("bert"))]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world_size)}
    ranks = [
        subprocess.Popen(
            command,
            cwd=tmp_path,
            env={**command_environment(), **address, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        printed = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert printed[1] == ""
    for text in (printed[0], *printed[2:]):
        assert text.startswith("PeerError: rank 1 has died (process "), printed


def wait_for_a_stranger(folder: Path, zero: dict[str, Any] | None) -> Any:
    """Rank 1 lives, and has not entered ``streaming()``."""
    rendezvous.STRANGER_S, rendezvous.STRANGERS_END_S = 1.0, 4.0
    object.__setattr__(rendezvous.LOAD, "reminder_s", 1.5)
    if dist.get_rank() == 1:
        dist.barrier()
        return None
    logging.getLogger("hf_zero_stream").setLevel(logging.WARNING)
    with warnings_of("hf_zero_stream.ranks.rendezvous") as said:
        found = caught_in(folder, zero)
    dist.barrier()
    return *found, "".join(said)


MEANS = "Rank 1 has not entered streaming(): started in another way than this one, perhaps without hf_zero_stream.run?"


@pytest.mark.parametrize("zero", [{}, None], ids=["ZeRO-3", "shared"])
def test_a_rank_without_contact_ends_a_load(
    cluster: None, zoo_checkpoint: Checkpoint, zero: dict[str, Any] | None
) -> None:
    first, _, third = run_ranks(3, wait_for_a_stranger, zoo_checkpoint("llama"), zero, timeout=60)
    for error, seconds, *_ in (first, third):
        assert error.startswith("PeerError: Only 2 of 3 ranks came to load within 4 seconds; rank 1 did not. " + MEANS)
        assert seconds < SOON_S
    assert f"s for rank 1 to load. {MEANS}" in first[2] + third[2]
    assert not first[2] or not third[2], "one rank says it for all"


LISTEN = """
import ctypes, os, sys, time
from hf_zero_stream.plugins.watch.lines import Listener
listener = Listener("127.0.0.1")
if os.fork() == 0:
    time.sleep(60)  # a child, as a worker that loads data, which outlives its parent for a while
print(listener.address, listener.port, flush=True)
ctypes.PyDLL(None).sleep(60)
"""


def said(line: Line, wanted: bool | None, seconds: float = 20.0) -> bool:
    """Whether `line` comes to say what is `wanted`, and never says the contrary."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        says = line.is_alive()
        if says is wanted:
            return True
        assert says is None or wanted is False
        time.sleep(0.02)
    return False


def test_a_process_that_can_do_nothing() -> None:
    """It holds Python's lock, is stopped, and is killed."""
    command = [sys.executable, "-c", LISTEN]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        address, port = process.stdout.readline().split()
        early, late = Line(address, int(port)), Line(address, int(port))
        assert said(early, True)
        process.send_signal(signal.SIGSTOP)
        assert said(late, True) and said(early, True)
        unheard = Line(address, int(port))
        unheard.is_alive()  # dials, and hears nothing more before the process dies
        process.kill()
        for line in (early, late, unheard):
            assert said(line, False), "also before anybody has reaped it"
            assert line.end == "has died"
            line.close()
        never = Line(address, int(port))
        assert not said(never, False, 0.5), "a firewall may be in between"
        assert said(Line(address, int(port), is_local=True), False)
        never.close()
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_a_process_that_ends_by_itself_says_so() -> None:
    listener = Listener("127.0.0.1")
    reset, *lines = [Line(listener.address, listener.port) for _ in range(40)]
    assert all(said(line, True) for line in (reset, *lines))
    reset._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    reset.close()
    for line in lines[20:]:
        line.close()
    assert all(said(line, True) and line.end != ENDED for line in lines), "and there is room for more"
    listener.close()
    assert all(said(line, False) and line.end == ENDED for line in lines)
    assert not listener._thread.is_alive()


def test_a_host_that_no_longer_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = Listener("127.0.0.1")
    line = Line(listener.address, listener.port)
    assert said(line, True)

    def recv(*args: object) -> bytes:
        raise OSError(errno.EHOSTUNREACH, "No route to host")

    monkeypatch.setattr(line, "_socket", SimpleNamespace(connect_ex=lambda _: errno.EISCONN, recv=recv, close=int))
    assert line.is_alive() is False and line.end == "has not answered for 30 s"
    listener.close()


def test_a_question_wakes_the_listener() -> None:
    listener, other, answered = Listener("127.0.0.1"), Listener("127.0.0.1"), queue.Queue[bool]()
    listener.answer = lambda: answered.put(True)
    for _ in range(3):
        other.ask(listener.address, listener.question_port)
        assert answered.get(timeout=10)
    other.close()
    listener.close()
    assert answered.empty()


def test_a_host_whose_name_and_routes_lead_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in /etc/hosts of Debian, without a network: then this host alone can connect."""
    own = socket.getaddrinfo("127.0.0.1", 9, type=socket.SOCK_DGRAM)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: own)
    listener = Listener("its-name")
    assert listener.address == "127.0.0.1"
    listener.close()
