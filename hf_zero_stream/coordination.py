"""What ranks tell each other while loading: one rank's headers, everyone's success, everyone's report.

Ranks meet at agreements, always in the same order. A rank that fails between two agreements brings its error to the
next one, so that every rank raises there, in seconds, instead of waiting for a collective that never comes. While a
coordinator is :meth:`~Coordinator.watched`, that holds for a rank that dies, too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist

from .errors import PeerError
from .liveness import PEER_TIMEOUT_S, Watch, default_store, peer_error
from .messages import broadcast_object, gather_objects


__all__ = ["Coordinator"]

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

    @classmethod
    def of_default_group(cls) -> Coordinator:
        """All ranks of torch's default process group; without one, this process alone.

        In a *fake* group, which stands for ranks beyond this machine, collectives deliver nothing: then each rank is
        alone.
        """
        if not dist.is_initialized():
            return cls(0, 1, alone=True)
        world_size = dist.get_world_size()
        return cls(dist.get_rank(), world_size, alone=world_size == 1 or dist.get_backend() == "fake")

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that speaks for all."""
        return self.rank == 0

    # ------------------------------------------------------------------------------------------- agreements

    def agree(self, error: BaseException | None = None) -> None:
        """Return on every rank if no rank brings an `error`, else raise on every rank.

        A rank that failed raises its own error. The others raise one of the same class if it is ours, and
        :class:`PeerError` if not; both name the rank.
        """
        self.exchange(None, error)

    def exchange(self, value: T, error: BaseException | None = None) -> list[T]:
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

    def share(self, produce: Callable[[], T]) -> T:
        """What `produce` returns on rank 0, on every rank; an agreement as well."""
        if self.is_alone:
            return produce()
        return broadcast_object(self.on_main(produce), 0, self.wait)

    def on_main(self, work: Callable[[], T]) -> T | None:
        """`work` on rank 0, and what it returns there; an agreement as well."""
        return self.together(lambda: work() if self.is_main else None)

    def together(self, work: Callable[[], T]) -> T:
        """What `work` returns here, once it has on all ranks; an agreement."""
        error: BaseException | None = None
        try:
            result = work()
        except Exception as caught:
            error = caught
        self.agree(error)
        return result

    def report(self, error: BaseException) -> BaseException:
        """Bring `error` to the next agreement, unless an agreement raised it; returns what this rank should raise."""
        if self._reported:
            return error
        try:
            self.agree(error)
        except BaseException as agreed:
            return agreed
        return error

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Brings an error inside, Ctrl-C too, to the next agreement (see :meth:`report`); raises it as it was."""
        try:
            yield
        except BaseException as error:
            failure = self.report(error)
            if failure is error:
                raise
            raise failure from error

    # ------------------------------------------------------------------------------------------- dying ranks

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, ranks see each other's heartbeats: agreements and :meth:`wait` raise if one dies.

        All ranks must enter it together; one that leaves it with an error that was not agreed upon says so.
        """
        if self.is_alone:
            yield
            return
        first = self.rank - int(os.environ.get("LOCAL_RANK", "0"))
        self._watch = Watch(
            default_store(),
            self.rank,
            self.world_size,
            neighbours=range(first, first + int(os.environ.get("LOCAL_WORLD_SIZE", "1"))),
            holds_store=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
        )
        try:
            yield
        except BaseException as error:
            if not self._reported:
                self._watch.announce(error, comes=False)
            raise
        finally:
            watch, self._watch = self._watch, None
            watch.close()

    def be_patient(self, seconds: float = PEER_TIMEOUT_S) -> None:
        """Take a rank for dead only after so many seconds without a heartbeat."""
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
        with self.connections():
            began = time.monotonic()
            while self._watch is not None and not work.is_completed():
                verdict = self._watch.verdict
                if verdict is not None and verdict.is_dead:
                    raise verdict.error()
                # Notices the end late by a tenth of the wait at most.
                time.sleep(min(0.005, 0.00005 + (time.monotonic() - began) / 10))
            work.wait()

    @contextmanager
    def connections(self) -> Iterator[None]:
        """Turns the error of a collective inside into one that names the rank that died."""
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
