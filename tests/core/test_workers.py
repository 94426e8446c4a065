"""Threads that share out work end with the call, however it ends."""

import signal
import threading
import time
from collections.abc import Iterator
from contextvars import ContextVar

import pytest
import torch

from hf_zero_stream.engine.execute import run_in_threads


def helpers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("hf_zero_stream-")]


def test_each_item_comes_once() -> None:
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


def test_an_error_ends_the_others() -> None:
    def work(items: Iterator[int]) -> None:
        for number, _ in enumerate(items):
            if number == 3:
                raise ValueError("three")
            time.sleep(0.001)

    with pytest.raises(ValueError, match="three"):
        run_in_threads(iter(int, 1), work, 3)
    assert helpers() == []


def test_ctrl_c_while_the_others_work() -> None:
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
