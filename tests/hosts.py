"""Ranks of one machine as if on several hosts."""

from __future__ import annotations

import ctypes
import os
import socket


__all__ = ["move_to_host"]

_CLONE_NEWUTS = 0x04000000


def move_to_host(name: str) -> None:
    """Give this process a host name of its own: by the kernel where it may, else to Python alone.

    Must be called before the rank makes contact with others.
    """
    if os.geteuid() == 0 and ctypes.CDLL(None).unshare(_CLONE_NEWUTS) == 0:
        socket.sethostname(name)
    else:
        socket.gethostname = lambda: name  # type: ignore[misc]
