"""What Linux is told and asked of pages: how much memory is free, files in the page cache, memory that will be filled.

Free is what the machine and the containers that this process is in have. A thread brings a checkpoint into the page
cache in time.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import psutil

from .local import open_nonblocking


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


WINDOW_BYTES = 16 * 2**20
LEAD_BYTES = 4 * 2**30
"""Most that is brought in before it is read; less where free memory is short and might drop it before its use."""


class ReadAhead:
    """A thread that brings its share of a checkpoint into the page cache, in file order; each rank of a host has one.

    It is for loads in which the ranks of this host together need each byte of the files, so it can begin before there
    is a plan. The thread maps, populates and unmaps windows: nothing is copied. Linux caches what is populated with
    ``MADV_HUGEPAGE`` in pages of 2 MiB where the file system can (``do_sync_mmap_readahead`` in mm/filemap.c); what
    ``preadv`` or ``POSIX_FADV_WILLNEED`` reads, in pages of 4 KiB at first, which is slower.

    An error here (a file cut short, a system without ``MADV_POPULATE_READ``) ends the thread and is ignored: the read
    itself will raise. `paths` come in the order in which they will be read; this rank takes every `shares`-th window,
    from number `share` on.
    """

    def __init__(self, paths: Sequence[str], share: int, shares: int) -> None:
        self._files = [(path, os.path.getsize(path)) for path in paths]
        self._share, self._shares = share, shares
        self.total_bytes = sum(size for _, size in self._files)
        self._lead = min(LEAD_BYTES, free_memory() // 4)
        self._reached = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hf_zero_stream-ahead", daemon=True)
        self._thread.start()

    def set_progress(self, part: float) -> None:
        """Note how far the reads have come, in [0, 1]; called after each read."""
        self._reached = int(part * self.total_bytes)

    def stop(self) -> None:
        """End the thread, after the window that it is at. May be called again."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        for path, begin, nbytes, position in islice(self._windows(), self._share, None, self._shares):
            while position - self._reached > self._lead:
                if self._stopped.wait(0.01):
                    return
            if self._stopped.is_set() or not populate(path, begin, nbytes):
                return

    def _windows(self) -> Iterator[tuple[str, int, int, int]]:
        """Yield all windows: file, start in it, size, and start in all files laid end to end."""
        before = 0
        for path, size in self._files:
            for begin in range(0, size, WINDOW_BYTES):
                yield path, begin, min(WINDOW_BYTES, size - begin), before + begin
            before += size


def populate(path: str, begin: int, nbytes: int) -> bool:
    """Bring these bytes of a file into the page cache; False if the system takes no such advice, or cannot read."""
    with suppress(OSError, ValueError), _window(path, begin, nbytes) as (handle, address, length):
        if _can_query_page_cache(handle) and is_resident(address, length):
            return True  # mapping what is cached takes the time of a processor, and another thread wants it
        advise(address, length, MADV_HUGEPAGE)
        return advise(address, length, MADV_POPULATE_READ)
    return False


def keeps_cached(path: str, begin: int, nbytes: int) -> bool:
    """Whether these bytes of a file, which were brought into the page cache, are there for one that opens it anew.

    False, too, where Linux tells this process nothing of the file's pages.
    """
    with suppress(OSError, ValueError), _window(path, begin, nbytes) as (handle, address, length):
        return _can_query_page_cache(handle) and is_resident(address, length)
    return False


@contextmanager
def _window(path: str, begin: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
    """Open and map these bytes of a file, from the beginning of a page on: its handle, their address and number."""
    start = begin // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    length = begin + nbytes - start
    # Private and writable, because ctypes gives the address of nothing else. Nothing is written.
    access = mmap.PROT_READ | mmap.PROT_WRITE
    with (
        open(path, "rb", buffering=0, opener=open_nonblocking) as file,
        mmap.mmap(file.fileno(), length, mmap.MAP_PRIVATE, access, offset=start) as window,
    ):
        yield file.fileno(), ctypes.addressof(ctypes.c_char.from_buffer(window)), length


def _can_query_page_cache(handle: int) -> bool:
    """Whether Linux tells this process which pages of the file are cached (``can_do_mincore`` in mm/mincore.c)."""
    return os.geteuid() in (0, os.fstat(handle).st_uid) or os.access(f"/proc/self/fd/{handle}", os.W_OK)


HUGE_PAGE_BYTES = 2 * 2**20

# From <linux/mman.h>; the last two since Linux 5.14.
MADV_HUGEPAGE = 14
MADV_NOHUGEPAGE = 15
MADV_POPULATE_READ = 22
MADV_POPULATE_WRITE = 23


def advise(address: int, nbytes: int, advice: int) -> bool:
    """Call ``madvise`` for the pages of these bytes, without the GIL; whether the system took the advice."""
    begin = address // mmap.PAGESIZE * mmap.PAGESIZE
    length = ctypes.c_size_t(address + nbytes - begin)
    return bool(_c_library().madvise(ctypes.c_void_p(begin), length, advice) == 0)


def is_resident(address: int, nbytes: int) -> bool:
    """Whether all pages of these bytes, from the beginning of a page on, are in memory: of a file, in the page cache.

    For files that this process neither owns nor may write to, Linux's answer is meaningless.
    """
    pages = (ctypes.c_ubyte * -(-nbytes // mmap.PAGESIZE))()
    if _c_library().mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), pages):
        return False
    return bytes(pages).count(1) == len(pages)


def fill_cache(paths: Iterable[str | os.PathLike[str]]) -> None:
    """Bring these files into the page cache: read each once."""
    for path in paths:
        with open(path, "rb") as file, open(os.devnull, "wb") as nowhere:
            shutil.copyfileobj(file, nowhere, 8 << 20)


def drop_from_cache(paths: Iterable[str | os.PathLike[str]]) -> None:
    """Drop these files from the page cache."""
    os.sync()  # what is not written yet cannot be dropped
    for path in paths:
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@cache
def _c_library() -> ctypes.CDLL:
    return ctypes.CDLL(None)
