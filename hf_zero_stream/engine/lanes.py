"""Lanes: a reader thread's staging buffers, and the copies out of them into destinations, on a CPU or on GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial, reduce
from itertools import count
from typing import Any

import torch

from ..accelerators import is_accelerator, on_device, pinned, side_streams, sleeping_event, stream
from ..planning.plan import Piece, Read


class Lane:
    """One thread's staging buffers of `nbytes` each and the copies out of them, for destinations in host memory.

    Buffers are made at first use: a thread that only reads in place never has one. None is reused before the copies
    out of it are done. Here the reading thread copies immediately; other threads read meanwhile.

    A context manager, for the thread that uses it; at its end, also after an error, no copy is under way.
    """

    buffers = 1
    """The most staging buffers that a thread has."""

    def __init__(self, devices: Sequence[torch.device], nbytes: int) -> None:
        self._nbytes = nbytes
        self._filled: list[tuple[torch.Tensor, Any]] = []
        """Buffers with copies under way, the oldest first, each with the mark behind its copies."""
        self._current: torch.Tensor | None = None

    def __enter__(self) -> Lane:
        return self

    def __exit__(self, *exception: object) -> None:
        self.finish()

    def buffer(self, nbytes: int) -> torch.Tensor:
        """The first `nbytes` of a free staging buffer, uint8; waits for the oldest copies if there is none."""
        if self._current is not None:
            self._filled.append((self._current, self._mark()))
            self._current = None
        if len(self._filled) < self.buffers:
            self._current = self._allocate(self._nbytes)
        else:
            self._current, mark = self._filled.pop(0)
            self._wait(mark)
        return self._current[:nbytes]

    @property
    def allocated_bytes(self) -> int:
        """Size of all staging buffers made so far."""
        return self._nbytes * (len(self._filled) + (self._current is not None))

    def copy(self, read: Read, staging: torch.Tensor, destinations: Sequence[torch.Tensor]) -> None:
        """Copy the pieces of `read` out of `staging`, its bytes, into `destinations` by target, with their casts."""
        for piece in read.pieces:
            source = staging[piece.start - read.start : piece.stop - read.start]
            self._submit(partial(_copy, source, piece, destinations[piece.target]))

    def finish(self) -> None:
        """Block until every copy that this lane began has reached its destination."""
        if self.allocated_bytes:
            self._wait(self._mark())

    def _allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def _submit(self, copy: Callable[[], None]) -> None:
        """Carry out `copy`, or queue it behind what was submitted before."""
        copy()

    def _mark(self) -> Any:
        """A mark behind everything submitted so far, for :meth:`_wait`."""

    def _wait(self, mark: Any) -> None:
        """Block until everything before `mark` is done."""


MOST_DIRECT_PIECES = 2
"""At most this many pieces of one read, which need no cast, are copied straight into the destination."""


class SideLane(Lane):
    """Copies out of pinned memory on side streams, while the thread reads into the other buffer.

    Each device has a stream of its own: torch copies on a stream of the destination's device, and no event of another
    device's stream says when that is done.

    `number` tells this lane's streams from a neighbour's. Copies begin after the events `begin` of each device.
    """

    buffers = 2

    def __init__(
        self, devices: Sequence[torch.device], nbytes: int, number: int = 0, begin: Sequence[torch.Event] = ()
    ) -> None:
        super().__init__(devices, nbytes)
        sides = {device: side_streams(device) for device in devices}
        self._streams = {device: streams[number % len(streams)] for device, streams in sides.items()}
        self._begin = begin
        self._events: list[Sequence[torch.Event]] = []
        """Events to reuse: the buffers that they marked are free again."""
        self._on_device = on_device(devices[0])

    def __enter__(self) -> Lane:
        # A new thread's device is the first one, which this rank may not use at all.
        self._on_device.__enter__()
        for side, event in zip(self._streams.values(), self._begin, strict=False):
            side.stream.wait_event(event)
        return self

    def __exit__(self, *exception: Any) -> None:
        try:
            self.finish()
        finally:
            self._on_device.__exit__(*exception)

    def copy(self, read: Read, staging: torch.Tensor, destinations: Sequence[torch.Tensor]) -> None:
        """Copy as :meth:`Lane.copy`. Many pieces cross the bus in one run; the device casts and scatters, at no cost.

        An H100 gets 15 GB/s of pieces of 1.3 MB that cross it one by one, and 21 GB/s of such that cross it together.
        """
        by_device: dict[torch.device, list[Piece]] = {}
        for piece in read.pieces:
            by_device.setdefault(destinations[piece.target].device, []).append(piece)
        for device, pieces in by_device.items():
            if device not in self._streams:  # host memory
                for piece in pieces:
                    source = staging[piece.start - read.start : piece.stop - read.start]
                    _copy(source, piece, destinations[piece.target])
                continue
            side = self._streams[device]
            if len(pieces) <= MOST_DIRECT_PIECES and all(piece.is_run for piece in pieces):
                with side.stream:
                    _copy_all(staging, read, pieces, destinations)
            else:
                with side.lock, side.stream:
                    _copy_all(staging.to(device, non_blocking=True), read, pieces, destinations)

    def _allocate(self, nbytes: int) -> torch.Tensor:
        return pinned(nbytes)

    def _mark(self) -> Sequence[torch.Event]:
        events = self._events.pop() if self._events else [sleeping_event(device) for device in self._streams]
        for event, side in zip(events, self._streams.values(), strict=True):
            event.record(side.stream)
        return events

    def _wait(self, mark: Sequence[torch.Event]) -> None:
        for event in mark:
            event.synchronize()
        self._events.append(mark)


def lane_for(destinations: Iterable[torch.Tensor], nbytes: int) -> Callable[[], Lane]:
    """A function that makes the lane of a thread that fills `destinations`, after what the caller's streams do now."""
    devices = sorted({each.device for each in destinations if is_accelerator(each.device)}, key=str)
    if not devices:
        return partial(Lane, devices, nbytes)
    begin, numbers = [stream(device).record_event() for device in devices], count()
    return lambda: SideLane(devices, nbytes, next(numbers), begin)


