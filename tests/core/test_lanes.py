"""Threads of a load, and the buffers that they share.

- Staging buffers are not reused before the copies out of them are done, also where copies run on by themselves.
- Threads that share out work end with the call, however it ends.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hf_zero_stream.checkpoint.formats import read_map
from hf_zero_stream.engine import execute
from hf_zero_stream.engine.execute import execute_reads, run_in_threads
from hf_zero_stream.engine.lanes import Lane
from hf_zero_stream.planning.plan import BatchPlan, Target, plan_batch
from hf_zero_stream.sources.local import LocalFiles


class LateLane(Lane):
    """As late as a stream may be: nothing is copied before somebody waits for it."""

    buffers = 2

    def __init__(self, nbytes: int) -> None:
        super().__init__([], nbytes)
        self.pending: list[Callable[[], None]] = []
        self.allocated = 0
        self.waits = 0
        self.done = 0

    def _allocate(self, nbytes: int) -> torch.Tensor:
        self.allocated += 1
        return torch.empty(nbytes, dtype=torch.uint8)

    def _submit(self, copy: Callable[[], None]) -> None:
        self.pending.append(copy)

    def _mark(self) -> int:
        return self.done + len(self.pending)

    def _wait(self, mark: int) -> None:
        self.waits += 1
        while self.done < mark:
            self.pending.pop(0)()
            self.done += 1


REQUEST_BYTES = 256


@pytest.fixture
def checkpoint(tmp_path: Path) -> tuple[BatchPlan, LocalFiles, list[torch.Tensor]]:
    """A plan with casts, a transposition and plain runs, and what it should give."""
    torch.manual_seed(0)
    tensors = {f"t{number}": torch.randn(12, 10) for number in range(9)}
    save_file(tensors, tmp_path / "model.safetensors")
    index = read_map([tmp_path / "model.safetensors"])
    lazy = {name: item[...] for name, item in index.slices(lambda view: torch.empty(0)).items()}
    views: list[tuple[Target, Any]] = []
    expected = []
    for number, (name, tensor) in enumerate(tensors.items()):
        dtype = torch.bfloat16 if number % 3 else torch.float32
        turned = number % 3 == 2
        views.append((Target(name, dtype, 120, 0, 120), (lazy[name].t() if turned else lazy[name]).view_of_node))
        expected.append((tensor.t() if turned else tensor).to(dtype).reshape(-1))
    plan, _ = plan_batch(views, request_bytes=REQUEST_BYTES, seek_bytes=64)
    return plan, LocalFiles(index.shards), expected


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[LateLane]:
    """The lanes of loads, which go as if to a device."""
    lanes: list[LateLane] = []

    def lane_for(destinations: Sequence[torch.Tensor], nbytes: int) -> Callable[[], LateLane]:
        return lambda: lanes.append(LateLane(nbytes)) or lanes[-1]  # type: ignore[func-returns-value]

    monkeypatch.setattr(execute, "lane_for", lane_for)
    monkeypatch.setattr(execute, "_buffers_in_place", lambda *args: None)
    return lanes


Checkpoint = tuple[BatchPlan, LocalFiles, list[torch.Tensor]]


@pytest.mark.parametrize("threads", [1, 3])
def test_late_copies_give_the_same_values(made: list[LateLane], checkpoint: Checkpoint, threads: int) -> None:
    plan, files, expected = checkpoint
    found = [torch.full((120,), float("nan"), dtype=target.dtype) for target in plan.targets]
    spent = execute_reads(plan, found, files, threads=threads)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))
    assert not any(lane.pending for lane in made)
    assert max(lane.allocated for lane in made) == 2
    assert spent.staging_bytes == REQUEST_BYTES * sum(lane.allocated for lane in made)
    if threads == 1:
        # A buffer is waited for only when it comes round again, and once at the end.
        assert made[0].waits == len(plan.reads) - 2 + 1


@pytest.mark.parametrize("slow", ["buffer", "read", "submit"])
def test_seconds_say_what_threads_did(
    made: list[LateLane], checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, slow: str
) -> None:
    """Each of the three is slowed down in turn, and shows in its own timer alone."""
    plan, files, _ = checkpoint
    owner, name = {
        "buffer": (LateLane, "buffer"),
        "read": (LocalFiles, "read_into"),
        "submit": (LateLane, "copy"),
    }[slow]
    real = getattr(owner, name)

    def slowed(*args: Any) -> Any:
        time.sleep(0.01)
        return real(*args)

    monkeypatch.setattr(owner, name, slowed)
    found = [torch.empty(120, dtype=target.dtype) for target in plan.targets]
    spent = execute_reads(plan, found, files, threads=1)
    assert list(spent.thread_seconds) == ["buffer", "read", "submit"]
    assert max(spent.thread_seconds, key=lambda timer: spent.thread_seconds[timer]) == slow
    assert spent.thread_seconds[slow] >= 0.01 * len(plan.reads)
    assert sum(spent.thread_seconds.values()) <= sum(spent.seconds.values()) + 0.01


def test_after_an_error_no_copy_is_under_way(made: list[LateLane], checkpoint: Checkpoint) -> None:
    """Or it would write into memory that somebody else has been given meanwhile."""
    plan, files, _ = checkpoint

    def full() -> None:
        raise RuntimeError("full")

    found = [torch.empty(120, dtype=target.dtype) for target in plan.targets]
    with pytest.raises(RuntimeError, match="full"):
        execute_reads(plan, found, files, threads=2, on_bytes=lambda nbytes: full())
    assert sum(lane.done for lane in made) > 0 and not any(lane.pending for lane in made)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("device", range(max(1, torch.cuda.device_count())))
def test_copies_to_a_gpu(checkpoint: tuple[BatchPlan, LocalFiles, list[torch.Tensor]], device: int) -> None:
    """Also from inside a stream of the caller's, which stays on the device that it is on."""
    plan, files, expected = checkpoint
    torch.cuda.set_device(device)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        found = [torch.full((120,), float("nan"), dtype=target.dtype, device="cuda") for target in plan.targets]
        execute_reads(plan, found, files, threads=3)
        assert all(torch.equal(mine.cpu(), theirs) for mine, theirs in zip(found, expected, strict=True))
    assert torch.cuda.current_device() == device


