"""A number for the bytes of a tensor, by which ranks find out whether their replicas of it are the same.

It must cost little beside writing the tensor, wherever that lies: the bytes are taken as 64-bit numbers, in squares
whose rows and columns are summed, and only the sums are hashed. Values that are copied, filled in or drawn at random
give other sums; nobody would make a collision but on purpose.
"""

from __future__ import annotations

import hashlib

import torch


__all__ = ["digest"]

_ROW = 128
"""Numbers in a row."""

_BLOCK = 2**17
"""Numbers that are summed at once on a CPU: they stay in its cache for the second sum."""


def digest(values: torch.Tensor) -> bytes:
    """The same 8 bytes for the same bytes."""
    data = values.detach().contiguous().view(-1).view(torch.uint8)
    tail = data.numel() % (8 * _ROW)
    numbers = data[: data.numel() - tail]
    if numbers.storage_offset() % 8:
        numbers = numbers.clone()
    numbers = numbers.view(torch.int64)
    block = _BLOCK if values.device.type == "cpu" else 2**9 * _BLOCK
    sums = []
    for piece in numbers.split(block) if numbers.numel() else ():
        square = piece.view(-1, _ROW)
        sums += [square.sum(1), square.sum(0)]
    state = hashlib.blake2b(f"{values.dtype} {values.numel()}".encode(), digest_size=8)
    for part in ([torch.cat(sums)] if sums else []) + [data[data.numel() - tail :]]:
        state.update(part.cpu().numpy().tobytes())
    return state.digest()
