"""The report of a load: seconds, bytes and memory of every rank, as data and as text for people."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from .text import MOST_RANK_ROWS, Tabular, bytes_text, count_text, fold, folded_names, table_of_ranks, wrapped


PHASES = ("model", "index", "plan", "wait", "read", "convert", "copy", "finalise", "total")
"""The keys of `RankReport.seconds`: "total" is the whole of a load, and about the sum of the others.

"model" is what transformers does before its first question for values: it builds the model. "wait": for other ranks,
and for memory.
"""


@dataclass(frozen=True, kw_only=True)
class Verification:
    """One rank's comparison of placed values with the files.

    Attributes:
        how: `StreamingConfig.verify`.
        parameters: parameters and buffers of which `elements` were compared, bit for bit.
        left_out: parameters that "sample" did not look at, because their conversion reads whole tensors.
        bytes_read: not among `RankReport.bytes_read`.
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
    """One rank's figures of a load; sizes are in bytes.

    Attributes:
        seconds: seconds per phase, one for each of `PHASES`.
        thread_seconds: of all reader threads together: "buffer", waiting for a free staging buffer; "read", for the
            files; "submit", copying out of buffers, or handing the copies to the device.
        bytes_needed: bytes of the checkpoint that end up in memory this rank owns.
        bytes_read: bytes read from files: those needed, holes read through, and sources read whole.
        partition_bytes: size of all destinations of this rank.
        staging_bytes: size of all staging buffers that were allocated.
        anonymous_growth_peak: most anonymous host memory during the load, over what it was before.
        device_peak: most memory of the device during the load, what was there before included; if there was more at
            some time before it, what was in use when it ended. 0 without an accelerator.
        device_reserved: memory of the device that torch's allocator has taken when the load ends, in use or not.
        retries: opens and reads that failed for a passing reason and were tried again.
        materialised: parameters whose sources were read whole, and why their conversion could not stay lazy.
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
    device_reserved: int = 0
    thread_seconds: Mapping[str, float] = field(default_factory=dict)
    retries: int = 0
    verification: Verification = Verification(how="off")
    materialised: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Report(Tabular):
    """The report of a load or a save, on every rank, as data; printed, it is text for people."""

    def to_dict(self) -> dict[str, Any]:
        """:meth:`to_json`, parsed: dicts, lists, numbers and strings, by the names of the fields."""
        found: dict[str, Any] = json.loads(self.to_json())
        return found

    def to_json(self, indent: int | None = None) -> str:
        """The report as JSON, with `indent` as in `json.dumps`; times are in seconds, sizes in bytes."""
        return json.dumps(self._data(), indent=indent)

    def _data(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class LoadReport(Report):
    """The report of a load, on every rank.

    Attributes:
        into: where the values are: "ZeRO-3 partitions", "shards", and so on.
        recast: parameters that took DeepSpeed's dtype although the model keeps them in fp32
            (`_keep_in_fp32_modules_strict`). As in stock: DeepSpeed refuses trainable parameters of several dtypes.
        checkpoint_bytes: size of all shards; 0 if values came from memory.
        stock_reader: who reads all of them in stock: "rank 0", "each rank"; "" where that is not known.
        stock_reason: why transformers has made the load itself, in which case there are no figures of `ranks`.
        forecast: computes :attr:`footprint`; None: nothing can.
    """

    world_size: int
    ranks: tuple[RankReport, ...]
    into: str = "memory"
    recast: tuple[str, ...] = ()
    checkpoint_bytes: int = 0
    stock_reader: str = ""
    stock_reason: str = ""
    forecast: Callable[[], Any] | None = field(default=None, repr=False, compare=False)

    @property
    def streamed(self) -> bool:
        """Whether the load was ours, and not stock's."""
        return bool(self.ranks)

    @property
    def digest(self) -> str:
        """A number for all values that were loaded, the same at any number of ranks; 16 hexadecimal digits.

        "" unless everything was verified (`StreamingConfig.verify` is "full").
        """
        digests = [rank.verification.digest for rank in self.ranks]
        return f"{sum(int(digest, 16) for digest in digests) % 2**64:016x}" if digests and all(digests) else ""

    @cached_property
    def footprint(self) -> Any:
        """The memory that this rank needs, computed (:attr:`hf_zero_stream.Forecast.memory`): partitions, and so on.

        It is computed when it is first asked for, by the plug-in `forecast`, of the model as it is then. None without
        that plug-in, of a copy, once the model is gone, and where neither ZeRO-3 nor DTensor shards the model.
        """
        return self.forecast() if self.forecast else None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "forecast": None}

    def _data(self) -> dict[str, Any]:
        data = asdict(replace(self, forecast=None))
        del data["forecast"]
        return {**data, "footprint": asdict(self.footprint) if self.footprint else None}

    def summary(self) -> str:
        """One line for people to read: what went where, and the most that a rank read and took."""
        if not self.ranks:
            return f"stock transformers loaded this model{self.stock_reason and f': {self.stock_reason}'}"
        nbytes = self.checkpoint_bytes or sum(rank.partition_bytes for rank in self.ranks)
        seconds = max(rank.seconds["total"] for rank in self.ranks)
        read = max(rank.bytes_read for rank in self.ranks)
        growth = max(rank.anonymous_growth_peak for rank in self.ranks)
        stock = f" (stock: {self.stock_reader} reads {bytes_text(nbytes)})" if self.stock_reader else ""
        return (
            f"loaded {bytes_text(nbytes)} into {self.into} on {count_text(self.world_size, 'rank')} in {seconds:.2f} s"
            f"; a rank read {bytes_text(read)}, and its memory on the host grew by {bytes_text(growth)}{stock}"
        )

    def table(self) -> str:
        """The report for people to read: plain text in several lines of at most 80 columns, without colour.

        A name of a parameter that is longer stays whole.

        Each table has one row per rank, or minimum, median and maximum of each column if there are more than 8 ranks.
        Throughput is bytes read per second of reading. After the tables come the memory that training will
        need on this rank, as computed, and the materialised and recast parameters.
        """
        return _table_of(self) if self.ranks else f"S{self.summary()[1:]}."


