"""Agreements of ranks that load or save together: on success, and on objects that they exchange.

Ranks meet at agreements, always in the same order, inside :meth:`Coordinator.watched`. A rank that fails between two
agreements brings its error to the next one, so that every rank raises there, in seconds, instead of waiting for a
collective that never comes. If a rank dies or is interrupted inside an agreement, the others raise, too.
"""

from __future__ import annotations

import hashlib
import pickle
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager, suppress
from functools import cached_property, partial
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from .. import accelerators
from ..accelerators import all_gather, collective_device, is_accelerator
from ..errors import DisagreementError, HfZeroStreamError, PeerError
from .presence import Presence, Topology, begun_collectives, is_alone
from .rendezvous import LOAD, CollectiveLock, MeetingKind, Rendezvous
from .store import Verdict, pauses
from .watchdog import STUCK_S, Watchdog


T = TypeVar("T")

_collective_lock = CollectiveLock()

_SMALL_BYTES = 504
"""Objects up to this size travel with their length, in one collective."""

_HOST = torch.device("cpu")
"""Named, because a load may be made where torch's default is the meta device: in a model's ``__init__``."""


class Coordinator:
    """Collectives between ranks that load or save together. If `alone`, this rank talks to none, and acts for all."""

    def __init__(self, rank: int, world_size: int, *, alone: bool) -> None:
        self.rank = rank
        self.world_size = world_size
        self.is_main = rank == 0
        self.is_alone = alone
        self._reported = False  # whether all ranks know of an error
        self._watchdog: Watchdog | None = None
        self._connected: set[Any] = set()
        """Groups and the kinds of collectives that have been made in them."""

    @classmethod
    def of_default_group(cls, *, alone: bool = False) -> Coordinator:
        """The coordinator of torch's default process group; alone, too, without one, or in a fake one."""
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        return cls(rank, world_size, alone=alone or is_alone())

    @classmethod
    def of_this_rank(cls) -> Coordinator:
        """The coordinator of this rank of torch's default process group, alone."""
        return cls.of_default_group(alone=True)

    @cached_property
    def topology(self) -> Topology:
        """The layout of ranks on hosts; known inside :meth:`watched`, and alone as the launcher announces it."""
        if self.is_alone:
            return Topology.announced(self.rank, self.world_size)
        return Presence.in_default_group().topology()

    @property
    def device(self) -> torch.device:
        """Where the tensors lie that collectives take."""
        return collective_device()

    @property
    def meeting(self) -> str:
        """The name, the same on all ranks, of the meeting that this code is in, inside :meth:`watched`."""
        assert self._watchdog is not None
        return self._watchdog.meeting

    def agree(self, error: BaseException | None = None) -> None:
        """Return on every rank if no rank brings an `error`, else raise on every rank.

        A rank that failed raises its own error; the others raise :meth:`.store.Verdict.error`, which names it.
        """
        self.all_gather(None, error)

    def all_gather(self, value: T, error: BaseException | None = None) -> list[T]:
        """Every rank's `value`, in order of rank; an agreement (see :meth:`agree`), as are all methods that use it."""
        if error is not None and (self.is_alone or self._reported):
            self._reported = True
            _raise_again(error)
        if self.is_alone:
            return [value]
        watchdog = self._watchdog
        assert watchdog is not None, "agreements are made inside watched()"
        if error is not None and watchdog.verdict is None:
            watchdog.announce(error, comes=True)
        mine = None if error is None else Verdict.of_failure(self.rank, error)
        failures: list[Verdict] = []
        try:
            watchdog.meet()
            presence = watchdog.presence
            everyone = self._gather((value, mine, presence.digests()))
            presence.learn([digests for *_, digests in everyone])
            failures = [Verdict(*failure) for _, failure, _ in everyone if failure is not None]
            if failures:
                watchdog.check()  # raises what began it: rank 0 of `failures` may only have heard of it
                raise failures[0].error()
        except BaseException as lost:
            self._reported = True
            # The collective has failed here, or Ctrl-C came too late for it: the others wait in it.
            if not failures and (watchdog.verdict is None or not isinstance(lost, PeerError)):
                watchdog.announce(lost, comes=False)
            if error is None or not isinstance(lost, HfZeroStreamError):
                raise
            _raise_again(error)
        return [value for value, *_ in everyone]

    def _gather(self, value: Any) -> list[Any]:
        """Like ``dist.all_gather_object``, but raises when a rank dies, and what is small is exchanged at once."""
        mine = _pickled(value)
        length = torch.tensor([mine.numel()], device=_HOST).view(torch.uint8)
        everyone = self._gather_bytes(torch.cat([length, mine[:_SMALL_BYTES]]), length.numel() + _SMALL_BYTES)
        counts = [int(data[: length.numel()].view(torch.int64)) for data in everyone]
        everyone = [data[length.numel() :] for data in everyone]
        if max(counts) > _SMALL_BYTES:
            everyone = self._gather_bytes(mine, max(counts))
        return [_unpickled(data[:count]) for data, count in zip(everyone, counts, strict=True)]

    def _gather_bytes(self, mine: torch.Tensor, nbytes: int) -> list[torch.Tensor]:
        """Every rank's bytes, each filled up to `nbytes`, in host memory."""
        padded = torch.zeros(nbytes, dtype=torch.uint8, device=_HOST)
        padded[: mine.numel()] = mine
        everyone = torch.empty(self.world_size * nbytes, dtype=torch.uint8, device=self.device)
        self.run(all_gather, everyone, padded.to(self.device))
        return list(everyone.cpu().split(nbytes))  # in one copy: each takes longer than what it copies

    def require_same(self, what: object, error: BaseException | None = None, *, beside: Any = None) -> list[Any]:
        """Every rank's `beside`; raises :class:`DisagreementError` on all ranks if `what` differs between ranks.

        Ranks exchange digests of what is long, and the thing itself only if something differs.
        """
        short = what if len(text := repr(what)) < _SMALL_BYTES // 4 else hashlib.sha256(text.encode()).hexdigest()
        of_ranks, besides = zip(*self.all_gather((short, beside), error), strict=True)
        if any(each != of_ranks[0] for each in of_ranks):
            _refuse_different(self.all_gather(what))
        return [*besides]

    def broadcast(self, produce: Callable[[], T], source: int = 0, *, same: object = None) -> T:
        """Run `produce` on rank `source`, and return its result on every rank.

        Raises :class:`DisagreementError` on all ranks if what must be the `same` differs between ranks.
        """
        if self.is_alone:
            return produce()
        is_source = self.rank == source
        with self.reporting():
            value: Any = produce() if is_source else None
            data = _pickled(value)
        goes_along = data.numel() <= _SMALL_BYTES // 2  # with the agreement, in one collective
        everyone: list[Any] = self.all_gather((goes_along, value if goes_along else data.numel(), same))
        _refuse_different([each for *_, each in everyone])
        goes_along, found, _ = everyone[source]
        if goes_along:
            return value if is_source else found
        if not is_source:
            data = torch.empty(found, dtype=torch.uint8, device=_HOST)
        data = data.to(self.device)
        self.run(dist.broadcast, data, source)
        return value if is_source else _unpickled(data.cpu())

    def run_on_main(self, work: Callable[[], T]) -> T | None:
        """Run `work` on rank 0. Returns its result there, None elsewhere."""
        return self.run_on_all(lambda: work() if self.is_main else None)

    def run_on_all(self, work: Callable[[], T]) -> T:
        """Run `work` on every rank, and return its result here once it has succeeded on all."""
        with self.reporting():
            result = work()
        self.agree()
        return result

    def gather_results(self, work: Callable[[], T]) -> list[T]:
        """Run `work` on every rank; returns every rank's result, once it has succeeded on all."""
        with self.reporting():
            result = work()
        return self.all_gather(result)

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Report an error inside (Ctrl-C too) to all ranks at an agreement, unless one raised it; raise it again."""
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

    @contextmanager
    def watched(self, kind: MeetingKind = LOAD, subject: str = "") -> Iterator[None]:
        """Wait for all ranks; inside, they watch each other: agreements and collectives raise if one dies.

        If an error leaves it that the other ranks have not heard of, they are told that this rank has given up.
        Nested in itself, it does nothing. For `subject` and what it raises see :class:`.rendezvous.Rendezvous`.
        """
        if self.is_alone or self._watchdog is not None:
            yield
            return
        _collective_lock.acquire()  # collectives of two loads must not mix
        try:
            presence = Presence.in_default_group()
            arrival = Rendezvous(presence, kind, subject)
            with closing(Watchdog(presence, arrival.key, arrival.doing)) as watchdog:
                arrival.gather(watchdog)
                self._watchdog = watchdog
                try:
                    yield
                except BaseException as error:
                    if not self._reported:
                        watchdog.announce(error, comes=False)
                    raise
                finally:
                    self._watchdog = None
                    arrival.leave()
                    presence.left_together = arrival.key, begun_collectives()
        finally:
            _collective_lock.release()

    def moves(self, moved: Callable[[], int]) -> None:
        """Let ranks that wait for this one see that it moves, by the bytes that `moved` gives."""
        if self._watchdog is not None:
            self._watchdog.moved = moved

    def check(self) -> None:
        """Raise what the next agreement will raise if a rank is dead or has failed; costs nothing."""
        if self._watchdog is not None:
            self._watchdog.check()

    def run(self, collective: Callable[..., Any], *args: Any, group: Any = None) -> None:
        """Make a `collective` of torch's, and wait for it; raises :class:`PeerError` if a rank dies."""
        self.begin(collective, *args, group=group)()

    def begin(self, collective: Callable[..., Any], *args: Any, group: Any = None) -> Callable[[], None]:
        """Begin a `collective` of torch's; returns what waits for it. Both raise :class:`PeerError` if a rank dies."""
        begin = partial(collective, *args, group=group, async_op=True)
        with self.naming_dead_rank():
            device, kind = self.device, (group, collective)
            # NCCL connects ranks at a group's first collective of each kind, and two ranks when one has first bytes
            # for the other; it blocks the thread until all have come, also a dead one.
            is_new = kind not in self._connected or collective is dist.all_to_all_single
            if self._watchdog is not None and is_new and is_accelerator(device):
                begun = _begun_in_thread(begin, device)
                self._wait_until(begun.done)
                work = begun.result()
                self._connected.add(kind)
            else:
                work = begin()
        return partial(self._wait_for, work)

    def _wait_for(self, work: Any) -> None:
        with self.naming_dead_rank():
            self._wait_until(work.is_completed)
            work.wait()

    def _wait_until(self, is_done: Callable[[], bool]) -> None:
        for waited_s in pauses(0.005, share=0.1):
            if self._watchdog is None or is_done():
                break
            if waited_s > STUCK_S:
                self._watchdog.end_failed()
            self._watchdog.check(dead_only=True)

    @contextmanager
    def indispensable(self, what: str) -> Iterator[None]:
        """Raise what fails inside as a PeerError on all ranks at once: none can go on without `what`."""
        try:
            yield
        except Exception as error:
            failure = PeerError(f"rank {self.rank}: {what}: {error}")
            if self._watchdog is not None:
                self._watchdog.announce(failure, comes=False)
            raise failure from error

    @contextmanager
    def naming_dead_rank(self) -> Iterator[None]:
        """Replace the connection error of a collective inside by a :class:`PeerError` that names the dead rank."""
        try:
            yield
        except RuntimeError as error:
            is_lost = _is_of_connection(error)
            if not (is_lost or isinstance(error, dist.DistError)):
                raise
            verdict = None if self._watchdog is None else self._watchdog.wait_for_verdict()
            if verdict is not None:
                raise verdict.error() from error
            if not is_lost:
                raise
            if isinstance(error, dist.DistBackendError):
                raise PeerError(
                    f"{shortened(error, 600)} No other rank is known to have died, so the cause may be this machine: "
                    "too little shared memory (/dev/shm; --shm-size of a container), or a wrong NCCL_SOCKET_IFNAME. "
                    "NCCL_DEBUG=WARN says more. This rank gives up; start all ranks anew."
                ) from error
            raise PeerError(f"The connection to another rank is lost, so this rank gives up too: {error}") from error


