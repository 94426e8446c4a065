"""Huge pages, and what Python's mmap module cannot say or ask about memory: ``madvise(2)``, ``mincore(2)``."""

from __future__ import annotations

import ctypes
import mmap
from functools import cache


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
