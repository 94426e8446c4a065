"""Host memory for copies of what a rank is going to write, which saves of one training use again."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ..accelerators import is_accelerator, pinned
from ..engine.execute import HugePages
from ..holdings.own_names import parameters
from .write import WRITE_BYTES


FEWEST = 8
"""Pieces of a :class:`Room`, unless these would be smaller than :data:`SMALLEST_BYTES`."""

SMALLEST_BYTES = 2**12


class Room:
    """At most `nbytes` bytes for the saves of one model's training; pieces of it are used again, also in parts.

    One thread at a time takes and gives back.
    """

    def __init__(self, nbytes: int, is_pinned: bool) -> None:
        self.nbytes, self.is_pinned = nbytes, is_pinned
        power = max(SMALLEST_BYTES, nbytes // FEWEST).bit_length() - 1  # torch rounds pinned memory up to a power of 2
        self.piece_bytes = min(WRITE_BYTES, 1 << power)
        count, rest = divmod(nbytes, self.piece_bytes)
        self._unmade = [*pinned_sizes(rest), *[self.piece_bytes] * count] if is_pinned else []
        """The sizes of pinned pieces, the next one last."""
        # The system gives other memory when it is first written to.
        self._block = torch.empty(0 if is_pinned else nbytes, dtype=torch.uint8)
        self._pages: HugePages | None = HugePages([self._block])
        self._made = [piece for piece in reversed(self._block.split(self.piece_bytes)) if len(piece)]
        self._free, self._left = [*self._made], nbytes

    @classmethod
    def of_model(cls, model: nn.Module, nbytes: int) -> Room:
        """That of the model's last save, if it has the same size; nobody may use that any more."""
        # A GPU copies into pages that the system cannot move several times as fast.
        is_pinned = any(is_accelerator(param.device) for param in parameters(model))
        room = _rooms.pop(model, None)
        if room is None or (room.nbytes, room.is_pinned) != (nbytes, is_pinned):
            del room  # before there is another
            room = cls(nbytes, is_pinned)
        else:
            room._free, room._left, room._pages = [*room._made], nbytes, None  # they are populated
        _rooms[model] = room
        return room

    @classmethod
    def kept_bytes(cls, model: nn.Module) -> int:
        """What the model's last save has left for the next one."""
        return _rooms[model].nbytes if model in _rooms else 0

    def take(self, nbytes: int) -> list[torch.Tensor] | None:
        """Memory for `nbytes` bytes, uint8, in parts of :attr:`piece_bytes` at most; None if there is not so much."""
        if nbytes > self._left:
            return None
        self._left -= nbytes
        taken = []
        while nbytes:
            piece = self._free.pop() if self._free else self._new()
            taken.append(piece[:nbytes])
            if len(piece) > nbytes:
                self._free.append(piece[nbytes:])
            nbytes -= len(taken[-1])
        return taken

    def give_back(self, parts: Sequence[torch.Tensor]) -> None:
        self._free += parts
        self._left += sum(map(len, parts))

    def _new(self) -> torch.Tensor:
        self._made.append(pinned(self._unmade.pop()))
        return self._made[-1]

    def populate(self, part: torch.Tensor) -> None:
        """Have the system give what is taken its pages, if that is faster before it is written to; any thread."""
        if self._pages is not None:
            self._pages.populate(self._block, part.data_ptr() - self._block.data_ptr(), len(part))


_rooms: WeakKeyDictionary[nn.Module, Room] = WeakKeyDictionary()


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