def _begun_in_thread(begin: Callable[[], Any], device: torch.device) -> Future[Any]:
    stream, begun = accelerators.stream(device), Future[Any]()

    def run() -> None:
        try:
            with stream, torch.no_grad():
                begun.set_result(begin())
        except BaseException as error:
            begun.set_exception(error)

    threading.Thread(target=run, name="hf_zero_stream-connect", daemon=True).start()
    return begun


_BY_GLOO = re.compile(r"\[\S*/gloo/\S+:\d+\] ")
"""How its errors of connections begin, which are plain RuntimeErrors; "[enforce fail at ..." are of other kinds."""

_BY_NCCL = re.compile(r"ncclRemoteError|ncclSystemError|communicator was aborted|[Tt]imeout|timed out")
"""Of its errors those that another rank's end may cause: it calls sockets by "system"."""


def _refuse_different(of_ranks: Sequence[object]) -> None:
    for rank, found in enumerate(of_ranks):
        if found != of_ranks[0]:
            raise DisagreementError(
                f"rank {rank} differs from rank 0 in what it loads: {shortened(found)} there, "
                f"{shortened(of_ranks[0])} on rank 0. Nothing has been read. All ranks must load the same."
            )


def _is_of_connection(error: RuntimeError) -> bool:
    """Whether `error` is what a backend of torch raises if another rank is gone, or does not answer."""
    if isinstance(error, dist.DistBackendError):
        return _BY_NCCL.search(str(error)) is not None
    if isinstance(error, (dist.DistNetworkError, dist.DistStoreError)):
        return True
    return type(error) is RuntimeError and _BY_GLOO.search(str(error)) is not None


