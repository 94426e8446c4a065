"""Carries out a save plan: values from memory, through a bounded buffer where they must, to their places in files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, chain

import torch
import torch.distributed as dist

from ..engine.workers import run_in_threads
from ..errors import PeerError
from ..planning.boxes import Box
from ..ranks.coordinator import Coordinator, collective_device
from ..sources.local import IOV_MAX
from .files import Shards
from .parameters import Opened, Parameters
from .plan import Part, Round, Run, SavePlan, Segment


__all__ = ["execute_save"]

WRITE_BYTES = 8 * 2**20
"""Largest single write, and the size of the buffer that casts and device copies go through."""

Put = Callable[[int, int, Sequence[memoryview]], None]
"""As :meth:`.files.Shards.put`."""


def execute_save(
    plan: SavePlan,
    parameters: Parameters,
    files: Shards,
    coordinator: Coordinator,
    *,
    threads: int,
    on_bytes: Callable[[int], None],
) -> None:
    """Give `files` all bytes that this rank writes; all ranks must call it with the same `rounds`.

    Args:
        threads: how many threads write at once.
        on_bytes: called with the number of bytes after each write.
    """

    def put(shard: int, position: int, buffers: Sequence[memoryview]) -> None:
        files.put(shard, position, buffers)
        on_bytes(sum(map(len, buffers)))

    coordinator.run_on_all(lambda: _write_alone(plan, parameters, put, threads))
    error: BaseException | None = None
    for of_round in plan.rounds:
        try:
            with Opened(parameters.holdings) as values:
                for segment, buffer in _exchange(of_round, values, coordinator):
                    put(segment.shard, segment.position, [_bytes_of(buffer)])
        except PeerError:
            raise  # no exchange will come to an end any more
        except BaseException as caught:  # the others still wait, in the next rounds, for what this rank holds
            error = error or caught
    if plan.rounds:
        coordinator.agree(error)
    for computation in plan.computations:
        gathered = parameters.gather(computation.view)
        coordinator.run_on_main(partial(put, computation.shard, computation.position, [_bytes_of(gathered)]))


def _write_alone(plan: SavePlan, parameters: Parameters, put: Put, threads: int) -> None:
    swapped = {name for name, holding in parameters.holdings.items() if holding.is_swapped}

    def work(items: Iterator[Sequence[Run] | Segment]) -> None:
        with Opened(parameters.holdings) as values:
            for item in items:
                if isinstance(item, Segment):
                    put(item.shard, item.position, [_bytes_of(_assemble(item, values))])
                else:
                    _write_runs(item, values, put)

    parallel: list[Sequence[Run] | Segment] = [*_neighbours(run for run in plan.runs if run.source not in swapped)]
    # A swap file is read into buffers of DeepSpeed's, of which there are few: by one thread, one file after the other.
    # Reading each once matters more than the order in the shards.
    from_files = sorted((run for run in plan.runs if run.source in swapped), key=lambda run: run.source)
    in_turn: list[Sequence[Run] | Segment] = [[run] for run in from_files]
    for segment in plan.segments:
        (in_turn if any(part.source in swapped for part in segment.parts) else parallel).append(segment)
    run_in_threads(parallel, work, threads)
    work(iter(in_turn))


def _neighbours(runs: Iterable[Run]) -> Iterator[list[Run]]:
    """Runs of the same shard, about a single write's worth at a time."""
    group: list[Run] = []
    for run in sorted(runs):
        if group and (
            run.shard != group[0].shard or run.position - group[0].position >= WRITE_BYTES or len(group) >= IOV_MAX
        ):
            yield group
            group = []
        group.append(run)
    if group:
        yield group


def _write_runs(runs: Sequence[Run], values: Opened, put: Put) -> None:
    """Write runs of one shard; those that follow each other in one call."""
    buffers: list[memoryview] = []
    start = stop = 0
    for position, data in _pieces(runs, values):
        if buffers and (position != stop or len(buffers) == IOV_MAX or stop - start >= WRITE_BYTES):
            put(runs[0].shard, start, buffers)
            buffers = []
        if not buffers:
            start = position
        buffers.append(data)
        stop = position + len(data)
    if buffers:
        put(runs[0].shard, start, buffers)


