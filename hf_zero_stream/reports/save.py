"""What a save did: seconds, bytes and memory of every rank, as data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


__all__ = ["PHASES", "SaveReport", "SavingRank"]

PHASES = ("plan", "write", "sync", "verify", "publish", "total")
"""The keys of `SavingRank.seconds`, in the order of a save; "total" is the whole of it."""


@dataclass(frozen=True, kw_only=True)
class SavingRank:
    """What one rank did."""

    rank: int
    """The global rank."""

    seconds: Mapping[str, float]
    """Seconds per phase, one for each of `PHASES`."""

    bytes_written: int
    """Bytes of tensors that this rank wrote."""

    rounds: int
    """How many times ranks exchanged elements that none of them could write alone."""

    anonymous_growth_peak: int
    """Most anonymous host memory during the save, in bytes over what it was before."""


@dataclass(frozen=True, kw_only=True)
class SaveReport:
    """What a save did, on every rank."""

    folder: str
    """Where the checkpoint is."""

    files: tuple[str, ...]
    """The names of its shards."""

    ranks: tuple[SavingRank, ...]
    """One report per rank, in the order of the ranks."""

    verified: bool
    """Whether what is in the files was compared with what the ranks hold, before it was published."""

    materialised: Mapping[str, str]
    """Tensors for which parameters were gathered in full, as a conversion could not stay lazy, with the reason."""

    @property
    def bytes_written(self) -> int:
        """Bytes of tensors that were written, on all ranks together."""
        return sum(rank.bytes_written for rank in self.ranks)

    def to_dict(self) -> dict[str, Any]:
        """:meth:`to_json`, parsed: dicts, lists, numbers and strings, by the names of the fields."""
        return json.loads(self.to_json())

    def to_json(self, indent: int | None = None) -> str:
        """The report as JSON, with `indent` as in `json.dumps`; times are in seconds, sizes in bytes."""
        return json.dumps(asdict(self), indent=indent)

    def summary(self) -> str:
        """One line for people to read."""
        slowest = max(rank.seconds["total"] for rank in self.ranks)
        growth = max(rank.anonymous_growth_peak for rank in self.ranks)
        return (
            f"saved {self.bytes_written / 1e9:.2f} GB in {len(self.files)} shard(s) to {self.folder} in "
            f"{slowest:.1f} s ({len(self.ranks)} ranks wrote; anonymous memory of a rank grew by at most "
            f"{growth / 2**20:.0f} MiB)"
        )
