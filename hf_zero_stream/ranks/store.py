"""The key-value store of torch's default process group, into which ranks write what ends a rendezvous or a meeting.

One thread of one process answers all ranks. So no rank asks it once for each other rank, and ranks that wait ask ever
more seldom. (They do not wait in the store: torch prints two warnings each time that such a wait comes to its end.)
"""

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

    def set_first(self, key: str, value: Any, *, instead_of: Any = None) -> Any:
        """Write `value` if no rank has written `key` yet, or it is what is given; returns what is there now."""
        with self._answering():
            expected = "" if instead_of is None else json.dumps(instead_of)
            return json.loads(self._store.compare_set(key, expected, json.dumps(value)))

    def get(self, key: str) -> Any:
        """The value of `key`; None if it is not there."""
        with self._answering():
            return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def get_many(self, keys: Sequence[str]) -> list[Any]:
        """The values of `keys`, None for those that are not there; only for keys that nobody deletes.

        In two requests, if all are there.
        """
        with self._answering():
            self._note_written([key for key in keys if key not in self._written])
            there = [key for key in keys if key in self._written]
            has_multi_get = there and self._store.has_extended_api()
            texts = self._store.multi_get(there) if has_multi_get else map(self._store.get, there)
            found = {key: json.loads(text) for key, text in zip(there, texts, strict=True)}
        return [found.get(key) for key in keys]

    def _note_written(self, keys: Sequence[str]) -> None:
        """Note which of these keys are there: ask for all of them at once, and for halves if not all are."""
        if keys and self._store.check(list(keys)):
            self._written.update(keys)
        elif len(keys) > 1:
            self._note_written(keys[: len(keys) // 2])
            self._note_written(keys[len(keys) // 2 :])

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


def pauses(longest_s: float, share: float = 0.25, shortest_s: float = 0.00005) -> Iterator[float]:
    """Yield the seconds waited so far, first at once, then after pauses of a `share` of the wait so far."""
    began = time.monotonic()
    while True:
        waited_s = time.monotonic() - began
        yield waited_s
        time.sleep(min(longest_s, shortest_s + waited_s * share))
