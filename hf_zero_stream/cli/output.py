"""What all commands share: their common options, and how results are written.

Results go to stdout, as a table or as JSON; everything else (warnings of libraries, progress) goes to stderr.
"""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from enum import Enum
from typing import Annotated, Any

import typer
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table
from rich.text import Text


__all__ = [
    "CheckpointArgument",
    "DequantizeOption",
    "Format",
    "FormatOption",
    "RevisionOption",
    "TrustOption",
    "bytes_text",
    "count_text",
    "emit",
    "printable",
    "quiet",
    "read_json_option",
    "size_option",
    "table",
]


class Format(str, Enum):
    """How a result is written."""

    table = "table"
    json = "json"


FormatOption = Annotated[Format, typer.Option("--format", help="How the result is written to stdout.")]
CheckpointArgument = Annotated[
    str, typer.Argument(metavar="PATH", help="A checkpoint's folder, or the id of a repository on the Hub.")
]
RevisionOption = Annotated[
    str | None, typer.Option("--revision", help="Branch, tag or commit of a repository on the Hub.")
]
TrustOption = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the checkpoint.")
]
DequantizeOption = Annotated[
    bool, typer.Option("--dequantize", help="Of a quantised checkpoint make a model that is not quantised.")
]


def emit(data: Mapping[str, Any], blocks: Iterable[Table | str], form: Format) -> None:
    """Write a result: `data` as JSON, or `blocks` with an empty line between two of them."""
    if form is Format.json:
        print(json.dumps(data, indent=2))
    else:
        print("\n\n".join(printable(block, "\n") if isinstance(block, str) else _text(block) for block in blocks))


def printable(text: str, kept: str = "") -> str:
    """`text` with what a terminal would act on written as escapes: names in checkpoints are anybody's."""
    return "".join(
        character if character.isprintable() or character in kept else ascii(character)[1:-1] for character in text
    )


def _text(table: Table) -> str:
    # A file or a pipe has no width that lines would have to be folded to.
    console = Console(file=io.StringIO(), width=shutil.get_terminal_size().columns if sys.stdout.isatty() else 10_000)
    with console.capture() as captured:
        console.print(table)
    return "\n".join(line for line in captured.get().splitlines() if line.strip())


def table(titles: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> Table:
    """A table of text, whose first `left` columns are aligned to the left and the others to the right."""
    made = Table(box=MARKDOWN)
    for number, title in enumerate(titles):
        made.add_column(title, justify="left" if number < left else "right", overflow="fold")
    for row in rows:
        made.add_row(*(Text(printable(cell)) for cell in row))
    return made


@contextmanager
def quiet() -> Iterator[None]:
    """Libraries that print, or whose loggers write to stdout as DeepSpeed's does, write to stderr inside."""
    with redirect_stdout(sys.stderr):
        yield


def bytes_text(nbytes: float) -> str:
    """Bytes with a binary unit, as in the load report."""
    from ..reports import load_table as report_table  # imports the planner, hence torch

    return report_table.bytes_text(nbytes)


def count_text(count: int, noun: str) -> str:
    """`1 shard`, `4 shards`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def size_option(name: str, text: str | None) -> int | None:
    """The bytes that an option such as ``--device-memory 80GiB`` means; None if it is not given."""
    from ..config import parse_size

    if text is None:
        return None
    parsed = parse_size(text)
    if parsed is None:
        raise typer.BadParameter(f'{name}: expected a size such as "80GiB" or "80GB"; got {text!r}')
    return parsed


def read_json_option(name: str, path: str | None) -> dict[str, Any]:
    """The JSON object in the file that an option names; empty if it is not given."""
    if path is None:
        return {}
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{name}: cannot read {path} as JSON: {error}") from error
    if not isinstance(found, dict):
        raise typer.BadParameter(f"{name}: expected a JSON object in {path}; found {type(found).__name__}")
    return found
