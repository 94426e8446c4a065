"""What sweeps found, as tables in Markdown. Columns and rows that a sweep did not run stay as they were."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.sweep.destinations import FAMILIES, Destination
from tests.sweep.run import Case, Row, Run, Sweep


__all__ = ["markdown"]

_TITLES = {
    "zero3": "ZeRO-3 partitions",
    "fsdp": "FSDP2",
    "tp": "Tensor parallelism",
    "ep": "Expert parallelism",
}
_CANNOT_BUILD = "Types that cannot be built"
_OURS = {"equal": "equal", "different": "**differs**", "failed": "**fails**", "refused": "refused"}
_INTRODUCTION = """# Model types

Written by `make sweep`.

Each row is a tiny random model of one model type, saved in the hub's layout, loaded by plain `from_pretrained` and
streamed into the shards of several ranks: `zero3x2` are ZeRO-3 partitions on two ranks, the others the sizes in
`from_pretrained(distributed_config=...)`; `replicate2-fsdp2` is HSDP. `fp32-bf16` are files in fp32, loaded in bf16.
*equal* means: every parameter, buffer, dtype, tie, `requires_grad`, the training flag and the loading info, bit for
bit, on every rank, and `save_pretrained` writes the files of the plain model. *refused*: torch or transformers do not
shard this model, and stock raises the same error. An empty cell was not run. What *stock* does with the same arguments
stands beside it: where `distributed_config` shards a model, stock cuts the checkpoint's tensors first, and converts
the pieces, which is wrong, without an error, if a conversion splits or permutes what was cut.
"""


@dataclass
class _Table:
    """The rows of one family of destinations, each with a text for each of its columns."""

    made_with: str = ""
    columns: list[str] = field(default_factory=list)
    rows: dict[str, dict[str, str]] = field(default_factory=dict)

    def put(self, row: str, column: str, text: str) -> None:
        if column not in self.columns:
            self.columns.append(column)
        self.rows.setdefault(row, {})[column] = text

    def lines(self) -> list[str]:
        heads = ["type", *self.columns]
        rows = [
            [f"`{row}`", *(cells.get(name, "") for name in self.columns)] for row, cells in sorted(self.rows.items())
        ]
        return [f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows)]


def markdown(result: Sweep, versions: str, before: str = "") -> str:
    """The file that is kept as ``docs/models.md``; `before` is what it was."""
    tables = {family: _table_of(before, title) for family, title in _TITLES.items()}
    for run, rows in result.rows.items():
        table = tables[Destination(run[1]).family]
        table.made_with = f"Made with {versions}."
        for case_id, row in rows.items():
            _put_facts(table, result.cases[case_id], row, is_zero3=table is tables["zero3"])
            _put_outcome(table, result, run, case_id, row)
    cannot_build = _table_of(before, _CANNOT_BUILD)
    for case_id in result.cases:
        cannot_build.rows.pop(case_id, None)
    for case_id, why in result.cannot_build.items():
        cannot_build.put(case_id, "why", _plain(why, 160))
    built = set().union(*(table.rows for table in tables.values()))
    counts = f"{len(built)} model types can be built; {len(cannot_build.rows)} cannot."
    lines = [_INTRODUCTION, "## Summary", "", counts, "", *_summary(tables), ""]
    for family in FAMILIES:
        if tables[family].rows:
            lines += [f"## {_TITLES[family]}", "", tables[family].made_with, "", *tables[family].lines(), ""]
    return "\n".join([*lines, f"## {_CANNOT_BUILD}", "", *cannot_build.lines()]) + "\n"


def _table_of(text: str, title: str) -> _Table:
    """The table under this heading; an empty one if there is none."""
    _, _, section = text.partition(f"\n## {title}\n")
    section = section.partition("\n## ")[0]
    found = [line[2:-2].split(" | ") for line in section.splitlines() if line.startswith("| ")]
    if not found:
        return _Table()
    (_, *columns), _, *rows = found
    made_with = section.strip().partition("\n")[0]
    cells = {name.strip("`"): dict(zip(columns, texts, strict=True)) for name, *texts in rows}
    return _Table(made_with if made_with.startswith("Made") else "", columns, cells)


def _put_facts(table: _Table, case: Case, row: Row, *, is_zero3: bool) -> None:
    name = case["id"]
    if is_zero3:
        table.put(name, "class", case["class"])
        table.put(name, "parameters", f"{case['parameters']:,}")
    table.put(
        name, "conversion ops", ", ".join(row.get("ops", ())) or table.rows.get(name, {}).get("conversion ops", "")
    )
    materialised = row.get("materialised")
    if materialised:
        table.put(name, "materialised", f"{len(materialised)}: {_plain(next(iter(materialised.values())), 60)}")


def _put_outcome(table: _Table, result: Sweep, run: Run, case_id: str, row: Row) -> None:
    job, destination, dtype = run
    if job == "ours":
        table.put(case_id, f"{destination} {dtype}", _OURS[result.outcome(run, case_id)])
    else:
        table.put(case_id, f"stock {destination} {dtype}", _of_stock(row))


def _of_stock(row: dict[str, Any]) -> str:
    if "error" in row:
        others = f" (other ranks {row['others']})" if row.get("others") else ""
        return f"raises{others}: {_plain(row['error'], 80)}"
    if not row["differences"]:
        return "equal"
    wrong = [match[1] for what in row["differences"] if (match := re.fullmatch(r"\w+ (\S+): wrong values", what))]
    if not wrong:
        return f"differs: {_plain(row['differences'][0], 80)}"
    places = sorted({(name.removesuffix(".weight").removesuffix(".bias")).rpartition(".")[2] for name in wrong})
    return f"wrong values: {_plain(', '.join(places), 80)} ({len(wrong)} tensors)"


def _summary(tables: dict[str, _Table]) -> list[str]:
    """How many models each column has of each outcome."""
    outcomes = ("equal", "wrong values", "differs", "raises", "refused")
    lines = [f"| | models | {' | '.join(outcomes)} |", "| --- |" + " --: |" * (1 + len(outcomes))]
    for table in tables.values():
        for column in table.columns:
            cells = [text for row in table.rows.values() if (text := row.get(column, ""))]
            found = Counter(
                text.strip("*").replace("fails", "raises").partition(":")[0].partition(" (")[0] for text in cells
            )
            if cells and set(found) <= set(outcomes):
                counts = " | ".join(str(found[outcome] or "") for outcome in outcomes)
                lines.append(f"| {column} | {len(cells)} | {counts} |")
    return lines


def _plain(text: str, limit: int) -> str:
    """One line that does not break a table."""
    text = " ".join(text.split()).replace("|", "/").replace("<", "&lt;").replace("`", "'").replace("*", "\\*")
    return text if len(text) <= limit else text[: limit - 3] + "..."
