"""Carries out saves into objects: each rank sends its shards in order, with what other ranks hold of them.

Nothing is written on a disk. A rank has the parts that are on their way in memory, and what it gets and gives in two
rounds (:mod:`.upload_plan`).
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Generic, Protocol, TypeVar

import torch

from ...errors import PeerError, SaveError
from ...plugin_api import (
    Computation,
    Coordinator,
    ExchangeRound,
    Holding,
    Parameters,
    Segment,
    ShardToWrite,
    Values,
    begin_exchange,
    bytes_of,
    collective_device,
    new_buffer,
    opened,
)
from .objects import PART_BYTES, StreamedObject
from .upload_plan import Upload, deal, upload_steps


_STEPS_PER_AGREEMENT = 8
"""Rounds after which ranks hear of each other's errors: a rank that has failed takes part until then."""


class ToSend(Protocol):
    """What takes the bytes of an object, in their order."""

    def write(self, data: memoryview) -> None: ...

    def finish(self) -> None: ...


AnObject = TypeVar("AnObject", bound=ToSend)


class KeptObject:
    """Takes the bytes of an object that is sent later, and keeps them in host memory.

    Args:
        begin: begins it then.
    """

    def __init__(self, begin: Callable[[], StreamedObject]) -> None:
        self._begin = begin
        self._blocks, self._room = deque[memoryview](), memoryview(b"")
        self.nbytes = 0

    def write(self, data: memoryview) -> None:
        self.nbytes += len(data)
        while len(data):
            if not len(self._room):
                self._room = memoryview(mmap.mmap(-1, PART_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
                self._blocks.append(self._room)
            count = min(len(self._room), len(data))
            self._room[:count] = data[:count]
            self._room, data = self._room[count:], data[count:]

    def finish(self) -> None:
        """Know where the last block ends."""
        if self._blocks:
            last = self._blocks[-1]
            self._blocks[-1] = last[: len(last) - len(self._room)]

    def send(self, check: Callable[[], None]) -> StreamedObject:
        """Send what is kept, a block after the other, each of which is then forgotten; `check` comes between them."""
        made = self._begin()
        while self._blocks:
            check()
            made.write(self._blocks.popleft())
        made.finish()
        return made


def uploads_of(shards: Sequence[ShardToWrite], coordinator: Coordinator, *, single_writer: bool) -> list[Upload]:
    """All `shards`, dealt to ranks: those that follow each other are on different hosts (all ranks)."""
    positions = coordinator.all_gather(coordinator.topology.position)
    ranks = sorted(range(len(positions)), key=lambda rank: (positions[rank], rank))
    writers = deal([shard.size_bytes for shard in shards], [0] if single_writer else ranks)
    return [*map(Upload, shards, writers)]


class _Sender(Generic[AnObject]):
    """The objects that this rank sends, one after the other; a thread finishes one while the next one is sent."""

    def __init__(
        self,
        uploads: Sequence[Upload],
        begin: Callable[[int], AnObject],
        advance: Callable[[int], object],
        thread: ThreadPoolExecutor,
    ) -> None:
        self._uploads, self._begin, self._advance, self._thread = uploads, begin, advance, thread
        self._writer: AnObject | None = None
        self._position = self._upload = 0
        self._finishing: Future[None] | None = None
        self.objects: list[AnObject] = []

    def send(self, upload: int, position: int, values: torch.Tensor) -> None:
        """Send the next bytes of a shard, which must be all that come before those sent later."""
        shard = self._uploads[upload].shard
        if self._writer is None:
            self._begin_object(upload)
        if (upload, position) != (self._upload, self._position):
            raise SaveError(
                f"{shard.name}: expected byte {self._position} of {self._uploads[self._upload].shard.name} next; got "
                f"byte {position}. Save into a folder, and report this, please."
            )
        self._write(bytes_of(values))
        if self._position == shard.size_bytes:
            self._finish_object()

    def send_empty(self, upload: int) -> None:
        """Send a shard that has a header and no values."""
        self._begin_object(upload)
        self._finish_object()

    def wait(self) -> None:
        """Wait until all objects that were sent are finished; raises what went wrong."""
        if self._finishing is not None:
            self._finishing.result()

    def _begin_object(self, upload: int) -> None:
        self._writer, self._upload, self._position = self._begin(upload), upload, 0
        self._write(self._uploads[upload].shard.header)

    def _write(self, data: bytes | memoryview) -> None:
        assert self._writer is not None
        self._writer.write(memoryview(data))
        self._position += len(data)
        self._advance(len(data))

    def _finish_object(self) -> None:
        assert self._writer is not None
        self.wait()  # else parts of many small objects would be on their way
        self._finishing = self._thread.submit(self._writer.finish)
        self.objects.append(self._writer)
        self._writer = None


def send_all(
    uploads: Sequence[Upload],
    parameters: Parameters,
    coordinator: Coordinator,
    begin: Callable[[int], AnObject],
    advance: Callable[[int], object],
) -> tuple[list[AnObject], int]:
    """Send all objects, each begun by its number (all ranks); returns those of this rank, and the number of rounds.

    An error is raised on all.

    What a round has brought is sent while ranks exchange the next one.
    """
    error: BaseException | None = None
    number, received = 0, list[tuple[Segment, torch.Tensor]]()
    with (
        ThreadPoolExecutor(1, "hf_zero_stream-send") as thread,
        _opened_for_long(parameters.holdings) as values_of_round,
    ):
        sender = _Sender(uploads, begin, advance, thread)

        def send_received() -> None:
            for segment, buffer in received if error is None else ():
                sender.send(segment.shard, segment.position, buffer)
            received.clear()

        for number, step in enumerate(upload_steps(uploads, parameters.sources), 1):
            if number % _STEPS_PER_AGREEMENT == 0 or isinstance(step, Computation):
                coordinator.agree(error)
            try:
                if isinstance(step, Computation):
                    upload = uploads[step.shard]
                    gathered = parameters.gather(step.view)
                    send_received()
                    if upload.writer == coordinator.rank:
                        sender.send(step.shard, step.position, gathered.reshape(-1))
                    continue
                with values_of_round() as values:
                    end = begin_exchange(step, values, coordinator, _side_by_side(step, coordinator.rank), _unpooled)
                try:
                    send_received()
                finally:
                    received = end()
            except PeerError:
                raise  # no exchange will come to an end any more
            except BaseException as caught:  # the others still wait, in the next rounds, for what this rank holds
                error = error or caught
        try:
            send_received()
            for which, upload in enumerate(uploads):
                is_empty = upload.shard.size_bytes == len(upload.shard.header)
                if error is None and is_empty and upload.writer == coordinator.rank:
                    sender.send_empty(which)
            sender.wait()
        except BaseException as caught:
            error = error or caught
    coordinator.agree(error)
    return sender.objects, number


def _side_by_side(of_round: ExchangeRound, rank: int) -> Callable[[Segment], torch.Tensor]:
    """Gives buffers for what this rank gets in a round, one behind the other: most of it then arrives in its place."""
    memory = _unpooled(sum(segment.nbytes for writer, segment in of_round if writer == rank), collective_device())
    used = 0

    def buffer_of(segment: Segment) -> torch.Tensor:
        nonlocal used
        start, used = used, used + segment.nbytes
        if start % segment.dtype.itemsize:  # no view of it in this dtype
            return new_buffer(segment)
        return memory[start:used].view(segment.dtype)

    return buffer_of


def _unpooled(nbytes: int, device: torch.device) -> torch.Tensor:
    """New memory, uint8, which the system gets back with its last reference if it is the host's.

    Parts are freed by the threads that have sent them: malloc would keep a third as much again as there is in use.
    """
    if nbytes == 0 or device.type != "cpu":
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    return torch.frombuffer(mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)


def check_all(objects: Iterable[StreamedObject]) -> None:
    """Raise a SaveError if any of these is not read as it was written."""
    for each in objects:
        each.check()


@contextmanager
def _opened_for_long(holdings: Mapping[str, Holding]) -> Iterator[Callable[[], AbstractContextManager[Values]]]:
    """Gives a context for each round, in which values stay open; one in a swap file stays so until the next one."""
    with opened(holdings) as from_files:

        @contextmanager
        def of_round() -> Iterator[Values]:
            with opened(holdings) as in_memory:
                yield lambda source, start: (from_files if holdings[source].is_swapped else in_memory)(source, start)

        yield of_round
