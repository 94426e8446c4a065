"""Run a function on real ranks: one process each, gloo between them; or on paper GPUs (`tests/paper_gpu`), with NCCL.

Ranks are forked from a server that has torch, transformers and deepspeed imported already, so that a rank costs
a fork and a rendezvous rather than ten seconds of imports.
"""

import faulthandler
import functools
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch.distributed as dist


ROOT = Path(__file__).resolve().parents[2]

# Read when the libraries are imported, so they must be set before the fork server starts.
ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True)
class Machine:
    """What ranks run on."""

    preload: str
    """The module that their fork server imports once."""
    environment: tuple[tuple[str, str], ...]
    backend: str
    sets_device: bool = False
    """Whether each rank makes its GPU the current one, before anything else."""


HOST = Machine("tests.support.cluster_preload", tuple(ENVIRONMENT.items()), "gloo")

_OF_PAPER = {**ENVIRONMENT, "DS_ACCELERATOR": "cuda", "PAPER_GPUS": "4", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
PAPER_GPUS = Machine("tests.paper_gpu.preload", tuple(_OF_PAPER.items()), "nccl")

# Once a rank has failed, how long the others may take to notice before they are killed.
GRACE_SECONDS = 10.0

SOON_S = 18.0
"""Within this time a rank that need not wait is back: much more than a slow machine takes, and less than any time-out
that it could have waited for (20 s for the store, 30 minutes for the process group)."""


@dataclass(frozen=True)
class Outcome:
    """What became of one rank. `error_type` is None if its function returned."""

    value: Any = None
    error_type: str | None = None
    error_message: str | None = None
    traceback: str | None = None
    seconds: float = 0.0
    """Time inside the function: neither start-up nor rendezvous."""


class RankFailure(AssertionError):
    """At least one rank raised or died; the message holds every failing rank's traceback."""

    def __init__(self, headline: str, outcomes: list[Outcome]) -> None:
        self.outcomes = outcomes
        parts = [headline]
        for rank, outcome in enumerate(outcomes):
            if outcome.error_type is not None:
                parts.append(f"--- rank {rank}: {outcome.error_type}: {outcome.error_message}\n{outcome.traceback}")
        super().__init__("\n".join(parts))


class RankTimeout(RankFailure):
    """Ranks were still running at the time limit; their stacks stand in for tracebacks."""


def run_ranks(
    world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 120, on: Machine = HOST
) -> list[Any]:
    """Run the importable function `fn(*args)` on every rank of a new process group.

    Returns the results in rank order. Raises `RankFailure` if any rank failed, `RankTimeout` if any hung.
    """
    outcomes = _run(world_size, fn, args, timeout, GRACE_SECONDS, on)
    failed = [rank for rank, outcome in enumerate(outcomes) if outcome.error_type is not None]
    if failed:
        raise RankFailure(f"{fn.__name__} failed on rank(s) {failed} of {world_size}", outcomes)
    return [outcome.value for outcome in outcomes]


def run_ranks_expecting_errors(
    world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 120, on: Machine = HOST
) -> list[Outcome]:
    """Like `run_ranks`, but errors are part of the result, and no rank is killed before the time limit."""
    return _run(world_size, fn, args, timeout, None, on)


def free_port() -> int:
    """A TCP port of this host that nobody listens to."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@functools.cache
def _server(preload: str) -> multiprocessing.forkserver.ForkServer:
    server = multiprocessing.forkserver.ForkServer()
    server.set_forkserver_preload([preload])
    return server


def _start(machine: Machine, main: Callable[..., None], *args: Any, name: str | None = None) -> Any:
    """Start a process of `machine`'s server; multiprocessing itself has one server only."""
    process = multiprocessing.get_context("forkserver").Process(target=main, args=args, name=name)
    multiprocessing.forkserver.connect_to_new_process = _server(machine.preload).connect_to_new_process
    process.start()
    return process


@contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def warm_up(machine: Machine = HOST) -> None:
    """Start the fork server and wait until it can fork. The first call compiles DeepSpeed's CPU extension."""
    _warm_up(machine.preload)


@functools.cache
def _warm_up(preload: str) -> None:
    machine = next(each for each in (HOST, PAPER_GPUS) if each.preload == preload)
    # Before Python 3.12 the server does not inherit sys.path, and it ignores a preload that it cannot import.
    search_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with _environment({**dict(machine.environment), "PYTHONPATH": search_path}):
        process = _start(machine, _check_preload, preload)
    process.join()
    if process.exitcode != 0:
        raise RuntimeError(f"the fork server could not import {preload} (exit code {process.exitcode})")
    process.close()
    # After every other finalizer of multiprocessing, because those may still talk to the resource tracker.
    multiprocessing.util.Finalize(None, _stop_server, args=[preload], exitpriority=-100)


def _stop_server(preload: str) -> None:
    """End and reap multiprocessing's servers, which would outlive this process (as zombies, if nobody adopts them)."""
    _server(preload)._stop()  # type: ignore[attr-defined]
    multiprocessing.resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]


def _check_preload(preload: str) -> None:
    sys.exit(0 if preload in sys.modules else 1)


