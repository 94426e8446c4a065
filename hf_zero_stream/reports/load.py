"""What a load did: seconds, bytes and memory of every rank, as data."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from ..footprint.memory import MemoryFootprint


__all__ = ["PHASES", "LoadReport", "PhaseClock", "RankReport", "Report", "Verification"]

PHASES = ("index", "plan", "read", "convert", "copy", "finalise", "total")
"""The keys of `RankReport.seconds`, in the order of a load; "total" is the whole of it."""


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What one rank compared with the files after placing it.

    Attributes:
        how: `StreamingConfig.verify`: "off", "sizes", "sample" or "full".
        parameters: parameters and buffers of which elements were compared.
        left_out: parameters that "sample" did not look at, because their conversion reads whole tensors.
        elements: elements that were compared, bit for bit.
        bytes_read: bytes read for it; not among `RankReport.bytes_read`.
        seconds: wall-clock seconds that it took.
        digest: this rank's share of `LoadReport.digest`, as 16 hexadecimal digits; "" unless `how` is "full".
    """

    how: str
    parameters: int = 0
    left_out: int = 0
    elements: int = 0
    bytes_read: int = 0
    seconds: float = 0.0
    digest: str = ""


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """What one rank did; sizes are in bytes.

    Attributes:
        seconds: seconds per phase, one for each of `PHASES`. Phases can overlap, so "total" need not be their sum.
        bytes_needed: bytes of the checkpoint that end up in memory this rank owns.
        bytes_read: bytes read from files: those needed, holes read through, and sources read whole.
        reads: number of positional reads.
        partition_bytes: size of all destinations of this rank.
        staging_bytes: size of all staging buffers that were allocated.
        anonymous_growth_peak: most anonymous host memory during the load, over what it was before.
        device_peak: most memory of the device during the load; 0 without an accelerator.
        retries: opens and reads that failed for a passing reason and were tried again.
        verification: what was compared with the files.
        materialised: parameters whose sources had to be read whole, because their conversion could not stay lazy, and
            the reason.
        footprint: the memory that this rank needs, computed: partitions, the largest gather, what training adds.
    """

    rank: int
    seconds: Mapping[str, float]
    bytes_needed: int
    bytes_read: int
    reads: int
    partition_bytes: int
    staging_bytes: int
    anonymous_growth_peak: int
    device_peak: int
    retries: int = 0
    verification: Verification = Verification(how="off")
    materialised: Mapping[str, str] = field(default_factory=dict)
    footprint: MemoryFootprint | None = None


@dataclass(frozen=True)
class Report:
    """What a load or a save did, on every rank, as data."""

    def to_dict(self) -> dict[str, Any]:
        """:meth:`to_json`, parsed: dicts, lists, numbers and strings, by the names of the fields."""
        return json.loads(self.to_json())

    def to_json(self, indent: int | None = None) -> str:
        """The report as JSON, with `indent` as in `json.dumps`; times are in seconds, sizes in bytes."""
        return json.dumps(asdict(self), indent=indent)


@dataclass(frozen=True, kw_only=True)
class LoadReport(Report):
    """What a load did, on every rank.

    Attributes:
        ranks: one report per rank, in the order of the ranks.
        recast: parameters that took DeepSpeed's dtype although the model keeps them in fp32
            (`_keep_in_fp32_modules_strict`). As in stock: DeepSpeed refuses trainable parameters of several dtypes.
    """

    world_size: int
    ranks: tuple[RankReport, ...]
    recast: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """A number for all values that were loaded, the same at any number of ranks; 16 hexadecimal digits.

        "" unless everything was verified (`StreamingConfig.verify` is "full"). See :mod:`.engine.verification`.
        """
        digests = [rank.verification.digest for rank in self.ranks]
        return f"{sum(int(digest, 16) for digest in digests) % 2**64:016x}" if all(digests) else ""

    def table(self) -> str:
        """The report for people to read: plain text in several lines, without colour.

        There is one row per rank, or minimum, median and maximum of each column if there are more than 8 ranks.
        Throughput is bytes read per second of the whole load. Below are a rank's memory, as it is computed, and the
        materialised and recast parameters.
        """
        # Imports rich, which only a table needs.
        from .load_table import render_table

        return render_table(self)


class PhaseClock:
    """Adds up the wall-clock seconds of each phase of a load or of a save: ``with clock("plan"): ...``.

    Any thread may enter a phase, and many times. Phases may nest or overlap: each is timed alone.
    """

    def __init__(self, phases: Sequence[str] = PHASES) -> None:
        self._seconds = dict.fromkeys(phases, 0.0)
        self._lock = threading.Lock()

    @property
    def seconds(self) -> dict[str, float]:
        with self._lock:
            return dict(self._seconds)

    def add(self, phase: str, seconds: float) -> None:
        """Add `seconds` to a phase; raises ValueError if the clock has no such phase."""
        if phase not in self._seconds:
            raise ValueError(f"phase: expected one of {', '.join(self._seconds)}; got {phase!r}")
        with self._lock:
            self._seconds[phase] += seconds

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Add the duration of the context to a phase, also if it ends with an error."""
        self.add(phase, 0.0)  # raises before anything is done if there is no such phase
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(phase, time.perf_counter() - start)
