"""The sockets by which ranks on different hosts know that their processes exist, and by which ranks ask each other.

The kernel accepts connections while a process exists, whatever that does. A byte on a connection is a question; the
answer is written into the store.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress


class Listener:
    """This process's socket, on the interface that leads `towards` a host. Forked children close their copy of it.

    A thread, which sleeps, takes connections. It calls :attr:`answer` for a new one (True), and for a question.
    """

    def __init__(self, towards: str) -> None:
        self.address, self.port = "", 0
        self.answer: Callable[[bool], None] = lambda is_new: None
        self._is_closed = False
        self._taken: dict[int, socket.socket] = {}
        self._socket: socket.socket | None = None
        with suppress(OSError):
            family, kind, _, _, address = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(address)  # sends nothing, but chooses an interface
                own = probe.getsockname()[0]
            # The backlog: most connections that the kernel holds until the process takes them.
            self._socket = socket.create_server((own, 0), family=family, backlog=4096)
            self._socket.setblocking(False)
            self.address, self.port = self._socket.getsockname()[:2]
            _listeners.add(self)
            self._thread = threading.Thread(
                target=self._run, args=(self._socket,), name="hf_zero_stream-listener", daemon=True
            )
            self._thread.start()

    def _run(self, server: socket.socket) -> None:
        poll = select.poll()
        poll.register(server, select.POLLIN)
        while not self._is_closed:
            ready = {handle for handle, _ in poll.poll()}
            asked = False
            for handle in ready.intersection(self._taken):
                if self._is_asked(handle):
                    asked = True
                elif handle not in self._taken:
                    poll.unregister(handle)
            new = self._take(server) if server.fileno() in ready else []
            for handle in new:
                poll.register(handle, select.POLLIN)
            if (new or asked) and not self._is_closed:
                self.answer(bool(new))
        self.forget()

    def _is_asked(self, handle: int) -> bool:
        """Whether there is a question on a connection; one that has ended is closed."""
        try:
            if self._taken[handle].recv(64):
                return True
        except BlockingIOError:
            return False
        except OSError:
            pass
        self._taken.pop(handle).close()
        return False

    def _take(self, server: socket.socket) -> list[int]:
        """Take the connections that wait, so that there is always room for more."""
        new = []
        try:
            while True:
                connection = server.accept()[0]
                connection.setblocking(False)
                self._taken[connection.fileno()] = connection
                new.append(connection.fileno())
        except BlockingIOError:
            pass
        except OSError:  # too many files are open
            time.sleep(0.5)
        return new

    def close(self) -> None:
        self._is_closed = True
        with suppress(OSError):
            if self._socket is not None:
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread, which closes everything
                self._thread.join(1)

    def forget(self) -> None:
        """Close this process's sockets, and leave those of a parent process as they are."""
        for each in (*self._taken.values(), *filter(None, [self._socket])):
            each.close()
        self._taken, self._socket = {}, None


class Line:
    """A connection to the listener of another rank's process, at `address` and `port`."""

    def __init__(self, address: str, port: int) -> None:
        self._address = (address, port)
        self._socket: socket.socket | None = None
        self.was_open = False
        """Whether it ever led to the process: then no firewall is in between, and silence means something."""

    def is_alive(self) -> bool | None:
        """Whether the process exists, without waiting; None if that is not known (yet)."""
        if self._socket is None:
            self._dial()
            return None
        error = self._socket.connect_ex(self._address)  # of a socket that connects already, how far it has come
        if error in (errno.EINPROGRESS, errno.EALREADY):
            return None
        self.was_open |= error in (0, errno.EISCONN, errno.ECONNRESET, errno.EPIPE)
        if error in (0, errno.EISCONN):
            try:
                self._socket.recv(1)
            except BlockingIOError:
                return True
            except OSError:
                pass  # the connection has been reset
        self.close()
        if error == errno.ECONNREFUSED and self.was_open:
            return False
        self._dial()  # a connection may end for other reasons: what counts is whether there is a new one
        return None

    def ask(self) -> None:
        """Have the process at the other end write its answer, if the line is open (yet)."""
        if self.is_alive() and self._socket is not None:
            with suppress(OSError):
                self._socket.send(b"?")

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None

    def _dial(self) -> None:
        with suppress(OSError):
            family = socket.AF_INET6 if ":" in self._address[0] else socket.AF_INET
            self._socket = socket.socket(family, socket.SOCK_STREAM)
            self._socket.setblocking(False)
            # A host that has lost its power resets nothing.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in ((socket.TCP_KEEPIDLE, 1), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 4)):
                self._socket.setsockopt(socket.IPPROTO_TCP, option, value)
            self._socket.connect_ex(self._address)


_listeners: weakref.WeakSet[Listener] = weakref.WeakSet()


def _close_all() -> None:
    for listener in list(_listeners):
        listener.forget()


os.register_at_fork(after_in_child=_close_all)
