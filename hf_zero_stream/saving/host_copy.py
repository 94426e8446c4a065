"""Copies in host memory of the bytes that a rank is going to write, from which a thread writes them later."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ..engine.huge_pages import HugePages
from ..sources.local import IOV_MAX
from .write import WRITE_BYTES, bytes_of


__all__ = ["HostCopy", "HostMemory"]

PutBytes = Callable[[int, int, Sequence[memoryview]], None]

_memories: WeakKeyDictionary[nn.Module, HostMemory] = WeakKeyDictionary()


class HostMemory:
    """The memory of the copies of one model's training: made at its first save, and used again by later ones."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        # A GPU copies into pages that the system cannot move several times as fast, and need not wait for each piece.
        self.device = device
        self.is_pinned = device.type == "cuda"
        self.values = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.is_pinned)
        self.pages: HugePages | None = None if self.is_pinned else HugePages([self.values])

    @classmethod
    def of_model(cls, model: nn.Module, nbytes: int, device: torch.device) -> HostMemory:
        """`nbytes` bytes; whatever an earlier call gave for this model must not be in use any more."""
        memory = _memories.pop(model, None)
        if memory is None or memory.values.nbytes != nbytes:
            del memory  # before there is another
            memory = cls(nbytes, device)
        else:
            memory.pages = None  # they are populated
        _memories[model] = memory
        return memory


class HostCopy:
    """A copy of what one plan writes; takes it in as a file would (:data:`.write.Put`), and gives it to files."""

    def __init__(self, memory: HostMemory, start: int, stop: int) -> None:
        self._values, self._pages = memory.values[start:stop], memory.pages
        self._device, self._is_pinned = memory.device, memory.is_pinned
        self._used = 0
        self._pieces: list[tuple[int, int, int, int]] = []  # shard, position there, first byte and last in memory
        self._lock = threading.Lock()

    def put(self, shard: int, position: int, pieces: Sequence[torch.Tensor]) -> None:
        """Copy `pieces`, on whatever device; those of a GPU are here after :meth:`wait`."""
        with self._lock:
            start = self._used
            self._used = stop = start + sum(piece.nbytes for piece in pieces)
            self._pieces.append((shard, position, start, stop))
        if self._pages is not None:
            self._pages.populate(self._values, start, stop - start)
        for piece in pieces:
            flat = piece.detach().reshape(-1).view(torch.uint8)
            self._values[start : start + flat.numel()].copy_(flat, non_blocking=self._is_pinned)
            start += flat.numel()

    def wait(self) -> None:
        if self._is_pinned:
            torch.cuda.synchronize(self._device)

    def give(self, put: PutBytes, check: Callable[[], None]) -> None:
        """Give `put` everything, in the order of the files; `check` is called in between, and may raise."""
        data = bytes_of(self._values)
        for shard, position, ranges in self._runs():
            check()
            put(shard, position, [data[start:stop] for start, stop in ranges])

    def _runs(self) -> Iterator[tuple[int, int, list[tuple[int, int]]]]:
        """Ranges of memory that follow each other in a shard, about :data:`WRITE_BYTES` at a time."""
        ranges: list[tuple[int, int]] = []
        of_shard = first = following = nbytes = 0
        for shard, position, start, stop in sorted(self._pieces):
            is_next = shard == of_shard and position == following
            if ranges and (not is_next or nbytes >= WRITE_BYTES or len(ranges) == IOV_MAX):
                yield of_shard, first, ranges
                ranges = []
            if not ranges:
                of_shard, first, nbytes = shard, position, 0
            ranges.append((start, stop))
            following, nbytes = position + stop - start, nbytes + stop - start
        if ranges:
            yield of_shard, first, ranges
