"""The command line ``hf-zero-stream``; one module per command, none of which imports torch until it runs.

Exit codes: 0 all is well; 1 the check failed, or one of our own errors ended the command; 2 the command line is wrong.
``run`` has those of the command that it becomes.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from .. import __version__
from ..errors import HfZeroStreamError, MissingPluginError
from ..registry import broken_plugins, import_named, missing_plugin_error, plugins
from ..reports.text import printable
from .frame import has_colours


OF_PLUGINS = {
    **{"inspect": "tools", "plan": "forecast", "verify": "tools", "doctor": "tools"},
    **{"demo": "demo", "convert": "pickled"},
}
"""Commands of this package's own plug-ins, for the error where the plug-in is not there."""


def commands() -> dict[str, str]:
    """Command -> its module, which has the command's function `run` and an `EXAMPLE`."""
    found = {"run": ".cli.run"} | {name: place for plugin in plugins() for name, place in plugin.commands.items()}
    return {name: found[name] for name in ("run", *OF_PLUGINS, *found) if name in found}


class _Command(TyperCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--json" in args and self.name != "run":  # typer would suggest --revision
            raise typer.BadParameter("no such option: --json; say --format json")
        return super().parse_args(ctx, args)


class _CommandGroup(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return [*commands()]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        module = commands().get(cmd_name)
        if module is None and cmd_name in OF_PLUGINS:
            raise missing_plugin_error(OF_PLUGINS[cmd_name], f"hf-zero-stream {cmd_name}")
        if module is None and broken_plugins():
            raise MissingPluginError(f"hf-zero-stream {cmd_name}: no such command. {broken_plugins()}")
        if module is not None and cmd_name not in self.commands:
            try:
                self.commands[cmd_name] = _load_command(cmd_name, module)
            except MissingPluginError as error:  # the help of all shows the others, and why this one is none
                self.commands[cmd_name] = _broken_command(cmd_name, error)
        return super().get_command(ctx, cmd_name)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except HfZeroStreamError as error:
            name = type(error).__name__
            print(
                typer.style(name, fg="red") if has_colours(sys.stderr) else name,
                printable(str(error), "\n"),
                sep=": ",
                file=sys.stderr,
            )
            raise typer.Exit(1) from error


app = typer.Typer(
    name="hf-zero-stream",
    cls=_CommandGroup,
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


def _load_command(name: str, place: str) -> Any:
    """The command `name`, whose module, at `place`, is imported now."""
    module: Any = import_named(place)
    alone = typer.Typer(rich_markup_mode=None, add_completion=False)
    # What stands behind the command of `run` is that command's, options too.
    settings = {"allow_interspersed_args": name != "run"}
    alone.command(name, cls=_Command, epilog=f"Example: {module.EXAMPLE}", context_settings=settings)(module.run)
    return typer.main.get_command(alone)


def _broken_command(name: str, error: MissingPluginError) -> Any:
    """The command `name` of a plug-in that cannot be imported."""

    def run() -> None:
        raise error

    anything = {"ignore_unknown_options": True, "allow_extra_args": True}
    return TyperCommand(name, callback=run, help=str(error), context_settings=anything)


def main() -> None:
    """The entry point of the script ``hf-zero-stream``."""
    app()
