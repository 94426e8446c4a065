"""A load report as text for people."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median

from .load import PHASES, LoadReport, RankReport
from .text import bytes_text, fold, folded_names, markdown_table


__all__ = ["render_table"]

_MOST_RANK_ROWS = 8


def render_table(report: LoadReport) -> str:
    """The text of `LoadReport.table`."""
    slowest = max(report.ranks, key=lambda rank: rank.seconds["total"])
    ranks = "1 rank" if report.world_size == 1 else f"{report.world_size} ranks, slowest: rank {slowest.rank}"
    blocks = [
        [f"STREAMING LOAD REPORT ({ranks}, {slowest.seconds['total']:.2f} s)"],
        [_table(report, _seconds, lambda title, number: f"{number:.2f}")],
        [_table(report, _sizes, _size_text)],
        _check_lines(report),
        _footprint_lines(report),
        _materialised_lines(report),
    ]
    if report.recast:
        heading = f"Recast parameters ({len(report.recast)}), which the model keeps in fp32 and DeepSpeed cannot:"
        blocks.append([heading, *(f"  {name}" for name in folded_names(report.recast))])
    return "\n\n".join("\n".join(lines) for lines in blocks if lines)


def _seconds(rank: RankReport) -> dict[str, float]:
    return {f"{phase.capitalize()} s": rank.seconds[phase] for phase in PHASES}


def _sizes(rank: RankReport) -> dict[str, float]:
    seconds = rank.seconds["total"]
    return {
        "Needed": rank.bytes_needed,
        "Read": rank.bytes_read,
        "Reads": rank.reads,
        "Throughput": rank.bytes_read / seconds if seconds else 0.0,  # a coarse clock may show 0
        "Partition": rank.partition_bytes,
        "Staging": rank.staging_bytes,
        "Host growth": rank.anonymous_growth_peak,
        "Device peak": rank.device_peak,
    }


def _size_text(title: str, number: float) -> str:
    if title == "Reads":
        return f"{number:.0f}"
    return bytes_text(number) + ("/s" if title == "Throughput" else "")


def _table(
    report: LoadReport, numbers_of: Callable[[RankReport], Mapping[str, float]], text: Callable[[str, float], str]
) -> str:
    rows = {str(rank.rank): numbers_of(rank) for rank in report.ranks}
    titles = list(numbers_of(report.ranks[0]))
    if len(rows) > _MOST_RANK_ROWS:
        columns = {title: [numbers[title] for numbers in rows.values()] for title in titles}
        summaries: dict[str, Callable[[list[float]], float]] = {"min": min, "median": median, "max": max}
        rows = {name: {title: of(column) for title, column in columns.items()} for name, of in summaries.items()}
    return markdown_table(
        ("Rank", *titles), [(name, *(text(*cell) for cell in numbers.items())) for name, numbers in rows.items()]
    )


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
    added = "; ".join(f"{name} {_places_text(places)}" for name, places in most.started.items())
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
    lines = [f"Materialised parameters ({len({name for name, _ in ranks_of})}), whose sources were read whole:"]
    # Layers of one kind fall back for one reason, so what is left after folding is a few lines.
    for names, (reason, *ranks), _ in fold((name, (reason, *ranks)) for (name, reason), ranks in ranks_of.items()):
        where = "" if len(ranks) == len(report.ranks) else f" (on {len(ranks)} of {len(report.ranks)} ranks)"
        lines.append(f"  {names}: {reason}{where}")
    return lines
