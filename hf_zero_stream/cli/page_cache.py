"""What of files is in the page cache: all, or nothing."""

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
    """Have the system let go of these files' pages."""
    os.sync()  # what is not written yet cannot be dropped
    for path in paths:
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
