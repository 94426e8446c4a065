"""How much memory of the host is free for this process: of the machine, and of the containers that it is in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil


_PROCESS = Path("/proc/self")


class _GroupFiles(NamedTuple):
    """The files of a control group, and what of its memory Linux takes back before it kills: pages of files."""

    limit: str
    used: str
    taken_back: tuple[str, ...]


_OF_VERSION = {
    "cgroup2": _GroupFiles("memory.max", "memory.current", ("inactive_file", "active_file")),
    "cgroup": _GroupFiles(
        "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")
    ),
}


def free_memory() -> int:
    """The bytes that this process can still take: those that the machine has, or a container's limit leaves.

    A control group (of a container, a job of Slurm, a service) is charged for files in ``/dev/shm`` and for cached
    pages as for any memory, and its processes are killed when it is full.
    """
    return min([psutil.virtual_memory().available, *_room_in_groups()])


def _room_in_groups() -> Iterator[int]:
    """What is left in each control group around this process that limits memory; of version 1 and 2."""
    with suppress(OSError, ValueError):
        mounts = [line.split() for line in (_PROCESS / "mountinfo").read_text().splitlines()]
        paths = [line.split(":", 2) for line in (_PROCESS / "cgroup").read_text().splitlines()]
        for fields in mounts:
            kind, _, options = fields[fields.index("-") + 1 :][:3]
            if kind not in _OF_VERSION or (kind == "cgroup" and "memory" not in options.split(",")):
                continue
            controller = "memory" if kind == "cgroup" else ""
            for path in (path for _, controllers, path in paths if controller in controllers.split(",")):
                yield from _room_above(Path(fields[4]), fields[3], path, _OF_VERSION[kind])


def _room_above(mount: Path, root: str, path: str, names: _GroupFiles) -> Iterator[int]:
    """What is left in the group at `path`, and in those that it is in, of a tree that is mounted from `root` on.

    In a container `path` may lie outside of what it sees: its own group is at the mount then.
    """
    inside = path.removeprefix(root.rstrip("/")).strip("/") if path.startswith(root) else ""
    place = mount / inside if ".." not in inside and (mount / inside).is_dir() else mount
    while place.is_relative_to(mount):
        with suppress(OSError, ValueError):  # the root has no limit, or it is "max"
            room = int((place / names.limit).read_text()) - int((place / names.used).read_text())
            lines = (line.split() for line in (place / "memory.stat").read_text().splitlines())
            yield max(0, room + sum(int(value) for name, value in lines if name in names.taken_back))
        place = place.parent
