"""The report of a save: seconds, bytes and memory of every rank, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .load import Report
from .text import bytes_text, count_text, table_of_ranks, wrapped


PHASES = ("plan", "copy", "write", "sync", "held", "verify", "publish", "total")
"""The keys of `SavingRank.seconds`, in the order of a save; "total" is all of it.

In asynchronous ones "copy" is what was copied at the call, and "held" how long steps of the optimizer waited.
"""


@dataclass(frozen=True, kw_only=True)
class SavingRank:
    """One rank's figures of a save.

    Attributes:
        seconds: one for each of `PHASES`.
        bytes_written: bytes of tensors.
        bytes_copied: bytes that were copied in host memory, to be written later.
        rounds: the exchanges between ranks of elements that none of them could write alone.
        anonymous_growth_peak: most anonymous host memory during the save, in bytes over what it was before.
    """

    rank: int
    seconds: Mapping[str, float]
    bytes_written: int
    bytes_copied: int
    rounds: int
    anonymous_growth_peak: int


@dataclass(frozen=True, kw_only=True)
class SaveReport(Report):
    """The report of a save, on every rank.

    Attributes:
        files: the names of the shards in `folder`.
        what: "weights", or "training state".
        asynchronous: whether it was made in the background.
        verified: whether what is in the files was compared with what the ranks hold, before it was published.
        materialised: tensors for which parameters were gathered in full, and why a conversion could not stay lazy.
    """

    folder: str
    files: tuple[str, ...]
    ranks: tuple[SavingRank, ...]
    verified: bool
    materialised: Mapping[str, str]
    what: str = "weights"
    asynchronous: bool = False

    @property
    def bytes_written(self) -> int:
        """Bytes of tensors that were written, on all ranks together."""
        return sum(rank.bytes_written for rank in self.ranks)

    def summary(self) -> str:
        """One line for people to read."""
        slowest = max(rank.seconds["total"] for rank in self.ranks)
        growth = max(rank.anonymous_growth_peak for rank in self.ranks)
        files, ranks = count_text(len(self.files), "shard"), count_text(len(self.ranks), "rank")
        return (
            f"saved {bytes_text(self.bytes_written)} of {self.what} in {files} to {self.folder} in {slowest:.2f} s"
            f"{' in the background' if self.asynchronous else ''} ({ranks}; host memory of a rank grew by at most "
            f"{bytes_text(growth)})"
        )

    def table(self) -> str:
        """The report for people to read: :meth:`summary`, and what each rank did, as in :meth:`LoadReport.table`."""
        blocks = [
            [wrapped(f"S{self.summary()[1:]}.")],
            ["Seconds:", table_of_ranks(self.ranks, _seconds, are_seconds=True)],
            ["Bytes:", table_of_ranks(self.ranks, _bytes)],
            [wrapped(f"Gathered in full: {name}: {reason}") for name, reason in self.materialised.items()],
        ]
        return "\n\n".join("\n".join(lines) for lines in blocks if lines)


def _seconds(rank: SavingRank) -> dict[str, float]:
    return {phase.capitalize(): rank.seconds[phase] for phase in PHASES}


def _bytes(rank: SavingRank) -> dict[str, float]:
    return {"Written": rank.bytes_written, "Copied": rank.bytes_copied, "Host growth": rank.anonymous_growth_peak}
