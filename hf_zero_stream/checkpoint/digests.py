"""Digests of files and tensors of which several ranks write, read or hold parts.

A file's digest is the sum of its 64-bit words (little-endian), each times an odd number that belongs to its place,
modulo 2**64. A byte that is not there counts as zero. So the digests of parts add up to that of the file, wherever it
is cut, and a byte that has changed or moved changes it. It is no protection against somebody who means harm. That of a
tensor is made so of its elements' bits.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import CheckpointError, ReadError
from ..ranks.coordinator import Coordinator
from ..settings.config import StreamingConfig


WORD = 2**64
BLOCK = 2**16
"""Words or elements whose factors are in one table; a further factor belongs to the block."""

_READ_BYTES = 8 * 2**20


def odd_factors(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """An odd factor for each number: the output function of splitmix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    state = numbers * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = (state ^ (state >> np.uint64(shift))) * np.uint64(factor)
    return (state ^ (state >> np.uint64(31))) | np.uint64(1)


@cache
def _factors() -> NDArray[np.uint64]:
    """A factor for each position in a block."""
    return odd_factors(np.arange(1, BLOCK + 1, dtype=np.uint64) << np.uint64(32))


def digest_of_bytes(position: int, buffers: Iterable[memoryview | bytes]) -> int:
    """The part of a file's digest that `buffers` have, one after the other, from byte `position` of it on."""
    total = 0
    for buffer in buffers:
        data = memoryview(buffer).cast("B")
        before = min(-position % 8, len(data))
        after = (len(data) - before) % 8
        for start, stop in ((0, before), (len(data) - after, len(data)) if after else (0, 0)):
            if start < stop:
                first = position + start
                total += _of_words(first // 8, np.frombuffer(_padded(data[start:stop], first % 8), dtype=np.uint64))
        total += _of_words((position + before) // 8, np.frombuffer(data[before : len(data) - after], dtype=np.uint64))
        position += len(data)
    return total % WORD


def _padded(data: memoryview, before: int) -> bytes:
    """The word of which `data` are the bytes from byte `before` on."""
    return (bytes(before) + bytes(data)).ljust(8, b"\0")


def _of_words(first: int, words: NDArray[np.uint64]) -> int:
    """The digest of `words`, the first of which is word `first` of its file."""
    total, done = 0, 0
    while done < len(words):
        block, inside = divmod(first + done, BLOCK)
        part = words[done : done + BLOCK - inside]
        in_block = np.dot(part, _factors()[inside : inside + len(part)])
        total += int(in_block) * int(odd_factors(np.array([block + 1], dtype=np.uint64))[0])
        done += len(part)
    return total


def shares_of(sizes: Sequence[int], number: int, readers: int) -> Iterator[tuple[int, int, int]]:
    """The bytes of files of these `sizes` that reader `number` of so many `readers` reads: (file, start, stop)."""
    total = sum(sizes)
    first, last = total * number // readers, total * (number + 1) // readers
    begin = 0
    for file, size in enumerate(sizes):
        start, stop = max(first, begin) - begin, min(last, begin + size) - begin
        if start < stop:
            yield file, start, stop
        begin += size


def digest_of_range(path: str | os.PathLike[str], start: int, stop: int) -> int:
    """The part of the digest of the file at `path` that its bytes ``[start, stop)`` have; raises an OSError."""
    total = 0
    buffer = memoryview(bytearray(min(_READ_BYTES, stop - start)))
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        while start < stop:
            count = file.readinto(buffer[: stop - start])
            if not count:
                raise OSError(f"it ends at byte {start}")
            total += digest_of_bytes(start, [buffer[:count]])
            start += count
    return total % WORD


def recorded(digests: Mapping[str, int], name: str) -> dict[str, str]:
    """Give `digests`, by names in the folder that is saved to, as the record of the state `name` has its own."""
    inside = f"{name}/"
    return {
        file.removeprefix(inside): f"{digest:016x}"
        for file, digest in sorted(digests.items())
        if file.startswith(inside)
    }


def refuse_other_bytes(
    digests: Mapping[str, str], place: Path, config: StreamingConfig, coordinator: Coordinator
) -> None:
    """Raise a CheckpointError, on all ranks, if a file of the state in `place` has other bytes than were written.

    Every byte is read once: by all ranks together, each an equal part, or by those alone that read for others.
    """
    readers, number = coordinator.world_size, coordinator.rank
    if config.read_from != "all" and not coordinator.is_alone:
        first = 0 if config.read_from == "rank0" else coordinator.topology.ranks_of_host[0]
        readers, number = 1, 0 if coordinator.rank == first else 1
    mine: dict[str, int] = {}
    error: Exception | None = None
    try:
        mine = _digests_of_share(digests, place, number, readers) if number < readers else {}
    except Exception as caught:
        error = caught
    of_ranks = coordinator.all_gather(mine, error)
    together = [of_ranks] if readers > 1 else [[of_rank] for of_rank in of_ranks if of_rank]
    for group in together:
        for name, expected in digests.items():
            found = f"{sum(of_rank.get(name, 0) for of_rank in group) % WORD:016x}"
            if found != expected:
                raise CheckpointError(
                    f"{(place / name).resolve()}: expected the bytes that were saved, with the digest {expected}; "
                    f"found the digest {found}. The file was damaged or replaced since: copy it again, or go on from "
                    "an older state."
                )


def _digests_of_share(digests: Mapping[str, str], place: Path, number: int, readers: int) -> dict[str, int]:
    """The digests of the parts of files that reader `number` of so many `readers` reads."""
    found: dict[str, int] = {}
    paths = [place / name for name in digests]
    names = [*digests]
    try:
        sizes = [path.stat().st_size for path in paths]
        for file, start, stop in shares_of(sizes, number, readers):
            found[names[file]] = digest_of_range(paths[file], start, stop)
    except OSError as error:
        raise ReadError(f"{error.filename or place}: cannot be read to compare its digest: {error}") from error
    return found


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
    """:func:`_factors`, as int64."""
    return torch.from_numpy(_factors().view(np.int64)).to(device)
