"""Tables of reports, for people to read: what ranks did."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from .text import bytes_text, markdown_table


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


def wrapped(line: str, indent: int = 4) -> str:
    """`line` in lines of at most 80 columns, from the second on indented; a word that is longer stays whole."""
    if len(line) <= _WIDTH:
        return line
    return textwrap.fill(line, _WIDTH, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
