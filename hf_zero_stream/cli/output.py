"""Writes the results of commands to stdout, as text or as JSON; warnings of libraries and progress go to stderr."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any, Literal

import typer
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table
from rich.text import Text


__all__ = ["bytes_text", "count_text", "emit", "printable", "quiet", "table"]


def emit(
    data: Mapping[str, Any], blocks: Iterable[Table | str], form: Literal["table", "json"], *, ok: bool = True
) -> None:
    """Write `data` as JSON, or `blocks` with an empty line between two of them; exit with code 1 if not `ok`."""
    if form == "json":
        print(json.dumps(data, indent=2))
    else:
        print("\n\n".join(printable(block, "\n") if isinstance(block, str) else _text(block) for block in blocks))
    if not ok:
        raise typer.Exit(1)


def printable(text: str, kept: str = "") -> str:
    """`text` with its control characters escaped: anybody can choose the names in a checkpoint."""
    return "".join(
        character if character.isprintable() or character in kept else ascii(character)[1:-1] for character in text
    )


def table(titles: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> Table:
    """A table whose first `left` columns are aligned to the left, and the others to the right."""
    made = Table(box=MARKDOWN)
    for number, title in enumerate(titles):
        made.add_column(title, justify="left" if number < left else "right", overflow="fold")
    for row in rows:
        made.add_row(*(Text(printable(cell)) for cell in row))
    return made


def _text(table: Table) -> str:
    # Fold lines to the width of a terminal; do not fold them in a file or a pipe.
    console = Console(file=io.StringIO(), width=shutil.get_terminal_size().columns if sys.stdout.isatty() else 10_000)
    with console.capture() as captured:
        console.print(table)
    return "\n".join(line for line in captured.get().splitlines() if line.strip())


@contextmanager
def quiet() -> Iterator[None]:
    """Inside, what libraries write to stdout goes to stderr; DeepSpeed logs there."""
    with redirect_stdout(sys.stderr):
        yield


def bytes_text(nbytes: float) -> str:
    from ..reports import load_table  # imports torch

    return load_table.bytes_text(nbytes)


def count_text(count: int, noun: str) -> str:
    """`1 shard`, `4 shards`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
