"""Host memory of large partitions."""

from __future__ import annotations

import ctypes
import mmap
import sys

import torch


__all__ = ["populate"]

# From <linux/mman.h>; Python's mmap module has no names for them.
MADV_HUGEPAGE = 14
MADV_POPULATE_WRITE = 23

HUGE_PAGE_BYTES = 2 * 2**20
SMALLEST_BYTES = 256 * 2**10


def populate(tensor: torch.Tensor) -> None:
    """Give a new host tensor its physical memory now, in huge pages where it is large (``madvise(2)``).

    Reading into fresh memory faults page by page inside the read, which takes several times as long as the copy: for
    1.7 GB from the page cache 0.75 s, against 0.08 s to populate and 0.14 s to read. It is only advice: for a small
    tensor, on a Linux before 5.14 or on another system nothing changes.
    """
    nbytes = tensor.numel() * tensor.element_size()
    if sys.platform != "linux" or nbytes < SMALLEST_BYTES:
        return
    begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (tensor.data_ptr() + nbytes - begin) // mmap.PAGESIZE * mmap.PAGESIZE
    libc = ctypes.CDLL(None, use_errno=True)
    if nbytes >= 2 * HUGE_PAGE_BYTES:
        libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), MADV_HUGEPAGE)
    libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), MADV_POPULATE_WRITE)
