"""Tables of reports, for people to read: of what ranks did, and of the memory that training will need."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from statistics import median
from typing import TYPE_CHECKING, Any

from .text import bytes_text, count_text, markdown_table


if TYPE_CHECKING:
    from ..planning.footprint import MemoryFootprint
    from ..planning.plan import LoadPlan


MOST_RANK_ROWS = 8
_WIDTH = 80


def table_of_ranks(
    ranks: Sequence[Any], numbers_of: Callable[[Any], Mapping[str, float]], *, are_seconds: bool = False
) -> str:
    """One row per rank; minimum, median and maximum of each column if there are more than 8. Numbers are bytes."""
    titles = list(numbers_of(ranks[0]))
    rows = {str(rank.rank): list(numbers_of(rank).values()) for rank in ranks}
    if len(rows) > MOST_RANK_ROWS:
        summaries: dict[str, Callable[[Iterable[float]], float]] = {"min": min, "median": median, "max": max}
        rows = {name: [of(column) for column in zip(*rows.values(), strict=True)] for name, of in summaries.items()}

    def text_of(title: str, number: float) -> str:
        if are_seconds:
            return f"{number:.2f}" if number < 100 else f"{number:.0f}"  # at most 80 columns together
        if title == "Reads":
            return f"{number:.0f}"
        return bytes_text(number) + ("/s" if title == "Throughput" else "")

    cells = [(name, *map(text_of, titles, numbers)) for name, numbers in rows.items()]
    return markdown_table(("Rank", *titles), cells)


def table_of_plan(plan: LoadPlan, memory: MemoryFootprint) -> str:
    """What `plan` reads, and the memory of its rank, as :meth:`..loading.dry_load.Forecast.table` says."""
    cost, shards = plan.cost, count_text(len(plan.shards), "shard")
    reads = (
        f"Needs {bytes_text(cost.bytes_needed)} of {bytes_text(plan.checkpoint_bytes)}, and reads "
        f"{bytes_text(cost.bytes_read)} of {shards} in {count_text(cost.reads, 'read')}."
    )
    heading = f"PLAN OF RANK {plan.rank} OF {plan.world_size}"
    return "\n".join([heading, wrapped(reads), "", *footprint_lines(memory)])


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
    return [heading, *(wrapped(f"  {title:{width}}  {text}", width + 4) for title, text in rows)]


def _rows(title: str, parts: Mapping[str, Mapping[str, int]]) -> Iterator[tuple[str, str]]:
    """One row for each of `parts`, of which the first has the title."""
    texts = [f"{name} {_places_text(places)}" for name, places in parts.items()] or ["nothing"]
    return zip_longest([title], texts, fillvalue="")


def _places_text(places: Mapping[str, int]) -> str:
    return " + ".join(f"{bytes_text(nbytes)} {place}" for place, nbytes in places.items())


def wrapped(line: str, indent: int = 4) -> str:
    """`line` in lines of at most 80 columns, from the second on indented; a word that is longer stays whole."""
    if len(line) <= _WIDTH:
        return line
    return textwrap.fill(line, _WIDTH, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
