"""Puts the page cache into a known state: with all of a checkpoint in it, or nothing."""

import os
from collections.abc import Iterable
from pathlib import Path


CHUNK_BYTES = 8 << 20


def warm(paths: Iterable[Path]) -> str:
    """Read every file once. Returns how the state was reached."""
    buffer = bytearray(CHUNK_BYTES)
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return "read once before"


def cold(paths: Iterable[Path]) -> str:
    """Drop the page cache, or these files from it where that is not permitted. Returns which of them it was."""
    os.sync()  # pages not yet written back cannot be dropped
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1\n")
        return "drop_caches"
    except OSError:
        for path in paths:
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return "posix_fadvise"
