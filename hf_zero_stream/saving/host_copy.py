"""Host memory for copies of what a rank is going to write: all of it, or a few pieces that are used again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Self
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ..accelerators import is_accelerator, pinned, stream
from ..engine.execute import HugePages
from ..holdings.own_names import parameters
from .write import WRITE_BYTES, PlacedValues, bytes_of, in_runs


PutBytes = Callable[[int, int, Sequence[memoryview]], None]

FEWEST = 8
"""Pieces of a :class:`Room`, unless these would be smaller than :data:`SMALLEST_BYTES`."""

SMALLEST_BYTES = 2**12


class _MemoryOfModel:
    """Memory of `nbytes` bytes for the saves of one model's training."""

    _kept: WeakKeyDictionary[nn.Module, Self]

    def __init__(self, nbytes: int, is_pinned: bool) -> None:
        self.nbytes, self.is_pinned = nbytes, is_pinned

    def __init_subclass__(cls) -> None:
        cls._kept = WeakKeyDictionary()

    @classmethod
    def of_model(cls, model: nn.Module, nbytes: int) -> Self:
        """That of the model's last save, if it has the same size; nobody may use that any more."""
        # A GPU copies into pages that the system cannot move several times as fast, and need not wait for each piece.
        is_pinned = any(is_accelerator(param.device) for param in parameters(model))
        memory = cls._kept.pop(model, None)
        if memory is None or (memory.nbytes, memory.is_pinned) != (nbytes, is_pinned):
            del memory  # before there is another
            memory = cls(nbytes, is_pinned)
        else:
            memory.use_again()
        cls._kept[model] = memory
        return memory

    def use_again(self) -> None:
        """Begin another save."""


class HostMemory(_MemoryOfModel):
    """Memory for copies of everything."""

    def __init__(self, nbytes: int, is_pinned: bool) -> None:
        super().__init__(nbytes, is_pinned)
        sizes = pinned_sizes(nbytes) if is_pinned else [nbytes]
        self.blocks = [pinned(size) if is_pinned else torch.empty(size, dtype=torch.uint8) for size in sizes]
        """The first `nbytes` bytes are used."""
        self.pages: HugePages | None = None if is_pinned else HugePages(self.blocks)

    def use_again(self) -> None:
        self.pages = None  # they are populated

    def parts(self, start: int, stop: int) -> Iterator[torch.Tensor]:
        """The bytes from `start` to `stop`, in as many parts as there are blocks under them."""
        for block in self.blocks:
            if start < min(stop, block.nbytes):
                yield block[start:stop]
            start, stop = max(0, start - block.nbytes), stop - block.nbytes


class Room(_MemoryOfModel):
    """At most `nbytes` bytes; pieces are made when they are first needed, and used again. One thread at a time."""

    def __init__(self, nbytes: int, is_pinned: bool) -> None:
        super().__init__(nbytes, is_pinned)
        power = max(SMALLEST_BYTES, nbytes // FEWEST).bit_length() - 1  # torch rounds pinned memory up to a power of 2
        self.piece_bytes = min(WRITE_BYTES, 1 << power)
        self._free: list[torch.Tensor] = []
        self._unmade = nbytes // self.piece_bytes

    def take(self, nbytes: int) -> list[torch.Tensor] | None:
        """Memory for `nbytes` bytes, uint8, in parts of :attr:`piece_bytes` at most; None if there is not so much."""
        count = -(-nbytes // self.piece_bytes)
        if count > len(self._free) + self._unmade:
            return None
        while len(self._free) < count:
            self._free.append(self._made())
            self._unmade -= 1
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def give_back(self, parts: list[torch.Tensor]) -> None:
        self._free += parts

    def _made(self) -> torch.Tensor:
        return pinned(self.piece_bytes) if self.is_pinned else torch.empty(self.piece_bytes, dtype=torch.uint8)


def pinned_sizes(nbytes: int) -> list[int]:
    """The blocks that hold `nbytes` of pinned memory: torch would round one block up to a power of two.

    Each is a power of two, the largest first; together they are at most 1/64 larger, or 64 KiB.
    """
    grain = 1 << max(16, nbytes.bit_length() - 7)
    count = -(-nbytes // grain)
    return [grain << bit for bit in reversed(range(count.bit_length())) if count >> bit & 1]


def pinned_parts(sizes: Sequence[int]) -> list[torch.Tensor]:
    """Memory of each of these sizes in bytes, uint8, that lives for long.

    It is pinned, but for the few parts that fit into none of the blocks: these would have to be twice as large.
    """
    aligned = [-(-size // 64) * 64 for size in sizes]
    rooms = [pinned(size) for size in pinned_sizes(sum(aligned))]
    parts = [torch.empty(0, dtype=torch.uint8)] * len(sizes)
    for number in sorted(range(len(sizes)), key=aligned.__getitem__, reverse=True):
        wide = [block for block, room in enumerate(rooms) if len(room) >= aligned[number]]
        if not wide:
            parts[number] = torch.empty(sizes[number], dtype=torch.uint8)
            continue
        block = min(wide, key=lambda block: len(rooms[block]))
        parts[number], rooms[block] = rooms[block][: sizes[number]], rooms[block][aligned[number] :]
    return parts


class HostCopy:
    """A copy of what a plan writes; takes it in as a file would (:data:`.write.Put`), and gives it to files."""

    def __init__(self, memory: HostMemory) -> None:
        self._memory, self._pages = memory, memory.pages
        self._used = 0
        self._pieces: list[tuple[int, int, int, int]] = []  # shard, position there, first byte and last in memory
        self._copied: list[torch.Event] = []
        self._lock = threading.Lock()

    def put(self, shard: int, position: int, pieces: Sequence[torch.Tensor]) -> None:
        """Copy `pieces`, on whatever device; those of a GPU are here after :meth:`wait`."""
        with self._lock:
            start = self._used
            self._used = stop = start + sum(piece.nbytes for piece in pieces)
            self._pieces.append((shard, position, start, stop))
        if self._pages is not None:
            self._pages.populate(self._memory.blocks[0], start, stop - start)
        for piece in pieces:
            flat = piece.detach().reshape(-1).view(torch.uint8)
            for part in self._memory.parts(start, start + flat.numel()):
                part.copy_(flat[: len(part)], non_blocking=self._memory.is_pinned)
                flat = flat[len(part) :]
            start += piece.nbytes
        for device in {piece.device for piece in pieces if is_accelerator(piece.device)}:
            self._copied.append(stream(device).record_event())

    def wait(self) -> None:
        for event in self._copied:
            event.synchronize()
        self._copied.clear()

    def give(self, put: PutBytes, check: Callable[[], None]) -> None:
        """Give `put` everything, in the order of the files; `check` is called in between, and may raise."""
        for shard, position, parts in in_runs(self._parts()):
            check()
            put(shard, position, [*map(bytes_of, parts)])

    def _parts(self) -> Iterator[PlacedValues]:
        for shard, position, start, stop in sorted(self._pieces):
            for part in self._memory.parts(start, stop):
                yield shard, position, part
                position += part.nbytes
