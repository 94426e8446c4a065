"""How one reader thread moves values from its staging buffers into a destination, on a CPU or on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from ..planning.reads import Piece


__all__ = ["CudaCopies", "Copies", "HostCopies", "Lane", "buffers_per_lane"]


class Copies(Protocol):
    """How a lane's copies are carried out: immediately, or queued on a CUDA stream."""

    buffers: int
    """How many staging buffers a lane needs, so that it never waits where it need not."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """A new staging buffer, uint8."""

    def submit(self, copy: Callable[[], None]) -> None:
        """Carry out `copy`, or queue it behind all that was submitted before."""

    def mark(self) -> Any:
        """A mark behind everything submitted so far, for :meth:`wait`."""

    def wait(self, mark: Any) -> None:
        """Block until everything before `mark` is done."""


class HostCopies:
    """The reading thread copies immediately; other threads read meanwhile."""

    buffers = 1

    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def submit(self, copy: Callable[[], None]) -> None:
        copy()

    def mark(self) -> None:
        return None

    def wait(self, mark: None) -> None:
        return None


class CudaCopies:
    """Asynchronous copies out of pinned memory on a side stream: with two buffers, one is read into meanwhile."""

    buffers = 2

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        # The allocator may have given a destination memory that earlier kernels still use.
        self._stream.wait_stream(torch.cuda.default_stream(device))

    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def submit(self, copy: Callable[[], None]) -> None:
        with torch.cuda.stream(self._stream):
            copy()

    def mark(self) -> torch.cuda.Event:
        return self._stream.record_event()

    def wait(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()


def buffers_per_lane(device: torch.device) -> int:
    """Staging buffers that a reader thread fills in turn for destinations on `device`."""
    return CudaCopies.buffers if device.type == "cuda" else HostCopies.buffers


class Lane:
    """One thread's staging buffers and the copies out of them.

    Buffers are made at first use: a thread that only reads in place never has one. None is reused before the copies
    out of it are done.

    Args:
        copies: carries the copies out.
        nbytes: size of each buffer in bytes.
    """

    def __init__(self, copies: Copies, nbytes: int) -> None:
        self._copies = copies
        self._nbytes = nbytes
        self._filled: list[tuple[torch.Tensor, Any]] = []
        """Buffers with copies under way, and the mark behind those; the oldest first."""

        self._current: torch.Tensor | None = None

    @classmethod
    def to(cls, device: torch.device, nbytes: int) -> Lane:
        """A lane for destinations on `device`."""
        return cls(CudaCopies(device) if device.type == "cuda" else HostCopies(), nbytes)

    def buffer(self, nbytes: int) -> torch.Tensor:
        """The first `nbytes` of a free staging buffer; waits for the oldest copies if there is none."""
        if self._current is not None:
            self._filled.append((self._current, self._copies.mark()))
            self._current = None
        if len(self._filled) < self._copies.buffers:
            self._current = self._copies.allocate(self._nbytes)
        else:
            self._current, mark = self._filled.pop(0)
            self._copies.wait(mark)
        return self._current[:nbytes]

    @property
    def allocated_bytes(self) -> int:
        """Size of the staging buffers that there are."""
        return self._nbytes * (len(self._filled) + (self._current is not None))

    def finish(self) -> None:
        """Block until every copy that this lane began has reached its destination."""
        if self.allocated_bytes:
            self._copies.wait(self._copies.mark())

    def copy(self, source: torch.Tensor, piece: Piece, destination: torch.Tensor) -> None:
        """Copy `piece` out of `source`, the uint8 values of its byte range, with its casts.

        Only the file's bytes cross the bus, in one run: casts and scatters are the destination device's, where they
        cost nothing.
        """
        self._copies.submit(lambda: _copy(source, piece, destination))


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
    destination[box.to :].as_strided(box.sizes, box.to_strides).copy_(values, non_blocking=True)
