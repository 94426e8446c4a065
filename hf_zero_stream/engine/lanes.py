"""How one reader thread moves values from its staging buffers into a destination, on a CPU or on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..planning.plan import Piece
from .transposed import copy_strided


__all__ = ["Lane", "lane_class", "settle"]


class Lane:
    """One thread's staging buffers of `nbytes` each and the copies out of them, for destinations in host memory.

    Buffers are made at first use: a thread that only reads in place never has one. None is reused before the copies
    out of it are done. Here the reading thread copies immediately; other threads read meanwhile.

    A context manager, for the thread that uses it; at its end, also after an error, no copy is under way.
    """

    buffers = 1
    """The most staging buffers that a thread has."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self._nbytes = nbytes
        self._filled: list[tuple[torch.Tensor, Any]] = []
        """Buffers with copies under way, and the mark behind those; the oldest first."""
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

    def copy(self, source: torch.Tensor, piece: Piece, destination: torch.Tensor) -> None:
        """Copy `piece` out of `source`, the uint8 values of its byte range, with its casts.

        Only the file's bytes cross the bus, in one run: the destination's device casts and scatters, at no cost.
        """
        self._submit(lambda: _copy(source, piece, destination))

    def finish(self) -> None:
        """Block until every copy that this lane began has reached its destination."""
        if self.allocated_bytes:
            self._wait(self._mark())

    def _allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def _submit(self, copy: Callable[[], None]) -> None:
        """Carry out `copy`, or queue it behind all that was submitted before."""
        copy()

    def _mark(self) -> Any:
        """A mark behind everything submitted so far, for :meth:`_wait`."""

    def _wait(self, mark: Any) -> None:
        """Block until everything before `mark` is done."""


class CudaLane(Lane):
    """Copies out of pinned memory on a side stream, while the thread reads into the other buffer."""

    buffers = 2

    def __init__(self, device: torch.device, nbytes: int) -> None:
        super().__init__(device, nbytes)
        self._stream = torch.cuda.Stream(device)
        self._device = torch.cuda.device(device)

    def __enter__(self) -> Lane:
        # A new thread's device is the first one. To come back to it from a stream of another would make a context
        # there, which takes hundreds of megabytes, by every rank of this host.
        self._device.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self.finish()
        finally:
            self._device.__exit__(*exception)

    def _allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def _submit(self, copy: Callable[[], None]) -> None:
        with torch.cuda.stream(self._stream):
            copy()

    def _mark(self) -> torch.cuda.Event:
        return self._stream.record_event()

    def _wait(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()


def settle(tensors: Iterable[torch.Tensor]) -> None:
    """Block until the GPUs on which `tensors` are have done all that they were given, on whatever stream.

    Threads do not share the caller's stream. Without this, they might read values that are not there yet, or write
    into memory that the allocator has given out anew, and kernels of before still use.
    """
    for device in {tensor.device for tensor in tensors if tensor.device.type == "cuda"}:
        torch.cuda.synchronize(device)


def lane_class(device: torch.device) -> type[Lane]:
    """The lane for destinations on `device`."""
    return CudaLane if device.type == "cuda" else Lane


def _copy(source: torch.Tensor, piece: Piece, destination: torch.Tensor) -> None:
    box = piece.box
    if not piece.is_run:
        source = source.to(destination.device, non_blocking=True)
    if source.storage_offset() % piece.dtype.itemsize:
        source = source.clone()  # a view in another dtype must begin at a multiple of its size
    values = source.view(piece.dtype).as_strided(
        box.sizes, box.at_strides, source.storage_offset() // piece.dtype.itemsize
    )
    for dtype in piece.casts[:-1]:
        values = values.to(dtype)
    copy_strided(destination[box.to :].as_strided(box.sizes, box.to_strides), values)
