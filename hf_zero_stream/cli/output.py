"""Writes the results of commands to stdout, as text or as JSON; warnings of libraries and progress go to stderr."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from typing import Any, Literal, TextIO

import typer

from ..reports.text import markdown_table, printable


__all__ = ["emit", "quiet", "table"]


def emit(data: Mapping[str, Any], blocks: Iterable[str], form: Literal["table", "json"], *, ok: bool = True) -> None:
    """Write `data` as JSON, or `blocks` with an empty line between two of them; exit with code 1 if not `ok`."""
    if form == "json":
        print(json.dumps(data, indent=2))
    else:
        print("\n\n".join(printable(block, "\n") for block in blocks))
    if not ok:
        raise typer.Exit(1)


def table(titles: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A table that a terminal folds to its own width, and a file or a pipe does not."""
    width = {"width": shutil.get_terminal_size().columns} if sys.stdout.isatty() else {}
    return markdown_table(titles, rows, left=left, **width)


def quiet() -> redirect_stdout[TextIO]:
    """Inside, what libraries write to stdout goes to stderr; DeepSpeed logs there."""
    return redirect_stdout(sys.stderr)
