"""Text for people: sizes, counts, tables, and many names that differ only in their numbers."""

from __future__ import annotations

import html
import io
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from math import prod
from statistics import median
from typing import Any


_BREAKS = re.compile(r"(?<= )|(?<=[./])(?=[A-Za-z{])")
_NUMBER = re.compile(r"(?:^|(?<=\.))(0|[1-9]\d*)(?=\.|$)")


def bytes_text(nbytes: float) -> str:
    """Bytes with a binary unit, such as 1.5 GiB."""
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(nbytes) < (1024 if unit == "B" else 1023.95):  # 1023.96 KiB would be written as 1024.0 KiB
            break
        nbytes, unit = nbytes / 1024, larger
    return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"


def printable(text: str, kept: str = "") -> str:
    """`text` with its control characters escaped: anybody can choose the names in a checkpoint."""
    return "".join(
        character if character.isprintable() or character in kept else ascii(character)[1:-1] for character in text
    )


def count_text(count: int, noun: str) -> str:
    """`1 shard`, `4 shards`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


class Tabular:
    """What has a table for people to read, which ``print`` and notebooks show."""

    def table(self) -> str:
        """Plain text in several lines."""
        raise NotImplementedError

    def __str__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.table())}</pre>"


def markdown_table(titles: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 0, width: int = 10_000) -> str:
    """A table whose first `left` columns are aligned to the left, and the others to the right.

    Only a table for a terminal needs a `width`: a log file has none, and there a folded table cannot be read.
    """
    # Only a table needs rich.
    from rich.box import MARKDOWN
    from rich.console import Console
    from rich.table import Table

    table = Table(box=MARKDOWN)
    for number, title in enumerate(titles):
        table.add_column(title, justify="left" if number < left else "right", overflow="fold")
    for row in rows:
        table.add_row(*(_Cell(printable(cell)) for cell in row))
    text = io.StringIO()
    # In a notebook, rich would display the table instead of writing it to the file.
    Console(file=text, width=width, color_system=None, force_terminal=False, force_jupyter=False).print(table)
    return "\n".join(line for line in text.getvalue().splitlines() if line.strip())


class _Cell:
    """Text that rich breaks between words and, in names and paths, after a dot or a slash."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._pieces = _BREAKS.split(text)

    def __rich_measure__(self, console: Any, options: Any) -> Any:
        from rich.measure import Measurement

        return Measurement(max(len(piece.rstrip()) for piece in self._pieces), len(self._text))

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.text import Text

        lines = [""]
        for piece in self._pieces:
            if len(lines[-1]) + len(piece.rstrip()) > options.max_width and lines[-1]:
                lines.append("")
            lines[-1] += piece
        yield Text("\n".join(line.rstrip() for line in lines))


def fold(named: Iterable[tuple[str, tuple[Any, ...]]]) -> list[tuple[str, tuple[Any, ...], int]]:
    """Fold (name, kind) pairs into families (name, kind, size), in the order of their first members.

    A family's name is such as ``layers.{0...47}.mlp.experts.{0...127}.up_proj.weight``, and its kind such as a dtype
    with a shape. Nothing is lost: a family stands for exactly the names that its numbers make.
    """
    rows: dict[tuple[tuple[Any, ...], tuple[str, ...]], list[tuple[str, ...]]] = {}
    for name, kind in named:
        pieces = _NUMBER.split(name)
        rows.setdefault((kind, tuple(pieces[::2])), []).append(tuple(pieces[1::2]))
    families = []
    for (kind, texts), numbers in rows.items():
        for choices in _products(numbers):
            name = "".join(chain(*zip(texts, [*map(_choice_text, choices), ""], strict=True)))
            families.append((name, kind, prod(map(len, choices))))
    return families


def folded_names(names: Iterable[str]) -> list[str]:
    return [family for family, _, _ in fold((name, ()) for name in names)]


def _products(rows: Sequence[tuple[str, ...]]) -> list[tuple[tuple[str, ...], ...]]:
    """Cut a set of rows of numbers into products of choices: numbers that are followed by the same rows share one."""
    if not rows[0]:
        return [()]
    followers: dict[str, list[tuple[str, ...]]] = {}
    for first, *rest in rows:
        followers.setdefault(first, []).append(tuple(rest))
    alike: dict[tuple[tuple[str, ...], ...], list[str]] = {}
    for first, rest_rows in followers.items():
        alike.setdefault(tuple(sorted(rest_rows)), []).append(first)
    return [(tuple(firsts), *others) for rest_rows, firsts in alike.items() for others in _products(rest_rows)]


def _choice_text(choice: tuple[str, ...]) -> str:
    if len(choice) == 1:
        return choice[0]
    numbers = sorted(map(int, choice))
    if numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{{{numbers[0]}...{numbers[-1]}}}"
    return f"{{{', '.join(map(str, numbers))}}}"


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
