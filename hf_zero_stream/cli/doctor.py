"""``hf-zero-stream doctor``: can this machine, with what is installed and configured, do what it should?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from .options import FormatOption, json_object
from .output import count_text, emit, quiet, table


if TYPE_CHECKING:
    from .checks import Check

EXAMPLE = "hf-zero-stream doctor /data/checkpoints --ds-config ds.json"


def run(
    path: Annotated[
        str | None, typer.Argument(metavar="PATH", help="A folder or file whose storage is looked at, and read.")
    ] = None,
    ds_config: Annotated[
        dict[str, Any] | None,
        typer.Option(metavar="FILE", parser=json_object, help="A DeepSpeed config to look for mistakes in."),
    ] = None,
    accelerate_config: Annotated[
        str | None, typer.Option(metavar="FILE", help="accelerate's config file; default: its own default.")
    ] = None,
    form: FormatOption = "table",
) -> None:
    """Look at versions, DeepSpeed's ops, storage and settings; exit code 1 if anything is a problem.

    With PATH the largest file there is read for its speed, at most 256 MiB of it.
    """
    with quiet():
        from ..destinations.deepspeed.machine import compatible_ops
        from . import checks

        ops = compatible_ops()
        found = {
            "versions": list(checks.check_versions()),
            "features": list(checks.check_features(ops)),
            "storage": [] if path is None else list(checks.check_storage(path)),
            "settings": list(checks.check_launcher(accelerate_config)),
        }
        if ds_config is not None:
            found["settings"] += checks.check_ds_config(ds_config)
    problems = sum(check.status == "problem" for group in found.values() for check in group)
    data = {
        "healthy": not problems,
        **{name: [check._asdict() for check in group] for name, group in found.items()},
        "ops": ops,
    }
    emit(data, _blocks(found, ops, problems), form, ok=not problems)


def _blocks(found: Mapping[str, list[Check]], ops: Mapping[str, bool], problems: int) -> Iterator[Table | str]:
    titles = {"versions": "Versions", "features": "What works here", "storage": "Storage", "settings": "Settings"}
    for name, group in found.items():
        if group:
            yield table((titles[name], "", ""), group, left=3)
    can, cannot = ([name for name, works in ops.items() if works is wanted] for wanted in (True, False))
    yield f"DeepSpeed's ops that compile here, or are compiled: {', '.join(can) or 'none'}"
    if cannot:
        yield f"and that do not: {', '.join(cannot)}"
    yield f"{count_text(problems, 'problem')} found." if problems else "No problem found."
