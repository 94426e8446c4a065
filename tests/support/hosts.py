"""Ranks of one machine as if on several hosts: with a host name, or with a disk, of their own."""

import ctypes
import os
import socket
import subprocess
from pathlib import Path


_CLONE_NEWNS = 0x00020000
_CLONE_NEWUTS = 0x04000000


def move_to_host(name: str) -> None:
    """Give this process a host name of its own: by the kernel where it may, else to Python alone.

    Must be called before the rank makes contact with others.
    """
    if os.geteuid() == 0 and ctypes.CDLL(None).unshare(_CLONE_NEWUTS) == 0:
        socket.sethostname(name)
    else:
        socket.gethostname = lambda: name  # type: ignore[misc]


def can_mount() -> bool:
    """Whether this process may mount in a namespace of its own, which asks for root in most containers."""
    return subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode == 0


def give_own_disk(folder: Path) -> None:
    """Put an empty file system over `folder` that only this process and its children see."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], check=True)