def _pieces(runs: Sequence[Run], values: Opened) -> Iterator[tuple[int, memoryview]]:
    """The bytes of runs and their positions, at most a buffer's worth each."""
    count = WRITE_BYTES // 8
    for run in runs:
        held, first = values.values(run.source)
        position = run.position
        for begin in range(run.start, run.stop, count):
            data = _bytes_of(_cast(held[begin - first : min(run.stop, begin + count) - first], run.casts))
            yield position, data
            position += len(data)


def _assemble(segment: Segment, values: Opened) -> torch.Tensor:
    """The elements of a segment all of which this rank holds; flat, on the device of its parameters."""
    device = torch.device("cpu")
    for part in segment.parts:
        device = values.values(part.source)[0].device
    buffer = torch.empty(segment.numel, dtype=segment.dtype, device=device)
    _put_constants(segment, buffer)
    for part in segment.parts:
        _place(_take(part, values), part.box, buffer)
    return buffer


def _exchange(of_round: Round, values: Opened, coordinator: Coordinator) -> Iterator[tuple[Segment, torch.Tensor]]:
    """Send what this rank holds of the segments to their writers; yield those that this rank writes.

    An error of this rank's is raised after the exchange, because the others wait for it.
    """
    device, rank = collective_device(), coordinator.rank
    outgoing: list[list[Part]] = [[] for _ in range(coordinator.world_size)]
    sent, arriving = [0] * coordinator.world_size, [0] * coordinator.world_size  # bytes, by the other rank
    for writer, segment in of_round:
        for part in segment.parts:
            nbytes = part.box.numel * segment.dtype.itemsize
            if part.rank == rank != writer:
                outgoing[writer].append(part)
                sent[writer] += nbytes
            elif part.rank != rank == writer:
                arriving[part.rank] += nbytes
    send = torch.empty(sum(sent), dtype=torch.uint8, device=device)
    error: Exception | None = None
    try:
        position = 0
        for part in chain.from_iterable(outgoing):
            taken = _take(part, values).contiguous().view(-1).view(torch.uint8)
            send[position : position + len(taken)].copy_(taken)
            position += len(taken)
    except Exception as caught:
        error = caught
    received = torch.empty(sum(arriving), dtype=torch.uint8, device=device)
    coordinator.wait(dist.all_to_all_single(received, send, arriving, sent, async_op=True))
    if error is not None:
        raise error
    starts = [0, *accumulate(arriving)]  # where what comes from each peer begins
    for writer, segment in of_round:
        if writer != rank:
            continue
        buffer = torch.empty(segment.numel, dtype=segment.dtype, device=device)
        _put_constants(segment, buffer)
        for part in segment.parts:
            if part.rank == rank:
                _place(_take(part, values), part.box, buffer)
                continue
            begin = starts[part.rank]
            starts[part.rank] += part.box.numel * segment.dtype.itemsize
            # Parts begin anywhere among the bytes, and a view in another dtype wants them aligned.
            arrived = received[begin : starts[part.rank]].clone().view(segment.dtype)
            _place(arrived.view(part.box.sizes), part.box, buffer)
        yield segment, buffer


def _take(part: Part, values: Opened) -> torch.Tensor:
    """The elements of a part that this rank holds, cast, in the shape of its box."""
    held, first = values.values(part.source)
    box = part.box
    return _cast(held[box.at - first :].as_strided(box.sizes, box.at_strides), part.casts)


def _place(values: torch.Tensor, box: Box, buffer: torch.Tensor) -> None:
    """Copy values in the shape of `box` to its places in `buffer`."""
    buffer[box.to :].as_strided(box.sizes, box.to_strides).copy_(values)


def _put_constants(segment: Segment, buffer: torch.Tensor) -> None:
    for region in segment.constants:
        box = region.box
        values = region.leaf.tensor[box.at :].as_strided(box.sizes, box.at_strides)  # type: ignore[union-attr]
        _place(_cast(values, region.casts), box, buffer)


def _cast(values: torch.Tensor, casts: Sequence[torch.dtype]) -> torch.Tensor:
    for dtype in casts:
        values = values.to(dtype)
    return values


def _bytes_of(values: torch.Tensor) -> memoryview:
    """The bytes of a tensor, in row-major order; no copy if they lie so in host memory already."""
    return memoryview(values.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