def _pickled(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _unpickled(data: torch.Tensor) -> Any:
    return pickle.loads(data.numpy().tobytes())


def _raise_again(error: BaseException) -> NoReturn:
    """Raise `error` with its own cause and context, which ``raise`` alone replaces by what is being handled now."""
    cause, context, hides_context = error.__cause__, error.__context__, error.__suppress_context__
    try:
        raise error
    finally:
        error.__cause__, error.__context__, error.__suppress_context__ = cause, context, hides_context


@contextmanager
def meeting(kind: MeetingKind, subject: str = "", coordinator: Coordinator | None = None) -> Iterator[Coordinator]:
    """Wait for all ranks, and be one of them inside: every operation that is for all ranks begins with it.

    Gives the coordinator of the default process group, or the one that is given. Inside, ranks watch each other: one
    that dies ends the operation on all. An error of one is raised on all of them, at the next agreement.

    Raises:
        PeerError: a rank has died, or does not come.
    """
    coordinator = coordinator or Coordinator.of_default_group()
    with coordinator.watched(kind, subject), coordinator.reporting():
        yield coordinator


@contextmanager
def expected_at(kind: MeetingKind) -> Iterator[None]:
    """Tell the other ranks if code inside, before a meeting of this `kind`, fails, so that they do not wait."""
    if is_alone():
        yield
        return
    presence = Presence.in_default_group()
    before = presence.next_numbers[kind.name]
    try:
        yield
    except BaseException as error:
        if presence.next_numbers[kind.name] == before:
            with suppress(PeerError):  # the store is lost
                Rendezvous(presence, kind, error=error)
        raise


def shortened(what: object, characters: int = 200) -> str:
    """The text of `what`, or its first `characters`."""
    text = str(what)
    return text if len(text) <= characters else f"{text[:characters]}..."
