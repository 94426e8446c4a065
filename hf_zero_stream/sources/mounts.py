"""Whether a checkpoint lies on a disk of this host or on another machine, which wants more streams."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import psutil


__all__ = ["is_on_network", "kind_of_file_system"]

NETWORK_FILE_SYSTEMS = frozenset(
    "9p afs beegfs ceph cifs daos glusterfs gpfs lustre ncpfs nfs nfs4 ocfs2 orangefs panfs pvfs2 smb2 smb3 smbfs "
    "virtiofs wekafs".split()
)
"""File systems whose data comes from another machine (or the host of a virtual one), as the kernel names them.

Those that begin with ``fuse.`` count too: s3fs, gcsfuse and juicefs do. overlayfs and the like count as local.
"""


def kind_of_file_system(path: str, mounts: Iterable[Sequence[str]] | None = None) -> str:
    """The type of the file system that `path` lies on, such as ``"ext4"`` or ``"lustre"``; ``""`` if not known.

    `mounts` has (mount point, type) of each file system; default: those of this host.
    """
    if mounts is None:
        mounts = [(mount.mountpoint, mount.fstype) for mount in psutil.disk_partitions(all=True)]
    path = os.path.realpath(path)  # the hub's cache is made of links
    # Of two at one mount point the later one hides the earlier.
    above = [mount for mount in mounts if os.path.commonpath([path, mount[0]]) == mount[0]]
    return max(reversed(above), key=lambda mount: len(mount[0]), default=("", ""))[1]


def is_on_network(path: str, mounts: Iterable[Sequence[str]] | None = None) -> bool:
    """Whether reading `path` waits for another machine."""
    kind = kind_of_file_system(path, mounts)
    return kind in NETWORK_FILE_SYSTEMS or kind.startswith("fuse.")
