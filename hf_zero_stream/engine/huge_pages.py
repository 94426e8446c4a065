"""Fresh memory in huge pages, while the system has them at hand."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import torch

from ..sources.madvise import HUGE_PAGE_BYTES, MADV_HUGEPAGE, MADV_NOHUGEPAGE, MADV_POPULATE_WRITE, advise


SMALL_PAGES_BYTES_PER_SECOND = 2e9
"""What a thread gets when it touches fresh memory page by page (of 4 KiB); with huge pages at hand, over 1e10."""

CREDIT_SECONDS = 0.03
"""How much longer than small pages huge ones may take before they are given up."""


class HugePages:
    """Populates destinations in huge pages, just before they are written to, while that is faster than in small ones.

    Most of a load from the page cache is the kernel's work for fresh memory: reading 1.7 GB takes 0.75 s into pages of
    4 KiB and 0.25 s into huge ones. What was populated just before is still in the processor's cache when it is
    written to, and while one thread populates another may wait for the disk.

    But where a virtual machine gives its free memory back to its host, the host must first find memory for each huge
    page, and then the same load took 5 s. So pages are timed: what fast pieces gain pays for slow ones, and once
    `CREDIT_SECONDS` are lost, huge pages are not asked for any more. Several threads share the credit, inexactly.

    All of it is advice (``madvise(2)``): before Linux 5.14 or on another system nothing changes.
    """

    def __init__(self, destinations: Sequence[torch.Tensor]) -> None:
        """`destinations` are contiguous; those on devices, and small ones, are left alone."""
        large = [d for d in destinations if d.device.type == "cpu" and d.nbytes >= 2 * HUGE_PAGE_BYTES]
        self._large = large if sys.platform == "linux" else []
        self._credit = CREDIT_SECONDS if self._large else 0.0
        self._advise_all(MADV_HUGEPAGE)

    def populate(self, destination: torch.Tensor, first: int, nbytes: int) -> None:
        """Populate `nbytes` bytes of `destination` from its byte `first` on."""
        if self._credit <= 0 or destination.device.type != "cpu":
            return
        before = time.thread_time()  # time in which other threads run is not the pages'
        advise(destination.data_ptr() + first, nbytes, MADV_POPULATE_WRITE)
        gained = nbytes / SMALL_PAGES_BYTES_PER_SECOND - (time.thread_time() - before)
        self._credit = min(CREDIT_SECONDS, self._credit + gained)
        if self._credit <= 0:
            self._advise_all(MADV_NOHUGEPAGE)

    def _advise_all(self, advice: int) -> None:
        for destination in self._large:
            advise(destination.data_ptr(), destination.nbytes, advice)
