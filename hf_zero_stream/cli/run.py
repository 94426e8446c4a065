"""``hf-zero-stream run``: any command, with streaming in each Python process that it starts."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from ..errors import ConfigError
from ..prefix import environment
from ..settings.config import REPORT_VARIABLE, check_environment


EXAMPLE = "hf-zero-stream run accelerate launch --config_file zero3.yaml train.py"


def run(
    command: Annotated[
        list[str], typer.Argument(metavar="COMMAND", help="What you type without us; a script.py is run by Python.")
    ],
    stock_states: Annotated[
        bool,
        typer.Option(
            "--stock-states", help="Leave training states (not weights) to DeepSpeed and accelerate, in their formats."
        ),
    ] = False,
    report: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Add the report of each load, save and resume to FILE, as a line of JSON."),
    ] = None,
) -> None:
    """Run COMMAND with streaming in each rank that it starts.

    Launchers, scripts that start their ranks themselves, and command lines of training tools all work. Exit code,
    signals, input and output are the own ones of COMMAND. A child that has HF_ZERO_STREAM_RUN=0 in its environment is
    left alone, and HF_ZERO_STREAM_DISABLE=1 leaves everything to stock.
    """
    try:
        check_environment()
    except ConfigError as error:
        _refuse(str(error), 2)
    environ = environment(os.environ)
    if report is not None:
        try:
            report.open("ab").close()
        except OSError as error:
            _refuse(f"--report {report}: cannot be written: {error.strerror}", 2)
        environ[REPORT_VARIABLE] = str(report.absolute())
    if command[0].endswith(".py"):
        command = [sys.executable, *command]
    states = {"HF_ZERO_STREAM_TRAINING_STATE": "0"} if stock_states else {}
    try:
        os.execvpe(command[0], command, environ | states)
    except OSError as error:  # the codes of a shell
        _refuse(f"cannot run {command[0]}: {error.strerror}", 127 if isinstance(error, FileNotFoundError) else 126)


def _refuse(why: str, code: int) -> None:
    print(f"hf-zero-stream run: {why}", file=sys.stderr)
    raise typer.Exit(code)
