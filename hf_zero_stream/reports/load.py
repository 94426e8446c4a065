"""What a load did: seconds, bytes and memory of every rank, as data and as text for people."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from statistics import median
from typing import TYPE_CHECKING, Any

from .text import bytes_text, fold, folded_names, markdown_table


if TYPE_CHECKING:
    from ..planning.footprint import MemoryFootprint


PHASES = ("model", "index", "plan", "wait", "read", "convert", "copy", "finalise", "total")
"""The keys of `RankReport.seconds`: "total" is the whole of a load, and about the sum of the others.

"model" is what transformers does before its first question for values: it builds the model. "wait": for other ranks,
and for memory.
"""

_MOST_RANK_ROWS = 8
_WIDTH = 80


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What one rank compared with the files after placing it.

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
    """What one rank did; sizes are in bytes.

    Attributes:
        seconds: seconds per phase, one for each of `PHASES`.
        bytes_needed: bytes of the checkpoint that end up in memory this rank owns.
        bytes_read: bytes read from files: those needed, holes read through, and sources read whole.
        partition_bytes: size of all destinations of this rank.
        staging_bytes: size of all staging buffers that were allocated.
        anonymous_growth_peak: most anonymous host memory during the load, over what it was before.
        device_peak: most memory of the device during the load, what was there before included; if there was more at
            some time before it, what was in use when it ended. 0 without an accelerator.
        retries: opens and reads that failed for a passing reason and were tried again.
        materialised: parameters whose sources were read whole, and why their conversion could not stay lazy.
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
        found: dict[str, Any] = json.loads(self.to_json())
        return found

    def to_json(self, indent: int | None = None) -> str:
        """The report as JSON, with `indent` as in `json.dumps`; times are in seconds, sizes in bytes."""
        return json.dumps(asdict(self), indent=indent)


@dataclass(frozen=True, kw_only=True)
class LoadReport(Report):
    """What a load did, on every rank.

    Attributes:
        into: where the values are: "ZeRO-3 partitions", "shards", and so on.
        recast: parameters that took DeepSpeed's dtype although the model keeps them in fp32
            (`_keep_in_fp32_modules_strict`). As in stock: DeepSpeed refuses trainable parameters of several dtypes.
    """

    world_size: int
    ranks: tuple[RankReport, ...]
    into: str = "memory"
    recast: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """A number for all values that were loaded, the same at any number of ranks; 16 hexadecimal digits.

        "" unless everything was verified (`StreamingConfig.verify` is "full").
        """
        digests = [rank.verification.digest for rank in self.ranks]
        return f"{sum(int(digest, 16) for digest in digests) % 2**64:016x}" if all(digests) else ""

    def table(self) -> str:
        """The report for people to read: plain text in several lines of at most 80 columns, without colour.

        A name of a parameter that is longer stays whole.

        Each table has one row per rank, or minimum, median and maximum of each column if there are more than 8 ranks.
        Throughput is bytes read per second of reading. After the tables come the memory that training will
        need, as computed, and the materialised and recast parameters.
        """
        slowest = max(self.ranks, key=lambda rank: rank.seconds["total"])
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks, slowest: rank {slowest.rank}"
        blocks = [
            [f"STREAMING LOAD REPORT ({ranks}, {slowest.seconds['total']:.2f} s)", f"Into {self.into}."],
            ["Seconds:", _table(self.ranks, _seconds)],
            ["Read from the files:", _table(self.ranks, _reading)],
            ["Memory:", _table(self.ranks, _memory)],
            _check_lines(self),
            _footprint_lines(self),
            _materialised_lines(self),
        ]
        if self.recast:
            heading = f"Recast parameters ({len(self.recast)}), which the model keeps in fp32 and DeepSpeed cannot:"
            blocks.append([_wrapped(heading), *(_wrapped(f"  {name}") for name in folded_names(self.recast))])
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
    }


