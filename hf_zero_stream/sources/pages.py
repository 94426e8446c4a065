"""Pages of memory: what Linux is told of them, and a thread that brings a checkpoint into the page cache in time."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from itertools import islice

import psutil

from .local import open_nonblocking


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
        self._lead = min(LEAD_BYTES, psutil.virtual_memory().available // 4)
        self._reached = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hf_zero_stream-ahead", daemon=True)
        self._thread.start()

    def reached(self, part: float) -> None:
        """Called after each read: the reads have come this far, in [0, 1]."""
        self._reached = int(part * self.total_bytes)

    def stop(self) -> None:
        """End the thread, after the window that it is at. May be called again."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        with suppress(OSError, ValueError):
            for path, begin, nbytes, position in islice(self._windows(), self._share, None, self._shares):
                while position - self._reached > self._lead:
                    if self._stopped.wait(0.01):
                        return
                if self._stopped.is_set() or not _populate(path, begin, nbytes):
                    return

    def _windows(self) -> Iterator[tuple[str, int, int, int]]:
        """All windows: the file, where they begin in it, their size, and where they begin in all files."""
        before = 0
        for path, size in self._files:
            for begin in range(0, size, WINDOW_BYTES):
                yield path, begin, min(WINDOW_BYTES, size - begin), before + begin
            before += size


def _populate(path: str, begin: int, nbytes: int) -> bool:
    """Bring these bytes of a file into the page cache; whether the system took the advice."""
    # Private and writable, because ctypes gives the address of nothing else. Nothing is written.
    access = mmap.PROT_READ | mmap.PROT_WRITE
    with (
        open(path, "rb", buffering=0, opener=open_nonblocking) as file,
        mmap.mmap(file.fileno(), nbytes, mmap.MAP_PRIVATE, access, offset=begin) as window,
    ):
        address = ctypes.addressof(ctypes.c_char.from_buffer(window))
        if _may_ask(file.fileno()) and is_resident(address, nbytes):
            return True  # mapping what is cached takes the time of a processor, and another thread wants it
        advise(address, nbytes, MADV_HUGEPAGE)
        return advise(address, nbytes, MADV_POPULATE_READ)


def _may_ask(handle: int) -> bool:
    """Whether Linux tells this process which pages of the file are cached (``can_do_mincore`` in mm/mincore.c)."""
    return os.geteuid() in (0, os.fstat(handle).st_uid)


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

    Of a file that this process neither owns nor may write to, Linux says so whether or not it is true.
    """
    pages = (ctypes.c_ubyte * -(-nbytes // mmap.PAGESIZE))()
    if _c_library().mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), pages):
        return False
    return bytes(pages).count(1) == len(pages)


@cache
def _c_library() -> ctypes.CDLL:
    return ctypes.CDLL(None)
