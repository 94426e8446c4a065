"""How many threads of a rank read at once, and how much each asks for."""

from __future__ import annotations

import os


__all__ = ["choose_request_bytes", "choose_threads"]

MIB = 2**20
STREAMS_PER_HOST = 32
"""Lustre gives an H100 node 2.0 GiB/s for one stream and 8.5 GiB/s for 32 (transformers #48227)."""


def choose_request_bytes(wanted: int, staging_bytes: int, on_network: bool, direct_io: bool = False) -> int:
    """`wanted`, or if that is 0 by the storage, within the staging bound.

    2 MiB from a local disk: while they are copied, the system reads ahead. 8 MiB past the page cache, where nothing
    does. 4 MiB over a network.
    """
    return wanted or min(staging_bytes, (4 if on_network else 8 if direct_io else 2) * MIB)


def choose_threads(wanted: int, buffers: int, ranks_on_host: int, on_network: bool) -> int:
    """`wanted`, or if that is 0 by the storage; in any case no more than `buffers`, which all have one.

    From a local disk: the rank's share of the host's cores; at least 4, so that the disk has several requests at hand
    while one copies or has fresh memory made; at most 8, because copies out of the page cache are bound by memory
    bandwidth.
    Over a network: the rank's share of `STREAMS_PER_HOST`, at least 4 and at most 16, whatever the cores: they wait.
    """
    ranks_on_host = max(1, ranks_on_host)
    if not wanted and on_network:
        wanted = min(16, max(4, STREAMS_PER_HOST // ranks_on_host))
    elif not wanted:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        wanted = min(8, max(4, cores // ranks_on_host))
    return max(1, min(wanted, buffers))
