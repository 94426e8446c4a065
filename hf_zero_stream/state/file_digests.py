"""Digests of the files of a training state: recorded when it is saved, compared when a training goes on from it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..checkpoint.file_digests import WORD, digest_of_range, shares_of
from ..errors import CheckpointError, ReadError
from ..ranks.coordinator import Coordinator
from ..settings.config import StreamingConfig


def recorded(digests: Mapping[str, int], name: str) -> dict[str, str]:
    """Give `digests`, by names in the folder that is saved to, as the record of the state `name` has its own."""
    inside = f"{name}/"
    return {
        file.removeprefix(inside): f"{digest:016x}"
        for file, digest in sorted(digests.items())
        if file.startswith(inside)
    }


def refuse_other_bytes(
    digests: Mapping[str, str], place: Path, config: StreamingConfig, coordinator: Coordinator
) -> None:
    """Raise a CheckpointError, on all ranks, if a file of the state in `place` has other bytes than were written.

    Every byte is read once: by all ranks together, each an equal part, or by those alone that read for others.
    """
    readers, number = coordinator.world_size, coordinator.rank
    if config.read_from != "all" and not coordinator.is_alone:
        first = 0 if config.read_from == "rank0" else coordinator.topology.ranks_of_host[0]
        readers, number = 1, 0 if coordinator.rank == first else 1
    mine: dict[str, int] = {}
    error: Exception | None = None
    try:
        mine = _digests_of_share(digests, place, number, readers) if number < readers else {}
    except Exception as caught:
        error = caught
    of_ranks = coordinator.all_gather(mine, error)
    together = [of_ranks] if readers > 1 else [[of_rank] for of_rank in of_ranks if of_rank]
    for group in together:
        for name, expected in digests.items():
            found = f"{sum(of_rank.get(name, 0) for of_rank in group) % WORD:016x}"
            if found != expected:
                raise CheckpointError(
                    f"{(place / name).resolve()}: expected the bytes that were saved, with the digest {expected}; "
                    f"found the digest {found}. The file was damaged or replaced since: copy it again, or go on from "
                    "an older state."
                )


def _digests_of_share(digests: Mapping[str, str], place: Path, number: int, readers: int) -> dict[str, int]:
    """The digests of the parts of files that reader `number` of so many `readers` reads."""
    found: dict[str, int] = {}
    paths = [place / name for name in digests]
    names = [*digests]
    try:
        sizes = [path.stat().st_size for path in paths]
        for file, start, stop in shares_of(sizes, number, readers):
            found[names[file]] = digest_of_range(paths[file], start, stop)
    except OSError as error:
        raise ReadError(f"{error.filename or place}: cannot be read to compare its digest: {error}") from error
    return found
