"""Locks in torch's folder of compiled extensions, for which a process waits without end if their owner was killed."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


_RELEASE_S = 0.2
"""More than torch takes from closing a lock to removing it."""


def lock_owner(lock: str | os.PathLike[str]) -> int | None:
    """The process of this machine that has the file open, as torch has while it compiles; None if there is none."""
    wanted = os.path.realpath(lock)
    for process in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # it has ended, or is somebody else's
            for entry in os.scandir(f"/proc/{process}/fd"):
                with suppress(OSError):
                    if os.readlink(entry.path) == wanted:
                        return int(process)
    return None


def stale_locks() -> Iterator[Path]:
    """Locks that no process of this machine holds."""
    from torch.utils import cpp_extension

    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root())
    for lock in sorted([*root.glob("*/lock"), *root.glob("*/*/lock")]):  # the default has a folder for each Python
        if _is_stale(lock):
            yield lock


def _is_stale(lock: str | os.PathLike[str]) -> bool:
    """Whether nobody of this machine holds the lock.

    Two looks, at the same file: torch closes it a moment before it removes it, and another process may be next.
    """
    with suppress(FileNotFoundError):
        seen = os.stat(lock)
        for pause in (_RELEASE_S, 0):
            if lock_owner(lock) is not None:
                return False
            time.sleep(pause)
        now = os.stat(lock)
        return (seen.st_ino, seen.st_ctime_ns) == (now.st_ino, now.st_ctime_ns)
    return False


def stale_lock_advice(lock: str | os.PathLike[str]) -> str:
    """Say what a lock that nobody holds means, and what to do."""
    return (
        f"no process of this machine holds {lock}: most likely one that compiled {Path(lock).parent.name} was killed. "
        f"Whatever needs that extension waits for ever. If no other machine compiles there, remove it: rm {lock}"
    )
