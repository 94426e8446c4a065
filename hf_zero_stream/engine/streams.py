"""How many threads of a rank read at once, and how much each asks for."""

from __future__ import annotations

import os

from ..sources.base import Hints


__all__ = ["choose_request_bytes", "choose_threads"]


def choose_request_bytes(wanted: int, staging_bytes: int, hints: Hints) -> int:
    """`wanted`, or if that is 0 what suits the source, within the staging bound."""
    return wanted or min(staging_bytes, hints.request_bytes)


def choose_threads(wanted: int, buffers: int, ranks_on_host: int, hints: Hints) -> int:
    """`wanted`, or if that is 0 by the source; in any case no more than `buffers`, which all have one.

    From a local disk: the rank's share of the host's cores; at least 4, so that the disk has several requests at hand
    while one copies or has fresh memory made; at most 8, because copies out of the page cache are bound by memory
    bandwidth.
    From another machine: the rank's share of the streams that use all of the bandwidth, at least 4, whatever the
    cores: they wait.
    """
    ranks_on_host = max(1, ranks_on_host)
    if not wanted and hints.is_remote:
        wanted = min(hints.streams_per_rank, max(4, hints.streams_per_host // ranks_on_host))
    elif not wanted:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        wanted = min(8, max(4, cores // ranks_on_host))
    return max(1, min(wanted, buffers))
