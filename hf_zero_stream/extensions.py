"""Locks in torch's folder of compiled extensions, for which a process waits without end if their owner was killed."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from .errors import PACKAGE
from .settings.config import announced_local_rank


logger = logging.getLogger(PACKAGE)


def holder_of(lock: str | os.PathLike[str]) -> int | None:
    """The process of this machine that has the file open, as torch has while it compiles; None if there is none."""
    wanted = os.path.realpath(lock)
    for process in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # it has ended, or is somebody else's
            for entry in os.scandir(f"/proc/{process}/fd"):
                with suppress(OSError):
                    if os.readlink(entry.path) == wanted:
                        return int(process)
    return None


def left_locks() -> Iterator[Path]:
    """Locks that no process of this machine holds."""
    from torch.utils import cpp_extension

    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root())
    for lock in sorted([*root.glob("*/lock"), *root.glob("*/*/lock")]):  # the default has a folder for each Python
        if holder_of(lock) is None and lock.exists():
            yield lock


def advice_on(lock: str | os.PathLike[str]) -> str:
    """What a lock that nobody holds means."""
    return (
        f"no process of this machine holds {lock}: most likely one that compiled {Path(lock).parent.name} was killed. "
        f"Whatever needs that extension waits for ever. If no other machine compiles there, remove it: rm {lock}"
    )


def wait(original: Callable[..., Any], baton: Any, *args: Any, **kwargs: Any) -> Any:
    """In place of the wait for another process that compiles an extension."""
    lock = baton.lock_file_path
    if announced_local_rank() == 0 and os.path.exists(lock):
        process = holder_of(lock)
        if process is None:
            logger.warning("This process waits for a lock, and %s", advice_on(lock))
        else:
            name = Path(lock).parent.name
            logger.warning("Waiting for process %d, which compiles %s: that takes minutes, once.", process, name)
    return original(baton, *args, **kwargs)
