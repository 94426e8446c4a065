"""The kernel answers for a process that exists, whatever that does, and for no other."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import time

from hf_zero_stream.ranks.contact import Line, Listener


LISTEN = """
import ctypes, os, sys, time
from hf_zero_stream.ranks.contact import Listener
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
        process.wait()
        for line in (early, late, unheard):
            assert said(line, False)
            line.close()
        never = Line(address, int(port))
        assert not said(never, False, 0.5), "nobody may have answered there before"
        never.close()
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_connections_do_not_pile_up() -> None:
    listener = Listener("127.0.0.1")
    lines = [Line(listener.address, listener.port) for _ in range(20)]
    assert all(said(line, True) for line in lines)
    assert all(said(line, True) for line in lines) and len(listener._taken) == 20
    for line in lines[10:]:
        line.close()
    assert all(said(line, True) for line in lines[:10])
    late = Line(listener.address, listener.port)
    assert said(late, True) and len(listener._taken) == 11
    listener.close()
    assert all(said(line, False) for line in (*lines[:10], late)) and not listener._thread.is_alive()


def test_a_question_wakes_the_listener() -> None:
    listener, answered = Listener("127.0.0.1"), queue.Queue[bool]()
    listener.answer = answered.put
    line = Line(listener.address, listener.port)
    assert said(line, True) and answered.get(timeout=10) is True
    for _ in range(3):
        line.ask()
        assert answered.get(timeout=10) is False
    line.close()
    listener.close()
    assert answered.empty()
