"""Carries out a save plan: values from memory, through a bounded buffer where they must, to their places in files.

:class:`Work` is what all ways to write a save have in common: its ranks, clock and memory, and how it ends.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, reduce
from itertools import chain, filterfalse, groupby
from threading import Lock
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from ..accelerators import collective_device, settle, to_host
from ..engine.execute import run_in_threads
from ..engine.lanes import copy_strided
from ..errors import PeerError
from ..holdings.own_names import parameters
from ..planning.boxes import Box
from ..ranks.coordinator import Coordinator
from ..reports.measures import AnonymousMemory, PhaseClock, progress_bar
from ..reports.save import PHASES, SavingRank
from ..settings.config import StreamingConfig
from ..sources.local import IOV_MAX
from .parameters import Parameters, Values, opened
from .plan import ExchangeRound, SavePlan, Segment, SegmentPart
from .preparation import Finalizer, WritePlan


T = TypeVar("T")

WRITE_BYTES = 8 * 2**20
"""Largest single write, and the size of the buffer that casts and device copies go through."""

Put = Callable[[int, int, Sequence[torch.Tensor]], None]
"""``put(shard, position, values)``: take flat `values`, one after the other, as the bytes of a shard from there on."""


def execute_save(
    plan: SavePlan,
    parameters: Parameters,
    put: Put,
    coordinator: Coordinator,
    threads: int,
    then: Callable[[], T],
) -> list[T]:
    """Give `put`, from several `threads`, all bytes that this rank writes, and do `then` (all ranks).

    Returns what that gives on each rank. Where ranks exchange nothing, they agree once, at the end.
    """
    write_alone = partial(_write_alone, plan, parameters, put, threads)

    def write() -> T:
        if plan.rounds or plan.computations:
            coordinator.run_on_all(write_alone)
            write_exchanged(plan, parameters, put, coordinator)
        else:
            write_alone()
        return then()

    return coordinator.gather_results(write)


def write_exchanged(plan: SavePlan, parameters: Parameters, put: Put, coordinator: Coordinator) -> None:
    """Give `put` this rank's part of what ranks must exchange or compute before it is written (all ranks)."""
    error: BaseException | None = None
    for of_round in plan.rounds:
        try:
            with opened(parameters.holdings) as values:
                for segment, buffer in exchange(of_round, values, coordinator, new_buffer):
                    put(segment.shard, segment.position, [buffer])
        except PeerError:
            raise  # no exchange will come to an end any more
        except BaseException as caught:  # the others still wait, in the next rounds, for what this rank holds
            error = error or caught
    if plan.rounds:
        coordinator.agree(error)
    for computation in plan.computations:
        gathered = parameters.gather(computation.view)
        coordinator.run_on_main(partial(put, computation.shard, computation.position, [gathered.reshape(-1)]))


