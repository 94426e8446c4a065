"""Sockets by which ranks know that each other's processes exist, on whatever host they run, and ask each other.

The kernel accepts connections while a process exists: also while it is stopped, or something in it such as a slow
``dlopen`` holds Python's lock. When the process ends, the kernel resets its connections, and refuses new ones.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress


ENDED = "has ended"

SILENCE_S = 30
"""After this time a host that does not answer counts as gone: without power it resets nothing."""

_SILENCE = (
    (socket.TCP_KEEPIDLE, 5),
    (socket.TCP_KEEPINTVL, 5),
    (socket.TCP_USER_TIMEOUT, 1000 * SILENCE_S),
    (socket.TCP_SYNCNT, 4),
)


class Listener:
    """This process's ports, on the interface that leads `towards` a host. Forked children close their copies.

    Connections to the TCP port are left to the kernel: nobody accepts them. A datagram to the UDP port is a question:
    a thread, which sleeps, calls :attr:`answer`.
    """

    def __init__(self, towards: str) -> None:
        self.answer: Callable[[], None] = lambda: None
        self._is_closed = False
        try:
            family, own = _interface(towards)
        except OSError:  # a name that nobody knows: the ranks of this host, at least, can connect
            family, own = _interface("127.0.0.1")
        self._server = socket.create_server((own, 0), family=family, backlog=4096)
        self._server.setblocking(False)
        self._questions = socket.socket(family, socket.SOCK_DGRAM)
        self._questions.bind((own, 0))
        self.address, self.port = self._server.getsockname()[:2]
        self.question_port = self._questions.getsockname()[1]
        _listeners.add(self)
        self._thread = threading.Thread(target=self._run, name="hf_zero_stream-listener", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_closed:
            with suppress(OSError):  # when the socket is closed
                self._questions.recv(1)
                while True:  # one answer is enough for all that have asked meanwhile
                    self._questions.recv(1, socket.MSG_DONTWAIT)
            if not self._is_closed:
                self.answer()

    def ask(self, address: str, question_port: int) -> None:
        """Ask the process whose listener has this port."""
        with suppress(OSError):
            self._questions.sendto(b"?", (address, question_port))

    def close(self) -> None:
        """End the thread, and tell all connected ranks that this process ends by itself."""
        self._is_closed = True
        self.ask(self.address, self.question_port)
        self._thread.join(1)
        with suppress(OSError):
            while True:
                with self._server.accept()[0] as connection, suppress(OSError):  # some may be gone
                    connection.send(b".")
        self.forget()

    def forget(self) -> None:
        """Close this process's sockets, and leave those of a parent process as they are."""
        self._server.close()
        self._questions.close()


def _forget_all() -> None:
    for listener in list(_listeners):
        listener.forget()


_listeners: weakref.WeakSet[Listener] = weakref.WeakSet()
os.register_at_fork(after_in_child=_forget_all)


def _interface(towards: str) -> tuple[int, str]:
    family, kind, _, _, address = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing, but chooses an interface
        own = probe.getsockname()[0]
    is_name = not towards.startswith(("localhost", own, _ELSEWHERE))
    # A host's own name, which /etc/hosts may map to 127.0.1.1, where other hosts would find themselves.
    if is_name and ipaddress.ip_address(own).is_loopback:
        with suppress(OSError):  # a host that leads nowhere
            return _interface(_ELSEWHERE)
    return family, own


_ELSEWHERE = "192.0.2.1"
"""Nobody's address (TEST-NET-1, RFC 5737), towards which the default route leads."""


class Line:
    """A connection to the listener of another rank's process, at `address` and `port`.

    Attributes:
        end: how the process ended, if it has; completes "rank 3 ...".
    """

    def __init__(self, address: str, port: int, *, is_local: bool = False) -> None:
        self._address = (address, port)
        self._socket: socket.socket | None = None
        self._is_reachable = is_local
        """Whether no firewall is in between: then a refusal means that the process is gone."""
        self.end = "has died"

    def is_alive(self) -> bool | None:
        """Whether the process exists, without waiting; None if that is not known (yet)."""
        if self._socket is None:
            self._dial()
            return None
        error = self._socket.connect_ex(self._address)  # of a socket that connects already, how far it has come
        if error in (errno.EINPROGRESS, errno.EALREADY):
            return None
        if error in (0, errno.EISCONN):
            error = self._error()
            if not error:
                self._is_reachable = True
                return True
            if error == errno.ETIMEDOUT:
                self.close()
                self.end = f"has not answered for {SILENCE_S} s"
                return False
        self._is_reachable |= error in (errno.ECONNRESET, errno.EPIPE)
        self.close()
        if error == errno.ECONNREFUSED and self._is_reachable:
            return False
        # A connection may end for other reasons: what counts is whether there is a new one. One that is never made
        # proves nothing: the kernel of a process that lives does not answer, either, while too many wait there.
        self._dial()
        return None

    def _error(self) -> int:
        """The error by which the open connection has ended; 0 if it has not."""
        assert self._socket is not None
        try:
            if self._socket.recv(1):
                self.end = ENDED
                return 0
            return errno.ECONNRESET
        except BlockingIOError:
            return 0
        except ConnectionError:
            return errno.ECONNRESET
        except OSError:  # by which its last packet was not delivered, of whatever kind
            return errno.ETIMEDOUT

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None

    def _dial(self) -> None:
        with suppress(OSError):
            family = socket.AF_INET6 if ":" in self._address[0] else socket.AF_INET
            self._socket = socket.socket(family, socket.SOCK_STREAM)
            self._socket.setblocking(False)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _SILENCE:
                self._socket.setsockopt(socket.IPPROTO_TCP, option, value)
            self._socket.connect_ex(self._address)
