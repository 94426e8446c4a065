"""Ranks of one machine on several hosts at once, each host with a name and a folder of its own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from tests.support.hosts import move_to_host


__all__ = ["folder_of_host", "join_host"]


def join_host(hosts: Sequence[str], disks: Path, folder: Path) -> None:
    """Move this rank to its host, and put the host's folder below `disks` in the place of `folder` for it alone.

    Ranks of one host see the same folder, those of others do not.
    """
    name = hosts[dist.get_rank()]
    move_to_host(name)
    mount_over(folder, folder_of_host(disks, name))


def folder_of_host(disks: Path, name: str) -> Path:
    """What the host `name` has below `disks`."""
    found = disks / name
    found.mkdir(parents=True, exist_ok=True)
    return found


def mount_over(folder: Path, disk: Path) -> None:
    """Have this process and its children see `disk` in the place of `folder`."""
    import ctypes
    import subprocess

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x00020000):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "--bind", disk, folder], check=True)