def _write_alone(plan: SavePlan, parameters: Parameters, put: Put, threads: int) -> None:
    """Give `put`, from several `threads`, what this rank writes of what it holds."""
    segments = plan.alone
    swapped = {name for name, holding in parameters.holdings.items() if holding.is_swapped}

    def swap_file(segment: Segment) -> str:
        return next((str(part.source) for part in segment.parts if part.source in swapped), "")

    def work(groups: Iterator[Sequence[Segment]]) -> None:
        with opened(parameters.holdings) as values:
            for group in groups:
                _write(group, values, put)

    in_memory = sorted(filterfalse(swap_file, segments))
    near = groupby(in_memory, lambda segment: (segment.shard, segment.position // WRITE_BYTES))
    run_in_threads((list(group) for _, group in near), work, threads)
    # A swap file is read into buffers of DeepSpeed's, of which there are few: by one thread, one file after the other.
    # Reading each once matters more than the order in the shards.
    work(iter([segment] for segment in sorted(filter(swap_file, segments), key=swap_file)))


PlacedValues = tuple[int, int, torch.Tensor]
"""A shard, a position in it, and the flat values that belong there."""


def in_runs(pieces: Iterable[PlacedValues]) -> Iterator[tuple[int, int, list[torch.Tensor]]]:
    """Pieces that follow each other in a shard, about :data:`WRITE_BYTES` at a time; shard and position come first."""
    run: list[torch.Tensor] = []
    first = following = (0, 0)
    for shard, position, values in pieces:
        is_full = len(run) == IOV_MAX or following[1] - first[1] >= WRITE_BYTES
        if run and (is_full or (shard, position) != following):
            yield *first, run
            run = []
        if not run:
            first = shard, position
        run.append(values)
        following = shard, position + values.nbytes
    if run:
        yield *first, run


def _write(segments: Sequence[Segment], values: Values, put: Put) -> None:
    """Write segments all of which this rank holds."""
    for run in in_runs(chain.from_iterable(pieces_of(segment, values) for segment in segments)):
        put(*run)


def pieces_of(segment: Segment, values: Values) -> Iterator[PlacedValues]:
    """The values of a segment all of which this rank holds, from a run at most a buffer's worth each."""
    if not segment.is_run:
        # On the device of the parameters, if there are any: a GPU orders elements faster.
        sources = [part.source for part in segment.parts if isinstance(part.source, str)]
        device = values(sources[0], 0).device if sources else torch.device("cpu")
        buffer = torch.empty(segment.numel, dtype=segment.dtype, device=device)
        for part in segment.parts:
            _put(part, take(part, values), buffer)
        yield segment.shard, segment.position, buffer
        return
    (part,) = segment.parts
    position = segment.position
    for held in _elements_of(part, values).view(-1).split(WRITE_BYTES // 8):
        piece = reduce(torch.Tensor.to, part.casts, held)
        yield segment.shard, position, piece
        position += piece.nbytes


def exchange(
    of_round: ExchangeRound, values: Values, coordinator: Coordinator, buffer_of: Callable[[Segment], torch.Tensor]
) -> list[tuple[Segment, torch.Tensor]]:
    """Send what this rank holds of the segments to their writers; returns those that this rank writes, in buffers.

    An error of this rank's is raised after the exchange, because the others wait for it.
    """
    return begin_exchange(of_round, values, coordinator, buffer_of)()


def _new_bytes(nbytes: int, device: torch.device) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def begin_exchange(
    of_round: ExchangeRound,
    values: Values,
    coordinator: Coordinator,
    buffer_of: Callable[[Segment], torch.Tensor],
    new_bytes: Callable[[int, torch.device], torch.Tensor] = _new_bytes,
) -> Callable[[], list[tuple[Segment, torch.Tensor]]]:
    """Start the exchange; the returned function waits and unpacks. All that this rank holds has been taken by then.

    What is on its way lies in memory that `new_bytes` gives, of a size and on a device, uint8.
    """
    device, rank = collective_device(), coordinator.rank
    mine = [segment for writer, segment in of_round if writer == rank]
    outgoing: list[list[SegmentPart]] = [[] for _ in range(coordinator.world_size)]  # by the other rank
    arriving: list[list[tuple[int, SegmentPart]]] = [
        [] for _ in range(coordinator.world_size)
    ]  # with the segment's number
    sent, expected = [0] * coordinator.world_size, [0] * coordinator.world_size  # bytes
    number = 0
    for writer, segment in of_round:
        for part in segment.parts:
            nbytes = part.box.numel * segment.dtype.itemsize
            if part.rank == rank != writer:
                outgoing[writer].append(part)
                sent[writer] += nbytes
            elif part.rank != rank == writer:
                arriving[part.rank].append((number, part))
                expected[part.rank] += nbytes
        number += writer == rank

    def memory(nbytes: int) -> torch.Tensor:
        with coordinator.indispensable("memory for an exchange"):
            return new_bytes(nbytes, device)

    send = memory(sum(sent))
    buffers: list[torch.Tensor] = []
    in_place: torch.Tensor | None = None
    error: Exception | None = None
    try:
        position = 0
        for part in chain.from_iterable(outgoing):
            taken = take(part, values).contiguous().view(-1).view(torch.uint8)
            send[position : position + len(taken)].copy_(taken)
            position += len(taken)
        buffers = [*map(buffer_of, mine)]
        in_place = _in_place([(buffers[number], part.box) for number, part in chain.from_iterable(arriving)])
    except Exception as caught:
        error = caught
    received = memory(sum(expected)) if in_place is None else in_place
    # The same on all ranks.
    are_sent = any(part.rank != writer for writer, segment in of_round for part in segment.parts)
    wait = coordinator.begin(dist.all_to_all_single, received, send, expected, sent) if are_sent else None
    try:
        for segment, buffer in zip(mine, buffers, strict=False):  # none after an error; while the rest is on its way
            for part in segment.parts:
                if part.rank == rank:
                    _put(part, take(part, values), buffer)
    except Exception as caught:
        error = caught

    def end() -> list[tuple[Segment, torch.Tensor]]:
        if wait is not None:
            wait()
        if error is not None:
            raise error
        position = 0
        for number, part in chain.from_iterable(arriving if in_place is None else ()):
            buffer = buffers[number]
            nbytes = part.box.numel * buffer.itemsize
            there = received[position : position + nbytes]
            if position % buffer.itemsize:  # a view in another dtype wants them aligned
                there = there.clone()
            _put(part, there.view(buffer.dtype).view(part.box.sizes), buffer)
            position += nbytes
        return [*zip(mine, buffers, strict=True)]

    return end


def _in_place(arriving: Sequence[tuple[torch.Tensor, Box]]) -> torch.Tensor | None:
    """The memory of what arrives for these buffers, in this order, if it lies there as it is sent, without holes."""
    places = [buffer[box.to :].as_strided(box.sizes, box.to_strides) for buffer, box in arriving]
    if not places:
        return None
    storage, begin = places[0].untyped_storage(), places[0].data_ptr()
    end = begin
    for place in places:
        is_next = place.data_ptr() == end and place.untyped_storage().data_ptr() == storage.data_ptr()
        if not (is_next and place.is_contiguous()):
            return None
        end += place.nbytes
    at = begin - storage.data_ptr()
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, at, (end - begin,))


def new_buffer(segment: Segment) -> torch.Tensor:
    return torch.empty(segment.numel, dtype=segment.dtype, device=collective_device())


def _put(part: SegmentPart, taken: torch.Tensor, buffer: torch.Tensor) -> None:
    """Put the elements of a part, cast and in its box's shape, into the flat buffer of its segment."""
    copy_strided(buffer[part.box.to :].as_strided(part.box.sizes, part.box.to_strides), taken)


def take(part: SegmentPart, values: Values) -> torch.Tensor:
    return reduce(torch.Tensor.to, part.casts, _elements_of(part, values))


def _elements_of(part: SegmentPart, values: Values) -> torch.Tensor:
    """The elements of a part that this rank holds, in the shape of its box."""
    box = part.box
    flat = values(part.source, box.at) if isinstance(part.source, str) else part.source.tensor[box.at :]
    return flat.as_strided(box.sizes, box.at_strides)


def bytes_of(values: torch.Tensor) -> memoryview:
    """The bytes of a tensor, in row-major order; no copy if they lie so in host memory already."""
    return memoryview(to_host(values.detach()).contiguous().view(-1).view(torch.uint8).numpy())


class Work:
    """One save of `model`, while it is made.

    Attributes:
        what: is saved, for people to read.
        verifies: what was written is read again.
    """

    def __init__(self, model: nn.Module, what: str, settings: StreamingConfig, coordinator: Coordinator) -> None:
        self.model, self.what, self.settings, self.coordinator = model, what, settings, coordinator
        self.clock, self.memory = PhaseClock(PHASES), AnonymousMemory()
        self.verifies = False

    def settle(self) -> None:
        """Wait until devices have computed what is saved."""
        settle(parameters(self.model))

    def execute(self, phase: str, plan: WritePlan, put: Put, finish: Callable[[], T]) -> list[T]:
        """Carry out the plan, of which `put` takes the bytes, and `finish`; returns what that gives (all ranks)."""
        with ExitStack() as writing:
            writing.enter_context(self.clock(phase))

            def then() -> T:
                writing.close()
                self.memory.sample()
                with self.clock("sync"):
                    return finish()

            return execute_save(plan.plan, plan.parameters, put, self.coordinator, self.threads, then)

    def publish(
        self,
        finalizer: Finalizer,
        publication: Any,
        plan: WritePlan,
        digests: Sequence[Mapping[str, int]] = (),
        **figures: int,
    ) -> list[SavingRank]:
        """Have rank 0 publish what has been written; returns the :meth:`figures` of each rank (all ranks)."""

        def published() -> SavingRank:
            if self.coordinator.is_main:
                with self.clock("publish"):
                    finalizer.publish(publication, plan, digests)
            return self.figures(plan, **figures)

        return self.coordinator.gather_results(published)

    def figures(
        self, plan: WritePlan, *, written: int | None = None, rounds: int | None = None, copied: int = 0
    ) -> SavingRank:
        """What this rank did: bytes `written` and `rounds`, by default those of the plan, and bytes `copied`."""
        return SavingRank(
            rank=self.coordinator.rank,
            seconds=self.clock.seconds,
            bytes_written=plan.plan.bytes_written if written is None else written,
            bytes_copied=copied,
            rounds=len(plan.plan.rounds) if rounds is None else rounds,
            anonymous_growth_peak=self.memory.growth_peak,
        )

    @contextmanager
    def bar(self, plan: WritePlan, own_bytes: int, doing: str) -> Iterator[Callable[[int], None]]:
        """The progress bar of all tensors that ranks write, of which this one writes `own_bytes`.

        By what is given, ranks that wait for this one see that it moves, too.
        """
        whole, lock, written = sum(shard.size_bytes - len(shard.header) for shard in plan.shards), Lock(), 0
        self.coordinator.moves(lambda: written)
        with progress_bar(own_bytes, f"{doing} {self.what}", self.settings.progress, whole) as advance:

            def count(nbytes: int) -> None:
                nonlocal written
                with lock:
                    written += nbytes
                advance(nbytes)

            yield count

    @property
    def threads(self) -> int:
        return threads_of(self.coordinator)


def threads_of(coordinator: Coordinator) -> int:
    """This rank's share of the host's cores, at most 8: memory bandwidth bounds writes into the page cache."""
    return max(1, min(8, len(os.sched_getaffinity(0)) // coordinator.topology.sharing_cores))
