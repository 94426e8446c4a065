"""Puts the page cache into a known state: with all of a checkpoint in it, or nothing."""

import os
from collections.abc import Sequence
from pathlib import Path

from hf_zero_stream.cli import page_cache


def warm(paths: Sequence[Path]) -> str:
    """Read every file once. Returns how the state was reached."""
    page_cache.fill(paths)
    return "read once before"


def cold(paths: Sequence[Path]) -> str:
    """Drop the page cache, or these files from it where that is not permitted. Returns which of them it was."""
    os.sync()  # pages not yet written back cannot be dropped
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1\n")
        return "drop_caches"
    except OSError:
        page_cache.drop(paths)
        return "posix_fadvise"
