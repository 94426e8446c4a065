"""Copies of what ranks wrote into the folder of their host, in the folders of other hosts, over the process group.

In a round each rank sends a part of its piece to one rank of another host, so that none holds more than
:data:`ROUND_BYTES` for each rank that sends to it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from ...errors import PeerError, SaveError
from ...plugin_api import WORD, Coordinator, digest_of_bytes
from .folders import Hosts


ROUND_BYTES = 8 * 2**20


def targets_of(hosts: Hosts, distance: int) -> dict[int, int]:
    """The rank that keeps a copy of each rank's piece, on the host `distance` hosts further on."""
    found: dict[int, int] = {}
    for number, ranks in enumerate(hosts.ranks):
        others = hosts.ranks[(number + distance) % len(hosts.ranks)]
        found |= {rank: others[position % len(others)] for position, rank in enumerate(ranks)}
    return found


def holders_of(hosts: Hosts, copies: int) -> list[list[int]]:
    """The hosts that have the piece of each rank: its own, and those with copies."""
    count = sum(map(len, hosts.ranks))
    return [[(hosts.host_of(rank) + each) % len(hosts.ranks) for each in range(copies + 1)] for rank in range(count)]


def copy_pieces(
    coordinator: Coordinator,
    hosts: Hosts,
    copies: int,
    sizes: Sequence[int],
    digests: Sequence[int],
    path_of: Callable[[int], Path],
) -> None:
    """Write the copies of all ranks' pieces, of these sizes in bytes, and with these digests (all ranks).

    `path_of` a rank's piece is a file of full size, on every host that is to have it.

    Raises:
        SaveError: on all ranks: a file cannot be read or written, or other bytes have arrived than were sent.
    """
    for distance in range(1, copies + 1):
        _copy_once(coordinator, targets_of(hosts, distance), sizes, digests, path_of)


def _copy_once(
    coordinator: Coordinator,
    targets: dict[int, int],
    sizes: Sequence[int],
    digests: Sequence[int],
    path_of: Callable[[int], Path],
) -> None:
    rank, device = coordinator.rank, coordinator.device
    sources = [source for source, target in targets.items() if target == rank]
    found, handles = dict.fromkeys(sources, 0), dict[int, int]()
    error: BaseException | None = None

    def part_of(source: int, begin: int) -> int:
        return max(0, min(ROUND_BYTES, sizes[source] - begin))

    try:
        for begin in range(0, max(sizes), ROUND_BYTES):
            sent, expected = [0] * coordinator.world_size, [0] * coordinator.world_size
            sent[targets[rank]] = part_of(rank, begin)
            for source in sources:
                expected[source] = part_of(source, begin)
            with coordinator.indispensable("memory for copies"):
                outgoing = torch.zeros(sum(sent), dtype=torch.uint8)
            try:
                if len(outgoing):
                    _read(handles, rank, path_of(rank), begin, memoryview(outgoing.numpy()))
            except OSError as caught:  # the others wait for this rank in the rounds to come
                error = error or caught
            with coordinator.indispensable("memory for copies"):
                leaving, arriving = outgoing.to(device), torch.empty(sum(expected), dtype=torch.uint8, device=device)
            coordinator.run(dist.all_to_all_single, arriving, leaving, expected, sent)
            try:
                for source, part in zip(sources, arriving.cpu().split([expected[it] for it in sources]), strict=True):
                    data = memoryview(part.numpy())
                    found[source] = (found[source] + digest_of_bytes(begin, [data])) % WORD
                    _write(handles, source, path_of(source), begin, data)
            except OSError as caught:
                error = error or caught
        for source in sources:
            if source in handles:
                os.fsync(handles[source])
            if error is None and found[source] != digests[source]:
                error = SaveError(
                    f"{path_of(source)}: other bytes have arrived than rank {source} wrote (digest "
                    f"{found[source]:016x}, expected {digests[source]:016x}). Look into the memory and the network of "
                    "both hosts. What was there before has not been touched."
                )
    except PeerError:
        raise  # no round will come to an end any more
    except OSError as caught:
        error = error or caught
    finally:
        for handle in handles.values():
            os.close(handle)
    if isinstance(error, OSError) and not isinstance(error, SaveError):
        cause, where = error, error.filename or path_of(rank).parent
        error = SaveError(f"{where}: cannot copy pieces between hosts: {cause.strerror or cause}.")
        error.__cause__ = cause
    coordinator.agree(error)


def _opened(handles: dict[int, int], source: int, path: Path, flags: int) -> int:
    if source not in handles:
        handles[source] = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)
    return handles[source]


def _read(handles: dict[int, int], source: int, path: Path, position: int, buffer: memoryview) -> None:
    handle = _opened(handles, source, path, os.O_RDONLY)
    while len(buffer):
        count = os.preadv(handle, [buffer], position)
        if not count:
            raise OSError(f"{path}: ends at byte {position}")
        buffer, position = buffer[count:], position + count


def _write(handles: dict[int, int], source: int, path: Path, position: int, data: memoryview) -> None:
    handle = _opened(handles, source, path, os.O_WRONLY)
    while len(data):
        count = os.pwritev(handle, [data], position)
        data, position = data[count:], position + count
