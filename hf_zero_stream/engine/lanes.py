"""How one reader thread moves values from its staging buffer into a destination, on a CPU or on a GPU."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from ..planning.reads import Piece


__all__ = ["Lane"]


class Lane:
    """One thread's staging buffer, and on a GPU the side stream that drains it.

    The buffer is made at first use: a thread that only reads in place never has one. On a GPU it is pinned, so that a
    copy can run while the CPU goes on; the buffer is not reused before the copies out of it have finished.

    Args:
        device: device of the destinations.
        nbytes: size of the buffer in bytes.
    """

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self._device = device
        self._nbytes = nbytes
        self._buffer: torch.Tensor | None = None
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            # The allocator may have given a destination memory that earlier kernels still use.
            self._stream.wait_stream(torch.cuda.default_stream(device))

    def buffer(self, nbytes: int) -> torch.Tensor:
        """The first `nbytes` of the staging buffer as uint8; waits until earlier copies out of it are done."""
        if self._buffer is None:
            self._buffer = torch.empty(self._nbytes, dtype=torch.uint8, pin_memory=self._stream is not None)
        self.wait()
        return self._buffer[:nbytes]

    @property
    def allocated_bytes(self) -> int:
        """Size of the staging buffer, if there is one."""
        return 0 if self._buffer is None else self._nbytes

    def wait(self) -> None:
        """Block until every copy that this lane began has reached its destination."""
        if self._stream is not None:
            self._stream.synchronize()

    def copy(self, source: torch.Tensor, piece: Piece, destination: torch.Tensor) -> None:
        """Copy `piece` out of `source`, the uint8 values of its byte range, with its casts.

        Casts run on the destination's device: there they are free, and only the file's bytes cross the bus.
        """
        box = piece.box
        if source.storage_offset() % piece.dtype.itemsize:
            source = source.clone()  # a view in another dtype must begin at a multiple of its size
        values = source.view(piece.dtype).as_strided(
            box.sizes, box.at_strides, source.storage_offset() // piece.dtype.itemsize
        )
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            if values.device != destination.device and piece.casts:
                values = values.to(destination.device, non_blocking=True)
            for dtype in piece.casts[:-1]:
                values = values.to(dtype)
            destination[box.to :].as_strided(box.sizes, box.to_strides).copy_(values, non_blocking=True)
