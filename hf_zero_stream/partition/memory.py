"""Host memory of large partitions."""

from __future__ import annotations

import ctypes
import mmap
import sys
import time

import torch


__all__ = ["Populator"]

# From <linux/mman.h>; Python's mmap module has no names for them.
MADV_HUGEPAGE = 14
MADV_NOHUGEPAGE = 15
MADV_POPULATE_WRITE = 23

SMALLEST_BYTES = 256 * 2**10
STEP_BYTES = 4 * 2**20
SMALL_PAGES_BYTES_PER_SECOND = 3e9
"""What populating in pages of 4 KiB gives; with huge pages at hand it is about 1e10."""

CREDIT_SECONDS = 0.03
"""How much longer than small pages huge ones may take before they are given up."""


class Populator:
    """Gives new host tensors their physical memory before they are read into, in huge pages where that is faster.

    Reading into fresh memory faults page by page inside the read, which takes several times as long as the copy. For
    1.7 GB from the page cache: 0.75 s so; 0.5 s to populate and 0.14 s to read with pages of 4 KiB; 0.1 s and 0.14 s
    with huge pages. But where a virtual machine has given its free memory back to its host, the host must first find
    memory for each huge page, and populating took up to 3.8 s. So it is timed: what fast steps gain pays for slow
    ones, and once `CREDIT_SECONDS` are lost, huge pages are not asked for any more.
    """

    def __init__(self) -> None:
        self._credit = CREDIT_SECONDS

    def populate(self, tensor: torch.Tensor) -> None:
        """Populate `tensor`; only advice (``madvise(2)``): before Linux 5.14 or on another system nothing changes."""
        nbytes = tensor.numel() * tensor.element_size()
        if sys.platform != "linux" or nbytes < SMALLEST_BYTES:
            return
        begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (tensor.data_ptr() + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if self._credit > 0 and end - begin >= STEP_BYTES:
            begin = self._populate_huge(begin, end)
        _advise(begin, end, MADV_POPULATE_WRITE)

    def _populate_huge(self, begin: int, end: int) -> int:
        """Populate in steps until the credit is used up; returns where it stopped."""
        _advise(begin, end, MADV_HUGEPAGE)
        while begin < end and self._credit > 0:
            stop = min(end, begin + STEP_BYTES)
            before = time.perf_counter()
            _advise(begin, stop, MADV_POPULATE_WRITE)
            gained = (stop - begin) / SMALL_PAGES_BYTES_PER_SECOND - (time.perf_counter() - before)
            self._credit = min(CREDIT_SECONDS, self._credit + gained)
            begin = stop
        _advise(begin, end, MADV_NOHUGEPAGE)
        return begin


def _advise(begin: int, end: int, advice: int) -> None:
    if begin < end:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), advice)