def _run(
    world_size: int,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    timeout: float,
    grace: float | None,
    machine: Machine,
) -> list[Outcome]:
    warm_up(machine)
    # Plain pickle: multiprocessing's own would send tensors as handles that die with their rank.
    payload = pickle.dumps((fn, args))
    # The parent hosts the rendezvous store. Its port is taken from the start, so no other run can be given the same.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {
        **os.environ,
        **dict(machine.environment),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
    }
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        stacks = [Path(folder) / f"stack-{rank}" for rank in range(world_size)]
        ranks = [_Rank(rank, machine, environment, stacks[rank], timeout) for rank in range(world_size)]
        try:
            for rank in ranks:
                rank.start(payload)
            return _collect(ranks, fn.__name__, timeout, grace)
        finally:
            for rank in ranks:
                rank.end()


def _collect(ranks: list["_Rank"], name: str, timeout: float, grace: float | None) -> list[Outcome]:
    """Wait for every rank's outcome, up to the time limit, or `grace` seconds after the first error."""
    outcomes: dict[int, Outcome] = {}
    running = {rank.connection: rank for rank in ranks}
    deadline, graceful = time.monotonic() + timeout, False
    while running:
        ready = wait(list(running), timeout=max(0.0, deadline - time.monotonic()))
        for connection in ready:
            rank = running.pop(connection)  # type: ignore[arg-type]
            outcome = outcomes[rank.rank] = rank.receive()
            if outcome.error_type is not None and grace is not None and not graceful:
                deadline, graceful = min(deadline, time.monotonic() + grace), True
        if not ready and running:
            why = f"still running {grace:g} s after another rank failed" if graceful else f"no end after {timeout:g} s"
            for rank in running.values():
                rank.ask_for_stacks()
            time.sleep(0.5)
            for rank in running.values():
                outcomes[rank.rank] = Outcome(error_type="Hung", error_message=why, traceback=rank.stacks())
            ordered = [outcomes[rank.rank] for rank in ranks]
            hung = sorted(rank.rank for rank in running.values())
            raise (RankFailure if graceful else RankTimeout)(f"{name}: rank(s) {hung} {why}", ordered)
    return [outcomes[rank.rank] for rank in ranks]


class _Rank:
    """The parent's end of one rank's process."""

    def __init__(
        self, rank: int, machine: Machine, environment: dict[str, str], stack_file: Path, timeout: float
    ) -> None:
        self.rank = rank
        self.machine = machine
        self.environment = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        self.stack_file = stack_file
        self.timeout = timeout
        self.process: Any = None

    def start(self, payload: bytes) -> None:
        self.connection, theirs = multiprocessing.Pipe(duplex=False)
        settings = (theirs, payload, self.machine, self.environment, list(sys.path), self.stack_file, self.timeout)
        self.process = _start(self.machine, _rank_main, *settings, name=f"rank-{self.rank}")
        theirs.close()

    def receive(self) -> Outcome:
        try:
            return pickle.loads(self.connection.recv_bytes())
        except EOFError:
            self.process.join()
            message = f"the process ended with exit code {self.process.exitcode} and no result"
            return Outcome(error_type="Died", error_message=message, traceback=self.stacks())

    def ask_for_stacks(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGUSR1)

    def stacks(self) -> str:
        return self.stack_file.read_text() if self.stack_file.exists() else "(no stack was written)"

    def end(self) -> None:
        """Leave no process behind: one that does not go by itself within seconds of reporting is killed."""
        if self.process is None:
            return
        if sys.exc_info()[0] is None:
            self.process.join(5)
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.process.close()
        self.connection.close()


def _rank_main(
    connection: Connection,
    payload: bytes,
    machine: Machine,
    environment: dict[str, str],
    search_path: list[str],
    stack_file: Path,
    timeout: float,
) -> None:
    """The body of a rank."""
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = search_path
    # A rank whose parent was killed has nobody to end it.
    signal.alarm(int(timeout) + 60)
    with open(stack_file, "w") as stacks:
        faulthandler.enable(stacks)
        faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
        outcome = _outcome_of(payload, machine)
        try:
            message = pickle.dumps(outcome)
        except Exception as error:
            message = pickle.dumps(_failure(error, outcome.seconds))
        connection.send_bytes(message)
        connection.close()
        faulthandler.unregister(signal.SIGUSR1)
        faulthandler.disable()


def _outcome_of(payload: bytes, machine: Machine) -> Outcome:
    import deepspeed
    import torch

    start = time.perf_counter()
    try:
        fn, args = pickle.loads(payload)
        if machine.sets_device:
            torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        deepspeed.init_distributed(machine.backend)
        dist.barrier()  # a rank that ends at once must not close connections that another is still opening
        start = time.perf_counter()
        outcome = Outcome(value=fn(*args))
    except BaseException as error:
        outcome = _failure(error)
    outcome = replace(outcome, seconds=time.perf_counter() - start)
    try:
        if dist.is_initialized():
            dist.destroy_process_group()
    except Exception as error:
        if outcome.error_type is None:
            return _failure(error, outcome.seconds)
    return outcome


def _failure(error: BaseException, seconds: float = 0.0) -> Outcome:
    return Outcome(
        error_type=type(error).__name__,
        error_message=str(error),
        traceback="".join(traceback.format_exception(error)),
        seconds=seconds,
    )
