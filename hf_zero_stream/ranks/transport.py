"""Ways in which ranks reach each other: the key-value store of torch's default process group, and sockets.

Into the store they write what ends a rendezvous or a meeting. By sockets they know that each other's processes exist,
on whatever host they run, and ask each other. The kernel accepts connections while a process exists: also while it is
stopped, or something in it such as a slow ``dlopen`` holds Python's lock. When the process ends, the kernel resets its
connections, and refuses new ones.
"""

from __future__ import annotations

import errno
import json
import os
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


PREFIX = "hf_zero_stream"
"""The beginning of all our keys in the store."""

TIMEOUT_S = 20.0
"""Time in which the store must answer; afterwards it counts as lost."""


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
        """The message for a store that does not answer."""
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
    """End of a rendezvous: ``"together"``, ``"apart"`` or, for a :class:`Verdict`'s fields, ``"failed"``.

    `when` says that it holds for ranks that come a little later, too; 0: it does not.
    """

    outcome: str
    why: str = ""
    when: float = 0.0
    failure: Sequence[Any] = ()
    gave_up: str | None = None
    """If ranks were waited for as long as their time was: the last meeting of all before that."""


class Verdict(NamedTuple):
    """Rank that has died or failed, with the class and text of its error; written into the store."""

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
        """The error that other ranks raise; of the same class as the error of a rank that lives, if that is ours."""
        error: HfZeroStreamError
        if self.is_dead:
            error = PeerError(self.message)
        elif self.kind in errors.__all__:
            error = getattr(errors, self.kind)(f"rank {self.rank}: {self.message}")
        else:
            error = PeerError(f"rank {self.rank} failed, so this rank gives up too: {self.kind}: {self.message}")
        error.is_of_another_rank = self.rank >= 0
        return error


def pauses(longest_s: float, share: float = 0.5) -> Iterator[float]:
    """Yield the seconds waited so far, first at once, then after pauses of a `share` of the wait so far."""
    began = time.monotonic()
    while True:
        waited_s = time.monotonic() - began
        yield waited_s
        time.sleep(min(longest_s, 0.00005 + waited_s * share))


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
        return family, probe.getsockname()[0]


class Line:
    """A connection to the listener of another rank's process, at `address` and `port`.

    Attributes:
        end: how the process ended, if it has; completes "rank 3 ...".
    """

    def __init__(self, address: str, port: int, *, is_local: bool = False) -> None:
        self._address = (address, port)
        self._socket: socket.socket | None = None
        self._is_reachable = is_local
        """Whether no firewall is in between: then a refusal means that the process is gone, and silence its host."""
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
        self._is_reachable |= error in (errno.ECONNRESET, errno.EPIPE)
        self.close()
        if error in (errno.ECONNREFUSED, errno.ETIMEDOUT) and self._is_reachable:
            if error == errno.ETIMEDOUT:
                self.end = f"has not answered for {SILENCE_S} s"
            return False
        self._dial()  # a connection may end for other reasons: what counts is whether there is a new one
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
