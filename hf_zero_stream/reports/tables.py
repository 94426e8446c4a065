"""The report of a load for people to read."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from statistics import median

from .load import PHASES, LoadReport, RankReport
from .text import bytes_text, fold, folded_names, markdown_table


_MOST_RANK_ROWS = 8
_WIDTH = 80


def table_of(report: LoadReport) -> str:
    """Format `report` as :meth:`.load.LoadReport.table` says."""
    slowest = max(report.ranks, key=lambda rank: rank.seconds["total"])
    ranks = "1 rank" if report.world_size == 1 else f"{report.world_size} ranks, slowest: rank {slowest.rank}"
    blocks = [
        [f"STREAMING LOAD REPORT ({ranks}, {slowest.seconds['total']:.2f} s)", f"Into {report.into}."],
        ["Seconds:", _table(report.ranks, _seconds)],
        ["Read from the files:", _table(report.ranks, _reading)],
        ["Memory:", _table(report.ranks, _memory)],
        _check_lines(report),
        _footprint_lines(report),
        _materialised_lines(report),
    ]
    if report.recast:
        heading = f"Recast parameters ({len(report.recast)}), which the model keeps in fp32 and DeepSpeed cannot:"
        blocks.append([_wrapped(heading), *(_wrapped(f"  {name}") for name in folded_names(report.recast))])
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
    """Lines on what was verified and how many calls were retried; none if nothing was."""
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
