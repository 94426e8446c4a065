"""A digest of a tensor's bytes, by which ranks find out whether their replicas of it are the same.

It must take much less time than writing the tensor, on CPU and GPU. The bytes are taken as 64-bit numbers, in rows.
Each row becomes a sum with odd, random weights for the lower and the upper half of each number, modulo 2**64
(multilinear hashing: Lemire and Kaser, "Strongly universal string hashing is fast", 2014). Only these sums are hashed.
Rows that change places, signs that flip or single values that differ give other sums, but for one chance in billions.
"""

from __future__ import annotations

import functools
import hashlib

import torch


__all__ = ["digest"]

_ROW = 128  # numbers in a row
_BLOCK = 2**16  # numbers that are summed at once on a CPU: they stay in its cache from one step to the next


def digest(values: torch.Tensor) -> bytes:
    """The same 8 bytes for the same bytes."""
    data = values.detach().contiguous().view(-1).view(torch.uint8)
    tail = data.numel() % (8 * _ROW)
    numbers = data[: data.numel() - tail]
    if numbers.storage_offset() % 8 or numbers.data_ptr() % 8:
        numbers = numbers.clone()
    lower, upper = _weights(str(numbers.device))
    sums = []
    block = _BLOCK if values.device.type == "cpu" else 2**6 * _BLOCK
    for rows in numbers.view(torch.int64).view(-1, _ROW).split(block // _ROW) if numbers.numel() else ():
        sums.append((rows * lower).addcmul_(rows >> 32, upper).sum(1))
    state = hashlib.blake2b(f"{values.dtype} {values.numel()}".encode(), digest_size=8)
    for part in ([torch.cat(sums)] if sums else []) + [data[data.numel() - tail :]]:
        state.update(part.cpu().numpy().tobytes())
    return state.digest()


@functools.cache
def _weights(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The same on all ranks and devices."""
    generator = torch.Generator().manual_seed(2014)
    bounds = torch.iinfo(torch.int64)
    drawn = torch.randint(bounds.min, bounds.max, (2, _ROW), generator=generator, dtype=torch.int64) | 1
    lower, upper = drawn.to(device)
    return lower, upper
