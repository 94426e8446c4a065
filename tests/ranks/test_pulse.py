"""The kernel answers for a process that exists, whatever that does, and for no other."""

import errno
import os
import queue
import signal
import socket
import struct
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from hf_zero_stream.ranks.transport import ENDED, Line, Listener


LISTEN = """
import ctypes, os, sys, time
from hf_zero_stream.ranks.transport import Listener
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
