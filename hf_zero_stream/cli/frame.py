"""Arguments, options, parsers and output that commands share.

A parser raises typer.BadParameter: typer puts the option's name before the message, and exits with code 2. Results go
to stdout, as text or as JSON; warnings of libraries and progress go to stderr.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO

import typer

from ..reports.text import markdown_table, printable
from ..settings.values import SHORT_DTYPES, parse_size, torch_name


_COLOURS = {
    "red": r"DOES NOT FIT|DIFFERENT|✗|^\d+ (faults?|problems? found)\b|(?<=\| )(problem|no)(?= +\|)",
    "yellow": r"tight: fits|^Warning:|^Note:|(?<=\| )(note|tight)(?= +\|)",
    "green": r"(?<!tight: )fits into|✓|^No (fault|problem) found|(?<=\| )(ok|yes)(?= +\|)",
}
"""The words that have a colour on a terminal."""


def json_object(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"cannot read {path} as JSON: {error}") from error
    if not isinstance(found, dict):
        raise typer.BadParameter(f"expected a JSON object in {path}; found {type(found).__name__}")
    return found


def size(text: str) -> int:
    """Parse a size such as "80GiB" into bytes."""
    parsed = parse_size(text)
    if parsed is None or text.strip().isdigit():  # "80" is meant as gigabytes, and would be 80 bytes
        raise typer.BadParameter(f'expected a size such as "80GiB" or "80GB"; got {text!r}')
    return parsed


def _training_dtype(text: str) -> str:
    short = next((short for short, name in SHORT_DTYPES.items() if name == torch_name(text)), None)
    if short is None:
        raise typer.BadParameter(f"expected bfloat16, float16 or float32 (bf16, fp16, fp32); got {text!r}")
    return short


def file_to_write(*endings: str, draws: bool = False) -> Callable[[str], Path]:
    """A parser of the name of a file that ends in one of `endings`, in a folder that is there.

    If it `draws`, the file is for matplotlib's pictures.
    """

    def parsed(text: str) -> Path:
        path = Path(text)
        if draws and find_spec("matplotlib") is None:
            raise typer.BadParameter("this needs matplotlib: pip install matplotlib")
        if path.suffix not in endings:
            raise typer.BadParameter(f"expected a name that ends in one of {', '.join(endings)}; got {path}")
        if not path.absolute().parent.is_dir():
            raise typer.BadParameter(f"there is no folder {path.parent}")
        return path

    return parsed


def ds_config_option(*stages: int) -> Any:
    """The option that names a DeepSpeed config of one of these stages of ZeRO."""

    def parsed(path: str) -> dict[str, Any]:
        config = json_object(path)
        zero = config.get("zero_optimization")
        stage = zero.get("stage") if isinstance(zero, dict) else None
        if stage not in stages:
            expected = " or ".join(map(str, stages))
            raise typer.BadParameter(f"expected zero_optimization.stage {expected}; found {stage!r} in {path}")
        return config

    return typer.Option(metavar="FILE", parser=parsed, help="DeepSpeed config; default: ZeRO-3 with AdamW.")


CheckpointArgument = Annotated[
    str, typer.Argument(metavar="PATH", help="A checkpoint's folder or URL, or the id of a repository on the Hub.")
]
FormatOption = Annotated[
    Literal["table", "json"], typer.Option("--format", help="How the result is written to stdout.")
]
RevisionOption = Annotated[str | None, typer.Option(help="Branch, tag or commit of a repository on the Hub.")]
TrustOption = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the checkpoint.")
]
DequantizeOption = Annotated[
    bool, typer.Option("--dequantize", help="Make a model that is not quantised of a quantised checkpoint.")
]
PageOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        parser=file_to_write(".html", draws=True),
        help="Write a page with a picture and these tables: .html.",
    ),
]
DtypeOption = Annotated[
    str | None,
    typer.Option(
        metavar="DTYPE", parser=_training_dtype, help="Dtype to train in, whatever the config says: bfloat16, ..."
    ),
]


def config_with_dtype(given: Mapping[str, Any] | None, dtype: str | None) -> dict[str, Any]:
    """The DeepSpeed config of ``--ds-config`` (default: plain ZeRO-3), with the training dtype of ``--dtype``."""
    config = dict(given or {"zero_optimization": {"stage": 3}})
    if dtype is None:
        return config
    without = {key: value for key, value in config.items() if key not in ("bf16", "bfloat16", "fp16")}
    return without if dtype == "fp32" else {**without, dtype: {"enabled": True}}


def emit(data: Mapping[str, Any], blocks: Iterable[str], form: Literal["table", "json"], *, ok: bool = True) -> None:
    """Write `data` as JSON, or `blocks` with an empty line between two of them; exit with code 1 if not `ok`."""
    if form == "json":
        print(json.dumps(data, indent=2))
    else:
        for number, block in enumerate(blocks):
            show(block, first=not number)
    if not ok:
        raise typer.Exit(1)


def show(block: str, *, first: bool) -> None:
    """Write a block of text, after an empty line unless it is the `first`."""
    lines, width = printable(block, "\n").splitlines(), _terminal_width()
    # A table has its width already, and a long path or name stays whole.
    if width:
        wrap = textwrap.TextWrapper(width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        lines = [line if line[:1] == "|" else wrap.fill(line) for line in lines]
    if has_colours(sys.stdout):
        lines = [_coloured(line) for line in lines]
    print(*([] if first else [""]), *lines, sep="\n", flush=True)


def has_colours(stream: TextIO) -> bool:
    """Whether `stream` is a terminal whose user wants colours (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _coloured(line: str) -> str:
    for colour, words in _COLOURS.items():
        line = re.sub(words, lambda found, colour=colour: typer.style(found[0], fg=colour), line)  # type: ignore[misc]
    return line


def table(titles: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A table that a terminal folds to its own width, and a file or a pipe does not."""
    width = _terminal_width()
    return markdown_table(titles, rows, left=left, **({"width": width} if width else {}))


def _terminal_width() -> int:
    """Columns of the terminal that results go to; 0 if they go elsewhere."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 0


@contextmanager
def quiet() -> Iterator[None]:
    """Send what libraries write to stdout to stderr, inside; some log errors only.

    Their warnings are of this machine's accelerator, which need not be the one that will train, or of patterns that
    PEFT itself has put into a config.
    """
    for name in ("DeepSpeed", "bitsandbytes.backends.cpu.ops"):
        logging.getLogger(name).addFilter(_errors_only)
    with warnings.catch_warnings(), redirect_stdout(sys.stderr):
        warnings.filterwarnings("ignore", category=RuntimeWarning, module="peft")
        yield


def _errors_only(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR
