"""Digests of tensors, to which the digests of their parts add up.

A digest is the sum, over elements, of the element's bits times a fixed odd number that belongs to its index, modulo
2**64. The digests of parts add up to that of the parameter, however it was partitioned; a wrong element or order
changes it.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from .file_digests import WORD, odd_factors


BLOCK = 2**16
"""Elements whose factors are looked up in one table; a further factor belongs to the block."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest_of_values(values: torch.Tensor, first: int) -> int:
    """The digest of flat `values`, which begin at element `first` of their parameter; in [0, 2**64)."""
    total = 0
    bits, table = bits_of(values), _table(values.device)
    position, done = first * (len(bits) // max(1, len(values))), 0
    while done < len(bits):
        block, inside = divmod(position + done, BLOCK)
        part = bits[done : done + BLOCK - inside]
        products = part.to(torch.int64) * table[inside : inside + len(part)]
        total += int(products.sum()) * int(odd_factors(np.array([block + 1], dtype=np.uint64))[0])
        done += len(part)
    return total % WORD


def bits_of(values: torch.Tensor) -> torch.Tensor:
    """`values` as integers of their size; those of 16 bytes as two each."""
    return values.detach().view(_INTEGERS.get(values.dtype.itemsize, torch.int64))


@cache
def _table(device: torch.device) -> torch.Tensor:
    """An odd factor for each position in a block, int64."""
    factors = odd_factors(np.arange(1, BLOCK + 1, dtype=np.uint64) << np.uint64(32))
    return torch.from_numpy(factors.view(np.int64)).to(device)
