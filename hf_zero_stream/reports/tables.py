"""Sizes and tables as plain text, for people."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence

from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table
from rich.text import Text


__all__ = ["bytes_text", "markdown_table", "printable"]


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


def markdown_table(titles: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 0, width: int = 10_000) -> str:
    """A table whose first `left` columns are aligned to the left, and the others to the right.

    Only a table for a terminal needs a `width`: a log file has none, and there a folded table cannot be read.
    """
    table = Table(box=MARKDOWN)
    for number, title in enumerate(titles):
        table.add_column(title, justify="left" if number < left else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    text = io.StringIO()
    # In a notebook, rich would display the table instead of writing it to the file.
    Console(file=text, width=width, color_system=None, force_terminal=False, force_jupyter=False).print(table)
    return "\n".join(line for line in text.getvalue().splitlines() if line.strip())
