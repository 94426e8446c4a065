"""Bringing files into the page cache, and dropping them from it."""

from __future__ import annotations

import os
from collections.abc import Iterable


__all__ = ["drop", "fill"]

_CHUNK_BYTES = 8 * 2**20


def fill(paths: Iterable[str | os.PathLike[str]]) -> None:
    """Read every file once."""
    buffer = bytearray(_CHUNK_BYTES)
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def drop(paths: Iterable[str | os.PathLike[str]]) -> None:
    """Drop these files from the page cache."""
    os.sync()  # what is not written yet cannot be dropped
    for path in paths:
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
