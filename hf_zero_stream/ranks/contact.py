"""How ranks reach each other besides their collectives: sockets, and the store of torch's default process group.

By sockets, ranks on different hosts know that their processes exist, and ask each other. The kernel accepts
connections while a process exists, whatever that does. A byte on a connection is a question; the answer is written
into the store. So is what ends a round or a meeting for all ranks: a :class:`Decision`, a :class:`Verdict`.
"""

from __future__ import annotations

import errno
import json
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from .. import errors
from ..errors import HfZeroStreamError, PeerError


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


PREFIX = "hf_zero_stream"
"""What all our keys in the store begin with."""

TIMEOUT_S = 20.0
"""How long the store may take to answer; afterwards it counts as lost."""


class SharedStore:
    """A second connection to a process group's `store`, for any thread. Values are written as JSON.

    A method that gets no answer raises :class:`PeerError`. The store is lost then: later calls raise at once.
    """

    def __init__(self, store: dist.Store, *, ends_with_rank_0: bool) -> None:
        self.ends_with_rank_0 = ends_with_rank_0
        self.is_lost = False
        self._lock = threading.Lock()
        self._written: set[str] = set()
        with self._answering():
            # Ask on the open connection first: torch would try long to open one to a server that is gone.
            store.check([PREFIX])
            self._store = store.clone()
            self._store.set_timeout(timedelta(seconds=TIMEOUT_S))

    def set(self, key: str, value: Any) -> None:
        with self._answering():
            self._store.set(key, json.dumps(value))

    def set_first(self, key: str, value: Any) -> Any:
        """Write `value` if no rank has written `key` yet; returns what is there now."""
        with self._answering():
            return json.loads(self._store.compare_set(key, "", json.dumps(value)))

    def get(self, key: str) -> Any:
        """The value of `key`; None if it is not there."""
        with self._answering():
            return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def get_many(self, keys: Sequence[str]) -> list[Any]:
        """The values of `keys`, None for those that are not there; only for keys that nobody deletes."""
        with self._answering():
            self._written |= {key for key in keys if key not in self._written and self._store.check([key])}
            there = [key for key in keys if key in self._written]
            has_multi_get = there and self._store.has_extended_api()
            texts = self._store.multi_get(there) if has_multi_get else map(self._store.get, there)
            found = {key: json.loads(text) for key, text in zip(there, texts, strict=True)}
        return [found.get(key) for key in keys]

    def add(self, key: str, amount: int) -> int:
        """Add `amount` to a counter that begins at 0; returns the sum."""
        with self._answering():
            return self._store.add(key, amount)

    def delete(self, keys: Iterable[str]) -> None:
        """Delete `keys`, as far as they are there."""
        with self._answering():
            for key in keys:
                self._store.delete_key(key)

    def why_lost(self) -> str:
        """What it means that the store does not answer."""
        if not self.ends_with_rank_0:
            return "The launcher's key-value store does not answer any more; start all ranks anew."
        what = "rank 0 has died or ended (the store in its process does not answer), so this rank gives up too."
        return f"{what} Look into that rank's log, and start all ranks anew."

    @contextmanager
    def _answering(self) -> Iterator[None]:
        with self._lock:
            if self.is_lost:
                raise PeerError(self.why_lost())
            try:
                yield
            except RuntimeError as error:
                self.is_lost = True
                raise PeerError(self.why_lost()) from error


class Decision(NamedTuple):
    """How a round ended: ``"together"``, ``"apart"`` or, for a :class:`Verdict`'s fields, ``"failed"``.

    `when` says that it holds for ranks that come a little later, too; 0: it does not.
    """

    outcome: str
    why: str = ""
    when: float = 0.0
    failure: Sequence[Any] = ()
    given_up: Sequence[tuple[int, bool]] = ()
    """Ranks that were waited for as long as their time was, and whether they had made contact."""


class Verdict(NamedTuple):
    """Which rank died or failed, with the class and text of its error; written into the store."""

    rank: int
    """-1 if it is no rank: the store is lost, or ranks wait for each other."""
    is_dead: bool
    """True: the rank will never reach the next agreement. False: it will, and brings its error."""
    kind: str
    """``"Ended"`` if its process ended by itself."""
    message: str

    @classmethod
    def of_failure(cls, rank: int, error: BaseException) -> Verdict:
        return cls(rank, False, type(error).__name__, str(error))

    @classmethod
    def of_death(cls, rank: int, seen: str, kind: str = "PeerError") -> Verdict:
        text = f"rank {rank} {seen}, so this rank gives up too. Look into that rank's log, and start all ranks anew."
        return cls(rank, True, kind, text)

    def error(self) -> HfZeroStreamError:
        """What the other ranks raise; of the same class as the error of a rank that lives, if that is ours."""
        if self.is_dead:
            return PeerError(self.message)
        if self.kind in errors.__all__:
            return getattr(errors, self.kind)(f"rank {self.rank}: {self.message}")
        return PeerError(f"rank {self.rank} failed, so this rank gives up too: {self.kind}: {self.message}")


def pauses(longest_s: float, share: float = 0.5) -> Iterator[float]:
    """Yield the seconds waited so far, first at once, then after pauses of a `share` of the wait so far."""
    began = time.monotonic()
    while True:
        waited_s = time.monotonic() - began
        yield waited_s
        time.sleep(min(longest_s, 0.00005 + waited_s * share))
