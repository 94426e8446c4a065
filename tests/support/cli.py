"""Run commands of the command line in this process."""

import itertools
import json
import re
from typing import Any

from typer.testing import CliRunner

from hf_zero_stream.cli import app


USAGE = 2


def run(*arguments: str, code: int = 0) -> Any:
    """Run a command in this process; fails unless it exits with `code`."""
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, f"exit code {result.exit_code}\n{result.output}\n{result.exception!r}"
    return result


def run_json(*arguments: str, code: int = 0) -> Any:
    """The same with ``--format json``; stdout is that and nothing else."""
    return json.loads(run(*arguments, "--format", "json", code=code).stdout)


def unfolded(name: str) -> list[str]:
    """Every name that a folded one stands for."""
    choices = []
    for piece in re.split(r"(\{[^}]*\})", name):
        ends = re.fullmatch(r"\{(\d+)\.\.\.(\d+)\}", piece)
        listed = piece[1:-1].split(", ") if piece.startswith("{") else [piece]
        choices.append(list(map(str, range(int(ends[1]), int(ends[2]) + 1))) if ends else listed)
    return ["".join(choice) for choice in itertools.product(*choices)]