def _table(ranks: Sequence[RankReport], numbers_of: Callable[[RankReport], Mapping[str, float]]) -> str:
    titles = list(numbers_of(ranks[0]))
    rows = {str(rank.rank): list(numbers_of(rank).values()) for rank in ranks}
    if len(rows) > _MOST_RANK_ROWS:
        summaries: dict[str, Callable[[Iterable[float]], float]] = {"min": min, "median": median, "max": max}
        rows = {name: [of(column) for column in zip(*rows.values(), strict=True)] for name, of in summaries.items()}

    def text_of(title: str, number: float) -> str:
        if numbers_of is _seconds:
            return f"{number:.2f}" if number < 100 else f"{number:.0f}"  # at most 80 columns together
        if title == "Reads":
            return f"{number:.0f}"
        return bytes_text(number) + ("/s" if title == "Throughput" else "")

    cells = [(name, *map(text_of, titles, numbers)) for name, numbers in rows.items()]
    return markdown_table(("Rank", *titles), cells)


def _check_lines(report: LoadReport) -> list[str]:
    """What was verified, and how often something was tried again, if at all."""
    lines = []
    done = [rank.verification for rank in report.ranks if rank.verification.how in ("sample", "full")]
    if done:
        most = max(done, key=lambda verification: verification.seconds)
        text = f"Verified ({most.how}): {sum(v.elements for v in done)} elements of {most.parameters} parameters"
        text += f" are what the files hold; {bytes_text(sum(v.bytes_read for v in done))} read again"
        text += f" in {most.seconds:.2f} s" + (f"; digest {report.digest}" if report.digest else "")
        lines.append(_wrapped(text + (f"; {most.left_out} parameters left out" if most.left_out else "")))
    retried = {rank.rank: rank.retries for rank in report.ranks if rank.retries}
    if retried:
        where = ", ".join(f"rank {rank}: {count}" for rank, count in list(retried.items())[:_MOST_RANK_ROWS])
        count = f"{sum(retried.values())} times ({where})"
        lines.append(_wrapped(f"Tried again after passing faults of the file system: {count}"))
    return lines


def _footprint_lines(report: LoadReport) -> list[str]:
    footprints = [rank.footprint for rank in report.ranks if rank.footprint]
    if not footprints:
        return []
    # Padding makes ranks alike; only settings such as `staging_bytes` can differ.
    most = max(footprints, key=lambda footprint: (sum(footprint.held.values()), footprint.staging))
    if most.engine == "deepspeed":
        added = [f"{name} {_places_text(places)}" for name, places in most.started.items()] or ["nothing"]
        starting = [(title, text) for title, text in zip_longest(["deepspeed.initialize adds"], added, fillvalue="")]
        starting.append(("and peaks at", _places_text(most.start_peak)))
    else:
        starting = [("the first backward adds", f"gradients {_places_text(most.gradients) or 'none'}")]
    rows = [
        ("partitions", _places_text(most.partitions)),
        ("peak of the load", f"{_places_text(most.load_peak)} (staging up to {bytes_text(most.staging)})"),
        ("largest gather", f"{bytes_text(most.largest_gather)} ({most.largest_gather_of or 'nothing'})"),
        *starting,
        ("the first step adds", f"optimizer states {_places_text(most.optimizer_states) or 'none'}"),
        ("held in training", f"{_places_text(most.held)} (without activations and gathers)"),
        ("a step peaks at", _places_text(most.step_peak)),
        *((f"with {cure}", _places_text(places)) for cure, places in most.step_cures.items()),
    ]
    width = max(len(title) for title, _ in rows)
    heading = "Memory that training will need on a rank, computed:"
    return [heading, *(_wrapped(f"  {title:{width}}  {text}", width + 4) for title, text in rows)]


def _places_text(places: Mapping[str, int]) -> str:
    return " + ".join(f"{bytes_text(nbytes)} {place}" for place, nbytes in places.items())


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
        lines.append(_wrapped(f"  {names}: {reason}{where}"))
    return lines


def _wrapped(line: str, indent: int = 4) -> str:
    """`line` in lines of at most 80 columns, from the second on indented; a word that is longer stays whole."""
    if len(line) <= _WIDTH:
        return line
    return textwrap.fill(line, _WIDTH, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