def test_lane_without_reads_has_no_buffer() -> None:
    lane = LateLane(64)
    lane.finish()
    assert lane.allocated_bytes == lane.allocated == lane.waits == 0


@pytest.fixture
def helpers() -> Callable[[], list[str]]:
    """Names the threads of ours that are new since the test began: others' presence, say, outlives their tests."""
    before = set(threading.enumerate())
    return lambda: [new.name for new in set(threading.enumerate()) - before if new.name.startswith("hf_zero_stream-")]


def test_each_item_comes_once(helpers: Callable[[], list[str]]) -> None:
    done: list[int] = []
    run_in_threads(range(1000), done.extend, 4)
    assert sorted(done) == list(range(1000))
    assert helpers() == []


def test_all_have_the_callers_context_variables() -> None:
    variable, found = ContextVar("variable", default=0), []
    all_here = threading.Barrier(3, timeout=30)

    def work(items: Iterator[int]) -> None:
        all_here.wait()
        found.append(variable.get())

    token = variable.set(7)
    run_in_threads([], work, 3)
    variable.reset(token)
    assert found == [7] * 3


@pytest.mark.parametrize("with_grad", [True, False])
def test_all_have_the_callers_grad_mode(with_grad: bool) -> None:
    """torch refuses to write to views made without gradients while they are on."""
    all_here, modes = threading.Barrier(3, timeout=30), []

    def work(items: Iterator[int]) -> None:
        all_here.wait()
        modes.append(torch.is_grad_enabled())

    with torch.set_grad_enabled(with_grad):
        run_in_threads([], work, 3)
    assert modes == [with_grad] * 3


def test_an_error_ends_the_others(helpers: Callable[[], list[str]]) -> None:
    def work(items: Iterator[int]) -> None:
        for number, _ in enumerate(items):
            if number == 3:
                raise ValueError("three")
            time.sleep(0.001)

    with pytest.raises(ValueError, match="three"):
        run_in_threads(iter(int, 1), work, 3)
    assert helpers() == []


def test_ctrl_c_while_the_others_work(helpers: Callable[[], list[str]]) -> None:
    """The calling thread has nothing left to do and waits for a helper, which goes on as long as it is let."""

    def work(items: Iterator[int]) -> None:
        if threading.current_thread() is threading.main_thread():
            return
        # A real signal: interrupt_main() would not wake a thread that waits already.
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        for _ in items:
            time.sleep(0.001)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore Ctrl-C
    try:
        with pytest.raises(KeyboardInterrupt):
            run_in_threads(iter(int, 1), work, 2)
    finally:
        signal.signal(signal.SIGINT, before)
    assert helpers() == []
