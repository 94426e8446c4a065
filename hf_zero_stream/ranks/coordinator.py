"""What ranks tell each other while loading: one rank's headers, everyone's success, everyone's report.

Ranks meet at agreements, always in the same order. A rank that fails between two agreements brings its error to the
next one, so that every rank raises there, in seconds, instead of waiting for a collective that never comes. While a
coordinator is :meth:`~Coordinator.watched`, that holds for a rank that dies, too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist

from ..errors import DisagreementError, PeerError
from .liveness import PEER_TIMEOUT_S, Watch, peer_error
from .messages import broadcast_object, gather_objects
from .presence import Presence, is_alone, why_store_is_lost
from .rendezvous import LOAD, Apart, Occasion, Round
from .topology import Topology


__all__ = ["Coordinator", "expected_at"]

T = TypeVar("T")


class Coordinator:
    """Collectives between the ranks that load one model together.

    Args:
        rank: this rank.
        world_size: number of ranks.
        alone: tell nobody anything: this rank reads for itself what one rank would have shared, and takes it that the
            others succeed.
    """

    def __init__(self, rank: int, world_size: int, *, alone: bool) -> None:
        self.rank = rank
        self.world_size = world_size
        self.is_alone = alone
        self._reported = False
        self._watch: Watch | None = None
        self._topology: Topology | None = None

    @classmethod
    def of_default_group(cls) -> Coordinator:
        """All ranks of torch's default process group; without one, or in a fake one, this process alone."""
        if not dist.is_initialized():
            return cls(0, 1, alone=True)
        return cls(dist.get_rank(), dist.get_world_size(), alone=is_alone())

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that speaks for all."""
        return self.rank == 0

    @property
    def topology(self) -> Topology:
        """Which ranks share this one's host; known inside :meth:`watched`, and alone as the launcher announces it."""
        if self._topology is None:
            if self.is_alone:
                self._topology = Topology.announced(self.rank, self.world_size)
            else:
                with _naming_lost_store():
                    self._topology = Presence.in_default_group().topology()
        return self._topology

    # ------------------------------------------------------------------------------------------- agreements

    def agree(self, error: BaseException | None = None) -> None:
        """Return on every rank if no rank brings an `error`, else raise on every rank.

        A rank that failed raises its own error. The others raise one of the same class if it is ours, and
        :class:`PeerError` if not; both name the rank.
        """
        self.all_gather(None, error)

    def all_gather(self, value: T, error: BaseException | None = None) -> list[T]:
        """Every rank's `value`, in order of rank; an agreement (see :meth:`agree`) as well.

        Raises:
            PeerError: another rank is dead (only while :meth:`watched`), or its connection is lost.
        """
        if error is not None and (self.is_alone or self._reported):
            self._reported = True
            _raise_again(error)  # everyone knows
        if self.is_alone:
            return [value]
        if error is not None and self._watch is not None and not self._watch.is_echo(error):
            self._watch.announce(error, comes=True)
        mine = None if error is None else (type(error).__name__, str(error))
        try:
            if self._watch is not None:
                self._watch.meet()
            everyone = gather_objects((value, mine), self.wait)
        except PeerError:
            self._reported = True
            if error is None:
                raise
            _raise_again(error)
        failures = {rank: failure for rank, (_, failure) in enumerate(everyone) if failure is not None}
        if not failures:
            return [value for value, _ in everyone]
        self._reported = True
        if error is not None:
            _raise_again(error)
        if self._watch is not None and self._watch.verdict is not None:
            raise self._watch.verdict.error()  # not that of a rank which only heard of it
        rank, (kind, message) = next(iter(failures.items()))
        raise peer_error(rank, kind, message)

    def require_same(self, what: object, error: BaseException | None = None, *, beside: Any = None) -> list[Any]:
        """Return on every rank if all have the same `what` and no rank brings an `error`; an agreement.

        Args:
            beside: what may differ between ranks.

        Returns:
            Every rank's `beside`, in order of rank.

        Raises:
            DisagreementError: on all ranks, if `what` is another on any.
        """
        found = self.all_gather((what, beside), error)
        everyone = [each for each, _ in found]
        for rank, other in enumerate(everyone):
            if other != everyone[0]:
                raise DisagreementError(
                    f"rank {rank} differs from rank 0 in what it loads: {_shortened(other)} there, "
                    f"{_shortened(everyone[0])} on rank 0. Nothing has been read. All ranks must load the same."
                )
        return [each for _, each in found]

    def broadcast(self, produce: Callable[[], T]) -> T:
        """Run `produce` on rank 0 and return what it returned there on every rank; an agreement as well."""
        if self.is_alone:
            return produce()
        return broadcast_object(self.run_on_main(produce), 0, self.wait)

    def run_on_main(self, work: Callable[[], T]) -> T | None:
        """Run `work` on rank 0 alone. Returns its result there and None elsewhere; an agreement as well."""
        return self.run_on_all(lambda: work() if self.is_main else None)

    def run_on_all(self, work: Callable[[], T]) -> T:
        """Run `work` on every rank. Returns its result here once it has succeeded on all; an agreement as well."""
        error: BaseException | None = None
        try:
            result = work()
        except Exception as caught:
            error = caught
        self.agree(error)
        return result

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Bring an error inside, Ctrl-C too, to the next agreement, unless an agreement raised it; raise it again.

        If another rank has died meanwhile, this rank still raises its own error.
        """
        try:
            yield
        except BaseException as error:
            if not self._reported:
                try:
                    self.agree(error)
                except BaseException as agreed:
                    if agreed is not error:
                        raise agreed from error
            raise

    # ------------------------------------------------------------------------------------------- dying ranks

    @contextmanager
    def watched(self, occasion: Occasion = LOAD, subject: str = "") -> Iterator[None]:
        """Inside, all ranks are there and watch each other: agreements and :meth:`wait` raise if one dies.

        A rank that leaves it with an error that was not agreed upon says so.

        Args:
            occasion: what the ranks come together for.
            subject: what this rank would load; only for an occasion where it may do so alone.

        Raises:
            Apart: the ranks do not come together, and need not.
            PeerError: a rank is dead, or has ended.
            HfZeroStreamError: a rank came with an error, or not all came in time.
        """
        if self.is_alone:
            yield
            return
        # Collectives of two loads must not mix. Where this one need not be among them, it does not wait.
        if not _turn.acquire(blocking=not occasion.is_optional):
            raise Apart("another thread of this process loads or saves")
        try:
            self._watch = self._arrive(occasion, subject)
            try:
                yield
            except BaseException as error:
                if not self._reported:
                    self._watch.announce(error, comes=False)
                raise
            finally:
                watch, self._watch = self._watch, None
                watch.close()
        finally:
            _turn.release()

    def _arrive(self, occasion: Occasion, subject: str) -> Watch:
        with _naming_lost_store():
            presence = Presence.in_default_group()
            arrival = Round(presence, occasion, subject)
            watch = Watch(presence, arrival.key)
            try:
                arrival.gather(watch)
            except BaseException as error:
                watch.close()
                heard = watch.verdict
                if isinstance(error, dist.DistError) and heard is not None and heard.is_dead:
                    raise heard.error() from error  # rank 0, which holds the store, heard of it too and has left
                raise
            return watch

    def set_timeout(self, seconds: float = PEER_TIMEOUT_S) -> None:
        """Set after how many seconds without a heartbeat a rank counts as dead."""
        if self._watch is not None:
            self._watch.timeout_s = seconds

    def check(self) -> None:
        """Raise if a rank is known to be dead or to have failed; cheap, and no collective.

        Raises:
            HfZeroStreamError: what the next agreement is going to raise.
        """
        if self._watch is not None:
            self._watch.check()

    def wait(self, work: Any) -> None:
        """Wait for an asynchronous collective of the default group.

        Raises:
            PeerError: a rank is dead, or the connection to it is lost.
        """
        with self.naming_dead_rank():
            began = time.monotonic()
            while self._watch is not None and not work.is_completed():
                verdict = self._watch.verdict
                if verdict is not None and verdict.is_dead:
                    raise verdict.error()
                # Notices the end late by a tenth of the wait at most.
                time.sleep(min(0.005, 0.00005 + (time.monotonic() - began) / 10))
            work.wait()

    @contextmanager
    def naming_dead_rank(self) -> Iterator[None]:
        """Replace the connection error of a collective inside by a :class:`PeerError` that names the dead rank."""
        try:
            yield
        except PeerError:
            raise
        except RuntimeError as error:
            if not _is_of_connection(error):
                raise
            verdict = None if self._watch is None else self._watch.wait_for_verdict()
            if verdict is not None:
                raise verdict.error() from error
            raise PeerError(f"The connection to another rank is lost, so this rank gives up too: {error}") from error


def _raise_again(error: BaseException) -> NoReturn:
    """Raise `error` with the cause and the context that it has: ``raise`` alone puts in what is handled by now."""
    cause, context, leaves_out_context = error.__cause__, error.__context__, error.__suppress_context__
    try:
        raise error
    finally:
        error.__cause__, error.__context__ = cause, context
        error.__suppress_context__ = leaves_out_context


def _is_of_connection(error: RuntimeError) -> bool:
    """Whether a collective failed, and not what surrounds it."""
    return isinstance(error, dist.DistError) or any(word in str(error) for word in ("gloo", "NCCL", "Connection"))


@contextmanager
def expected_at(occasion: Occasion) -> Iterator[None]:
    """Around what a rank does before, and while, it comes together with the others: they wait for it.

    If it fails before it gets there, they are told, and do not wait.
    """
    if is_alone():
        yield
        return
    presence = Presence.in_default_group()
    before = presence.rounds.get(occasion.name, 0)
    try:
        yield
    except BaseException as error:
        if presence.rounds.get(occasion.name, 0) == before:
            with suppress(RuntimeError):  # the store is lost
                Round(presence, occasion).call_off(error)
        raise


_turn = threading.RLock()
"""Held by the thread whose load or save uses the process group."""


@contextmanager
def _naming_lost_store() -> Iterator[None]:
    """Turns an error of the store into one that says who held it."""
    try:
        yield
    except dist.DistError as error:
        presence = Presence.in_default_group()
        presence.is_lost = True
        raise PeerError(why_store_is_lost(presence.holds_store)) from error


def _shortened(what: object) -> str:
    text = str(what)
    return text if len(text) <= 200 else f"{text[:200]}..."
