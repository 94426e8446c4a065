"""Key-value store of torch's default process group, and what ranks write there to end a rendezvous or a meeting."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
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
