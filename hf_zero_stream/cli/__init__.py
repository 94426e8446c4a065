"""The command line ``hf-zero-stream``; one module per command, none of which imports torch until it runs.

Exit codes: 0 all is well; 1 the check failed, or one of our own errors ended the command; 2 the command line is wrong.
``run`` has those of the command that it becomes.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from .. import __version__
from ..errors import HfZeroStreamError
from ..reports.text import printable


COMMANDS = {
    name: import_module(f".{name}", __package__)
    for name in ("run", "inspect", "plan", "verify", "convert", "demo", "doctor")
}
"""Command -> its module, which has the command's function `run` and an `EXAMPLE`."""


class _Command(TyperCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--json" in args and self.name != "run":  # typer would suggest --revision
            raise typer.BadParameter("no such option: --json; say --format json")
        return super().parse_args(ctx, args)


class _Group(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except HfZeroStreamError as error:
            print(printable(f"{type(error).__name__}: {error}", "\n"), file=sys.stderr)
            raise typer.Exit(1) from error


app = typer.Typer(
    name="hf-zero-stream",
    cls=_Group,
    help="Run training that streams its checkpoints; look at them, and at what loading them will cost, beforehand.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options of no command; the text of the help is that of `app`."""


for _name, _module in COMMANDS.items():
    # What stands behind the command of `run` is that command's, options too.
    _settings = {"allow_interspersed_args": _name != "run"}
    app.command(_name, cls=_Command, epilog=f"Example: {_module.EXAMPLE}", context_settings=_settings)(_module.run)


def main() -> None:
    """The entry point of the script ``hf-zero-stream``."""
    app()