def _copy(source: torch.Tensor, piece: Piece, destination: torch.Tensor) -> None:
    """Copy `piece` out of `source`, the uint8 values from its beginning on, with its casts."""
    copy_cast(*_destination_and_values(source, 0, piece, destination), piece.casts)


def _copy_all(source: torch.Tensor, read: Read, pieces: Sequence[Piece], destinations: Sequence[torch.Tensor]) -> None:
    """Copy `pieces` out of `source`, all bytes of `read`, with their casts; queued on the current stream."""
    places, values = [], []
    for piece in pieces:
        to, found = _destination_and_values(source, piece.start - read.start, piece, destinations[piece.target])
        places.append(to)
        values.append(reduce(torch.Tensor.to, piece.casts[:-1], found))
    torch._foreach_copy_(places, values, non_blocking=True)


def _destination_and_values(
    source: torch.Tensor, at: int, piece: Piece, destination: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The destination of `piece`, and its values, which begin at byte `at` of `source`, without any cast."""
    box, itemsize = piece.box, piece.dtype.itemsize
    begin = source.storage_offset() + at
    if begin % itemsize:  # a view in another dtype must begin at a multiple of its size
        source, begin = source[at : at + piece.stop - piece.start].clone(), 0
    typed = torch.empty(0, dtype=piece.dtype, device=source.device)
    typed.set_(source.untyped_storage(), begin // itemsize, box.sizes, box.at_strides)
    return destination.as_strided(box.sizes, box.to_strides, destination.storage_offset() + box.to), typed


TILE_BYTES = 2**20
"""Size of a tile. Smaller ones give shorter runs in the destination; from 2 MiB on, caches are too small for bytes."""

SMALL_BYTES = 2**16
"""Below this size, calling torch for each tile takes longer than what tiles gain."""

FEWEST_TILED = 64
"""Least rows and columns for which tiles gain time."""

TRANSPOSE_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.float32}
"""The dtype as which to transpose elements, by their size in bytes."""


def copy_cast(destination: torch.Tensor, values: torch.Tensor, casts: Sequence[torch.dtype]) -> None:
    """Copy as :func:`copy_strided`, through the dtypes `casts`, of which the last is the destination's."""
    copy_strided(destination, reduce(torch.Tensor.to, casts[:-1], values))


def copy_strided(destination: torch.Tensor, values: torch.Tensor) -> None:
    """``destination.copy_(values)``, with a cast where the dtypes differ; the two have one shape and do not overlap.

    Torch copies single elements where neighbours in `values` are no neighbours in `destination`: each touches another
    cache line, often another page, and a core copies 0.3 to 6 GB/s. So matrices are transposed in tiles.
    """
    if values.device.type != "cpu" or destination.device.type != "cpu" or values.dim() < 2:
        destination.copy_(values, non_blocking=True)
        return
    column, row = _innermost(values), _innermost(destination)
    rows, columns = values.shape[row], values.shape[column]
    is_small = min(rows, columns) < FEWEST_TILED or values.numel() * values.element_size() < SMALL_BYTES
    if column == row or is_small or values.element_size() not in TRANSPOSE_DTYPES:
        destination.copy_(values)
        return
    order = [dim for dim in range(values.dim()) if dim not in (row, column)] + [row, column]
    _copy_matrices(destination.permute(order), values.permute(order))


def _innermost(tensor: torch.Tensor) -> int:
    """The dimension along which neighbours are closest together in memory."""
    return min(range(tensor.dim()), key=lambda dim: (tensor.shape[dim] == 1, tensor.stride(dim)))


def _copy_matrices(destination: torch.Tensor, values: torch.Tensor) -> None:
    """Copy matrices in tiles: columns are close together in `values`, rows in `destination`."""
    sizes = values.shape
    if len(sizes) > 3 or (len(sizes) == 3 and values[0].nbytes > TILE_BYTES):
        for of_destination, of_values in zip(destination, values, strict=True):
            _copy_matrices(of_destination, of_values)
    elif len(sizes) == 3:
        matrices = max(1, TILE_BYTES // values[0].nbytes)
        for to, tile in zip(destination.split(matrices), values.split(matrices), strict=True):
            _transpose(to.transpose(1, 2), tile.contiguous())
    else:
        rows = max(FEWEST_TILED, TILE_BYTES // values[0].nbytes // FEWEST_TILED * FEWEST_TILED)
        for to, tile in zip(destination.split(rows), values.split(rows), strict=True):
            _transpose(to.t()[None], tile.contiguous()[None])


def _transpose(destination: torch.Tensor, values: torch.Tensor) -> None:
    """``destination.copy_(values.transpose(1, 2))``, for contiguous `values`."""
    columns, dtype, word = values.shape[2], values.dtype, TRANSPOSE_DTYPES[values.element_size()]
    in_pairs = word == torch.int16 and columns % 2 == 0 and values.data_ptr() % 4 == 0
    if in_pairs and destination.dtype == dtype:
        # Two neighbours in a row move as one word of four bytes. Then the lower halves are one column, the upper ones
        # another: a cast to two bytes keeps the lower half.
        pairs = _shuffled(values.view(torch.float32)).view(torch.int32)
        halves = destination.view(torch.int16)
        halves[:, 0::2].copy_(pairs)
        halves[:, 1::2].copy_(pairs.bitwise_right_shift_(16))
    elif word == torch.int16:
        destination.copy_(torch.stack([matrix.t().contiguous() for matrix in values]))
    else:
        destination.copy_(_shuffled(values.view(word)).view(dtype))


def _shuffled(values: torch.Tensor) -> torch.Tensor:
    """``values.transpose(1, 2).contiguous()``, for contiguous `values`.

    A channel shuffle is a transpose of the matrix (groups, channels of a group), and for elements of one byte and
    floats of four torch has one with vector instructions, at 20 to 45 GB/s of a core; its copies give 2 to 12.
    """
    matrices, rows, columns = values.shape
    numel = rows * columns
    images = values.as_strided((matrices, numel, 1, 1), (numel, 1, numel, numel))
    shuffled = torch.native_channel_shuffle(images, rows)
    return shuffled.as_strided((matrices, columns, rows), (numel, rows, 1))
