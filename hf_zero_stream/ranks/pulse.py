"""A sign of life for which a process only needs to exist: its kernel answers on a listening socket.

A rank cannot see a process on another host, and the heartbeat there stops when something holds Python's lock, as a
slow ``dlopen`` does. But while the process exists, its kernel accepts connections to a socket that it listens on; when
it ends, for whatever reason, the kernel resets them, and refuses new ones. Nothing is ever sent.
"""

from __future__ import annotations

import errno
import os
import socket
import weakref
from contextlib import suppress


__all__ = ["Line", "Listener"]

BACKLOG = 4096
"""Most connections that the kernel holds until the process takes them."""


class Listener:
    """This process's socket, on the interface that leads `towards` a host. Forked children close their copy of it."""

    def __init__(self, towards: str) -> None:
        self.address, self.port = "", 0
        self._accepted: list[socket.socket] = []
        self._socket: socket.socket | None = None
        with suppress(OSError):
            family, kind, _, _, address = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(address)  # sends nothing, but chooses an interface
                own = probe.getsockname()[0]
            self._socket = socket.create_server((own, 0), family=family, backlog=BACKLOG)
            self._socket.setblocking(False)
            self.address, self.port = self._socket.getsockname()[:2]
            _listeners.add(self)

    def accept(self) -> None:
        """Take the connections that wait, so that there is always room for more."""
        with suppress(OSError):
            while self._socket is not None:
                self._accepted.append(self._socket.accept()[0])

    def close(self) -> None:
        while self._accepted:
            self._accepted.pop().close()
        if self._socket is not None:
            self._socket.close()
        self._socket = None


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
        listener.close()


os.register_at_fork(after_in_child=_close_all)