def _table_of(report: LoadReport) -> str:
    """Format `report` as :meth:`LoadReport.table` says."""
    slowest = max(report.ranks, key=lambda rank: rank.seconds["total"])
    ranks = "1 rank" if report.world_size == 1 else f"{report.world_size} ranks, slowest: rank {slowest.rank}"
    blocks = [
        [f"STREAMING LOAD REPORT ({ranks}, {slowest.seconds['total']:.2f} s)", f"Into {report.into}."],
        ["Seconds:", table_of_ranks(report.ranks, _seconds, are_seconds=True)],
        ["Read from the files:", table_of_ranks(report.ranks, _reading)],
        _thread_lines(report),
        ["Memory:", table_of_ranks(report.ranks, _memory)],
        _check_lines(report),
        [report.footprint.table()] if report.footprint else [],
        _materialised_lines(report),
    ]
    if report.recast:
        heading = f"Recast parameters ({len(report.recast)}), which the model keeps in fp32 and DeepSpeed cannot:"
        blocks.append([wrapped(heading), *(wrapped(f"  {name}") for name in folded_names(report.recast))])
    return "\n\n".join("\n".join(lines) for lines in blocks if lines)


def _seconds(rank: RankReport) -> dict[str, float]:
    return {phase.capitalize().removesuffix("ise"): rank.seconds[phase] for phase in PHASES}


def _reading(rank: RankReport) -> dict[str, float]:
    seconds = rank.seconds["read"]
    return {
        "Needed": rank.bytes_needed,
        "Read": rank.bytes_read,
        "Reads": rank.reads,
        "Throughput": rank.bytes_read / seconds if seconds else 0.0,  # a coarse clock may show 0
    }


def _memory(rank: RankReport) -> dict[str, float]:
    return {
        "Partition": rank.partition_bytes,
        "Staging": rank.staging_bytes,
        "Host growth": rank.anonymous_growth_peak,
        "Device peak": rank.device_peak,
        "Reserved": rank.device_reserved,
    }


def _thread_lines(report: LoadReport) -> list[str]:
    """What reader threads did, where bytes went to a device: elsewhere they wait for no buffer."""
    if not all(rank.thread_seconds and rank.device_peak for rank in report.ranks):
        return []
    table = table_of_ranks(report.ranks, lambda rank: _capitals(rank.thread_seconds), are_seconds=True)
    return ["Seconds of all reader threads together:", table]


def _capitals(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name.capitalize(): value for name, value in seconds.items()}


def _check_lines(report: LoadReport) -> list[str]:
    """Lines on what was verified and how many calls were retried; none if nothing was."""
    lines = []
    done = [rank.verification for rank in report.ranks if rank.verification.how in ("sample", "full")]
    if done:
        most = max(done, key=lambda verification: verification.seconds)
        text = f"Verified ({most.how}): {sum(v.elements for v in done)} elements of {most.parameters} parameters"
        text += f" are what the files hold; {bytes_text(sum(v.bytes_read for v in done))} read again"
        text += f" in {most.seconds:.2f} s" + (f"; digest {report.digest}" if report.digest else "")
        lines.append(wrapped(text + (f"; {most.left_out} parameters left out" if most.left_out else "")))
    retried = {rank.rank: rank.retries for rank in report.ranks if rank.retries}
    if retried:
        where = ", ".join(f"rank {rank}: {count}" for rank, count in list(retried.items())[:MOST_RANK_ROWS])
        count = f"{sum(retried.values())} times ({where})"
        lines.append(wrapped(f"Tried again after passing faults of the file system: {count}"))
    return lines


def _materialised_lines(report: LoadReport) -> list[str]:
    ranks_of: dict[tuple[str, str], list[int]] = {}
    for rank in report.ranks:
        for name, reason in rank.materialised.items():
            ranks_of.setdefault((name, reason), []).append(rank.rank)
    if not ranks_of:
        return []
    count = len({name for name, _ in ranks_of})
    lines = [f"Materialised parameters ({count}), whose sources were read whole:"]
    # Layers of one kind fall back for one reason, so what is left after folding is a few lines.
    for names, (reason, *ranks), _ in fold((name, (reason, *ranks)) for (name, reason), ranks in ranks_of.items()):
        where = "" if len(ranks) == len(report.ranks) else f" (on {len(ranks)} of {len(report.ranks)} ranks)"
        lines.append(wrapped(f"  {names}: {reason}{where}"))
    return lines
