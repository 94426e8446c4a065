"""``hf-zero-stream doctor``: can this machine, with what is installed and configured, do what it should?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from .output import Format, FormatOption, count_text, emit, quiet, read_json_option, table


if TYPE_CHECKING:
    from .checks import Check

EXAMPLE = "hf-zero-stream doctor /data/checkpoints --ds-config ds.json"

TITLES = {
    "versions": "Versions",
    "features": "What works here",
    "storage": "Storage",
    "settings": "Settings",
}


def run(
    path: Annotated[
        str | None, typer.Argument(metavar="PATH", help="A folder or file whose storage is looked at, and read.")
    ] = None,
    ds_config: Annotated[
        str | None, typer.Option(metavar="FILE", help="A DeepSpeed config to look for mistakes in.")
    ] = None,
    accelerate_config: Annotated[
        str | None, typer.Option(metavar="FILE", help="accelerate's config file; default: its own default.")
    ] = None,
    form: FormatOption = Format.table,
) -> None:
    """Look at versions, DeepSpeed's ops, storage and settings; exit code 1 if anything is a problem.

    With PATH the largest file there is read for its speed, at most 256 MiB of it.
    """
    config = read_json_option("--ds-config", ds_config) if ds_config else None
    with quiet():
        from ..destinations.deepspeed.machine import compatible_ops
        from . import checks

        compatible = compatible_ops()
        found: dict[str, list[Check]] = {
            "versions": list(checks.versions()),
            "features": [*checks.features(compatible), *checks.check_tools()],
            "storage": [] if path is None else list(checks.check_storage(path)),
            "settings": [
                *checks.check_launcher(accelerate_config),
                *([] if config is None else checks.check_ds_config(config)),
            ],
        }
    problems = [check for group in found.values() for check in group if check.status == "problem"]
    data = {
        "healthy": not problems,
        **{name: [asdict(check) for check in group] for name, group in found.items()},
        "ops": compatible,
    }
    emit(data, _blocks(found, compatible, problems), form)
    if problems:
        raise typer.Exit(1)


def _blocks(
    found: Mapping[str, Sequence[Check]], compatible: Mapping[str, bool], problems: Sequence[Check]
) -> Iterator[Table | str]:
    for name, group in found.items():
        if group:
            rows = [(check.what, check.status, check.text) for check in group]
            yield table((TITLES[name], "", ""), rows, left=3)
    can = [name for name, works in compatible.items() if works]
    cannot = [name for name, works in compatible.items() if not works]
    yield f"DeepSpeed's ops that compile here, or are compiled: {', '.join(can) or 'none'}"
    if cannot:
        yield f"and that do not: {', '.join(cannot)}"
    yield f"{count_text(len(problems), 'problem')} found." if problems else "No problem found."
