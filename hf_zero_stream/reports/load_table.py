"""A load report as text for people."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from .folding import folded_names
from .load import PHASES, LoadReport, RankReport


__all__ = ["bytes_text", "render_table"]

_MOST_RANK_ROWS = 8


class _Column(NamedTuple):
    title: str
    value: Callable[[RankReport], float]
    text: Callable[[float], str]


def render_table(report: LoadReport) -> str:
    """The text of `LoadReport.table`."""
    slowest = max(report.ranks, key=lambda rank: rank.seconds["total"])
    ranks = "1 rank" if report.world_size == 1 else f"{report.world_size} ranks, slowest: rank {slowest.rank}"
    blocks = [
        [f"STREAMING LOAD REPORT ({ranks}, {slowest.seconds['total']:.2f} s)"],
        _table(report, _SECONDS),
        _table(report, _BYTES),
        _check_lines(report),
        _footprint_lines(report),
        _materialised_lines(report),
    ]
    if report.recast:
        heading = f"Recast parameters ({len(report.recast)}), which the model keeps in fp32 and DeepSpeed cannot:"
        blocks.append([heading, *(f"  {name}" for name in folded_names(report.recast))])
    return "\n\n".join("\n".join(lines) for lines in blocks if lines)


def _bytes_per_second(rank: RankReport) -> float:
    return rank.bytes_read / rank.seconds["total"] if rank.seconds["total"] else 0.0  # a coarse clock may show 0


def bytes_text(value: float) -> str:
    """Bytes with a binary unit, such as 1.5 GiB."""
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(value) < (1024 if unit == "B" else 1023.95):  # 1023.96 KiB would be written as 1024.0 KiB
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"


def _seconds_of(phase: str) -> _Column:
    return _Column(f"{phase.capitalize()} s", lambda rank: rank.seconds[phase], "{:.2f}".format)


_SECONDS = [*map(_seconds_of, PHASES)]
_BYTES = [
    _Column("Needed", lambda rank: rank.bytes_needed, bytes_text),
    _Column("Read", lambda rank: rank.bytes_read, bytes_text),
    _Column("Reads", lambda rank: rank.reads, "{:.0f}".format),
    _Column("Throughput", _bytes_per_second, lambda value: f"{bytes_text(value)}/s"),
    _Column("Partition", lambda rank: rank.partition_bytes, bytes_text),
    _Column("Staging", lambda rank: rank.staging_bytes, bytes_text),
    _Column("Host growth", lambda rank: rank.anonymous_growth_peak, bytes_text),
    _Column("Device peak", lambda rank: rank.device_peak, bytes_text),
]


def _table(report: LoadReport, columns: Sequence[_Column]) -> list[str]:
    table = Table(box=MARKDOWN)
    for title in ("Rank", *(column.title for column in columns)):
        table.add_column(title, justify="right", no_wrap=True)
    if len(report.ranks) <= _MOST_RANK_ROWS:
        for rank in report.ranks:
            table.add_row(str(rank.rank), *(column.text(column.value(rank)) for column in columns))
    else:
        summaries: dict[str, Callable[[Iterable[float]], float]] = {"min": min, "median": median, "max": max}
        for name, summary in summaries.items():
            table.add_row(name, *(column.text(summary(map(column.value, report.ranks))) for column in columns))

    # The width is fixed: a log file has no terminal, and a table folded to fit one cannot be read. In a notebook, rich
    # would display the table instead of writing it to the file.
    text = io.StringIO()
    Console(file=text, width=1000, color_system=None, force_terminal=False, force_jupyter=False).print(table)
    return [line.rstrip() for line in text.getvalue().splitlines() if line.strip()]


def _check_lines(report: LoadReport) -> list[str]:
    """What was verified, and how often something was tried again, if at all."""
    lines = []
    done = [rank.verification for rank in report.ranks if rank.verification.how in ("sample", "full")]
    if done:
        most = max(done, key=lambda verification: verification.seconds)
        text = f"Verified ({most.how}): {sum(v.elements for v in done)} elements of {most.parameters} parameters"
        text += f" are what the files hold; {bytes_text(sum(v.bytes_read for v in done))} read again"
        text += f" in {most.seconds:.2f} s" + (f"; digest {report.digest}" if report.digest else "")
        lines.append(text + (f"; {most.left_out} parameters left out" if most.left_out else ""))
    retried = {rank.rank: rank.retries for rank in report.ranks if rank.retries}
    if retried:
        where = ", ".join(f"rank {rank}: {count}" for rank, count in list(retried.items())[:_MOST_RANK_ROWS])
        lines.append(f"Tried again after passing faults of the file system: {sum(retried.values())} times ({where})")
    return lines


def _footprint_lines(report: LoadReport) -> list[str]:
    footprints = [rank.footprint for rank in report.ranks if rank.footprint]
    if not footprints:
        return []
    # Padding makes ranks alike; only settings such as `staging_bytes` can differ.
    most = max(footprints, key=lambda footprint: (sum(footprint.held.values()), footprint.staging))
    started = {
        "fp32 copies": most.master,
        "gradients": most.gradients,
        "reduce bucket": most.reduce_bucket,
        "hpZ copies": most.secondary,
    }
    added = "; ".join(f"{name} {_places_text(places)}" for name, places in started.items() if places)
    rows = [
        ("partitions", _places_text(most.partitions)),
        ("peak of the load", f"{_places_text(most.load_peak)} (staging up to {bytes_text(most.staging)})"),
        ("largest gather", f"{bytes_text(most.largest_gather)} ({most.largest_gather_of})"),
        ("deepspeed.initialize adds", added or "nothing"),
        ("and peaks at", _places_text(most.start_peak)),
        ("the first step adds", f"optimizer states {_places_text(most.optimizer_states) or 'none'}"),
        ("held in training", f"{_places_text(most.held)}, activations and gathers not counted"),
    ]
    width = max(len(title) for title, _ in rows)
    return ["Memory of a rank, computed:", *(f"  {title:{width}}  {text}" for title, text in rows)]


def _places_text(places: Mapping[str, int]) -> str:
    return " + ".join(f"{bytes_text(nbytes)} {place}" for place, nbytes in places.items())


def _materialised_lines(report: LoadReport) -> list[str]:
    ranks_of: dict[tuple[str, str], list[int]] = {}
    for rank in report.ranks:
        for name, reason in rank.materialised.items():
            ranks_of.setdefault((name, reason), []).append(rank.rank)
    if not ranks_of:
        return []
    # Layers of one kind fall back for one reason, so what is left after folding is a few lines.
    names_of: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for (name, reason), ranks in ranks_of.items():
        names_of.setdefault((reason, tuple(ranks)), []).append(name)
    lines = [f"Materialised parameters ({len({name for name, _ in ranks_of})}), whose sources were read whole:"]
    for (reason, on_ranks), names in names_of.items():
        where = "" if len(on_ranks) == len(report.ranks) else f" (on {len(on_ranks)} of {len(report.ranks)} ranks)"
        lines += [f"  {name}: {reason}{where}" for name in folded_names(names)]
    return lines
