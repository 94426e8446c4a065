"""Host memory of bounded size for copies of what is not written yet, in pieces of one size."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import nn

from ..accelerators import is_accelerator, pinned
from ..holdings.own_names import parameters
from .write import WRITE_BYTES


FEWEST = 8
"""Pieces, unless these would be smaller than :data:`SMALLEST_BYTES`."""

SMALLEST_BYTES = 2**12

_rooms: WeakKeyDictionary[nn.Module, Room] = WeakKeyDictionary()


class Room:
    """At most `nbytes` bytes; pieces are made when they are first needed, and used again. One thread at a time."""

    def __init__(self, nbytes: int, is_pinned: bool) -> None:
        self.nbytes, self.is_pinned = nbytes, is_pinned
        power = max(SMALLEST_BYTES, nbytes // FEWEST).bit_length() - 1  # torch rounds pinned memory up to a power of 2
        self.piece_bytes = min(WRITE_BYTES, 1 << power)
        self._free: list[torch.Tensor] = []
        self._unmade = nbytes // self.piece_bytes

    @classmethod
    def of_model(cls, model: nn.Module, nbytes: int) -> Room:
        """That of the model's last save, if it has the same size; nobody may use that any more."""
        is_pinned = any(is_accelerator(param.device) for param in parameters(model))
        room = _rooms.pop(model, None)
        if room is None or (room.nbytes, room.is_pinned) != (nbytes, is_pinned):
            del room  # before there is another
            room = cls(nbytes, is_pinned)
        _rooms[model] = room
        return room

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
