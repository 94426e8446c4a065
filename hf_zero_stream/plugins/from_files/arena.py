"""Host memory of a fixed size, of which parts are taken again once no tensor refers to them."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import deque
from typing import Any, NamedTuple

import torch

from ...plugin_api import pinned, sleeping_event, stream


ALIGNMENT = 256
"""Bytes at whose multiples parts begin: a view of any dtype is aligned, and copies are of whole cache lines."""


class _Span(NamedTuple):
    start: int
    stop: int


class Arena:
    """`nbytes` bytes of host memory, in pinned memory if `device`, to which they are copied, is an accelerator.

    A part is a storage of its own. Whoever may still read it refers to that storage: a weight that is in use, which on
    one rank of a CPU *is* the part, and views of it that autograd keeps for the backward pass. Only when the last
    of them is gone can the part be taken again; values that are overwritten earlier give wrong gradients silently.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes = _aligned(nbytes)
        self._device = None if device.type == "cpu" else device
        self._memory = torch.empty(self.nbytes, dtype=torch.uint8) if self._device is None else pinned(self.nbytes)
        self._free = [_Span(0, self.nbytes)]
        """What nobody has, in order, with no two parts side by side."""
        self._returned: deque[tuple[_Span, Any]] = deque()
        """Parts that nobody refers to any more, each with a mark of what the device had to do until then."""
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> torch.Tensor | None:
        """Memory of `nbytes` bytes (uint8), which is free again when no tensor refers to it; None without room."""
        size = _aligned(nbytes)
        with self._lock:
            while True:
                self._gather_returned(waits=False)
                found = next((part for part in self._free if part.stop - part.start >= size), None)
                if found is not None or not self._returned:
                    break
                self._gather_returned(waits=True)
            if found is None:
                return None
            number = self._free.index(found)
            taken = _Span(found.start, found.start + size)
            self._free[number : number + 1] = [_Span(taken.stop, found.stop)] if taken.stop < found.stop else []
        memory: Any = (ctypes.c_char * size).from_address(self._memory.data_ptr() + taken.start)
        memory.arena = self._memory  # what it is a part of
        weakref.finalize(memory, self._give_back, taken).atexit = False
        return torch.frombuffer(memory, dtype=torch.uint8)[:nbytes]

    def _give_back(self, part: _Span) -> None:
        """Called by whatever thread drops the last tensor, perhaps inside the garbage collector: it takes no lock."""
        mark = None
        if self._device is not None:  # which may not have copied it yet
            mark = sleeping_event(self._device)
            mark.record(stream(self._device))
        self._returned.append((part, mark))

    def _gather_returned(self, *, waits: bool) -> None:
        """Put what has come back among what is free: what the device is done with, or if it `waits`, the first."""
        while self._returned and (waits or self._returned[0][1] is None or self._returned[0][1].query()):
            part, mark = self._returned.popleft()
            if mark is not None:
                mark.synchronize()
            waits = False
            self._free = _joined(sorted([*self._free, part]))


def _joined(parts: list[_Span]) -> list[_Span]:
    joined: list[_Span] = []
    for part in parts:
        if joined and joined[-1].stop == part.start:
            joined[-1] = _Span(joined[-1].start, part.stop)
        else:
            joined.append(part)
    return joined


def _aligned(nbytes: int) -> int:
    return -(-max(1, nbytes) // ALIGNMENT) * ALIGNMENT
