"""The reports of loads and saves for people to read."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from statistics import median
from typing import TYPE_CHECKING, Any

from . import save
from .load import PHASES, LoadReport, RankReport
from .text import bytes_text, count_text, fold, folded_names, markdown_table


if TYPE_CHECKING:
    from ..planning.footprint import MemoryFootprint
    from ..planning.plan import LoadPlan


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


def table_of_save(report: save.SaveReport) -> str:
    """Format `report` as :meth:`.save.SaveReport.table` says."""
    summary = report.summary()
    blocks = [
        [_wrapped(f"S{summary[1:]}.")],
        ["Seconds:", _table(report.ranks, _seconds_of_save)],
        ["Bytes:", _table(report.ranks, _bytes_of_save)],
        [_wrapped(f"Gathered in full: {name}: {reason}") for name, reason in report.materialised.items()],
    ]
    return "\n\n".join("\n".join(lines) for lines in blocks if lines)


def _seconds_of_save(rank: save.SavingRank) -> dict[str, float]:
    return {phase.capitalize(): rank.seconds[phase] for phase in save.PHASES}


def _bytes_of_save(rank: save.SavingRank) -> dict[str, float]:
    return {"Written": rank.bytes_written, "Copied": rank.bytes_copied, "Host growth": rank.anonymous_growth_peak}


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


def _table(ranks: Sequence[Any], numbers_of: Callable[[Any], Mapping[str, float]]) -> str:
    titles = list(numbers_of(ranks[0]))
    rows = {str(rank.rank): list(numbers_of(rank).values()) for rank in ranks}
    if len(rows) > _MOST_RANK_ROWS:
        summaries: dict[str, Callable[[Iterable[float]], float]] = {"min": min, "median": median, "max": max}
        rows = {name: [of(column) for column in zip(*rows.values(), strict=True)] for name, of in summaries.items()}

    def text_of(title: str, number: float) -> str:
        if numbers_of in (_seconds, _seconds_of_save):
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


def table_of_plan(plan: LoadPlan, memory: MemoryFootprint) -> str:
    """What `plan` reads, and the memory of its rank, as :meth:`..loading.dry_load.Forecast.table` says."""
    cost, shards = plan.cost, count_text(len(plan.shards), "shard")
    reads = (
        f"Needs {bytes_text(cost.bytes_needed)} of {bytes_text(plan.checkpoint_bytes)}, and reads "
        f"{bytes_text(cost.bytes_read)} of {shards} in {count_text(cost.reads, 'read')}."
    )
    heading = f"PLAN OF RANK {plan.rank} OF {plan.world_size}"
    return "\n".join([heading, _wrapped(reads), "", *footprint_lines(memory)])


def _footprint_lines(report: LoadReport) -> list[str]:
    footprints = [rank.footprint for rank in report.ranks if rank.footprint]
    if not footprints:
        return []
    # Padding makes ranks alike; only settings such as `staging_bytes` can differ.
    return footprint_lines(max(footprints, key=lambda footprint: (sum(footprint.held.values()), footprint.staging)))


def footprint_lines(most: MemoryFootprint) -> list[str]:
    """Lines on the memory that training will need on a rank, for people to read."""
    starting: list[tuple[str, str]] = []
    if most.engine == "deepspeed":
        starting += [*_rows("deepspeed.initialize adds", most.started)]
        starting.append(("and peaks at", _places_text(most.start_peak)))
    if most.first_backward or most.engine != "deepspeed":
        starting += _rows("the first backward adds", most.first_backward)
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


def _rows(title: str, parts: Mapping[str, Mapping[str, int]]) -> Iterator[tuple[str, str]]:
    """One row for each of `parts`, of which the first has the title."""
    texts = [f"{name} {_places_text(places)}" for name, places in parts.items()] or ["nothing"]
    return zip_longest([title], texts, fillvalue="")


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
