"""What sweeps found, as one table: ``docs/models.csv``, and its summary in the page beside it.

A row for each model type, a column for each run. What a sweep did not run stays as it was.
"""

from __future__ import annotations

import csv
import io
import re
from dataclasses import dataclass, field
from typing import Any

from tests.sweep.destinations import FAMILIES, Destination
from tests.sweep.run import Row, Run, Sweep


_TITLES = {
    "zero3": "ZeRO-3 partitions",
    "files": "ZeRO-3, weights in their files",
    "fsdp": "FSDP2",
    "tp": "Tensor parallelism",
    "ep": "Expert parallelism",
    "drawn": 'ZeRO-3 with random_numbers="stock": random numbers',
    "accelerate": "accelerate's FSDP2: random numbers",
}
_CANNOT_BUILD = "cannot be built"
_FACTS = ["type", "class", "parameters", "conversion ops", "materialised", _CANNOT_BUILD]
_OURS = {"equal": "equal", "different": "differs", "failed": "raises", "refused": "refused"}
_OUTCOMES = ("equal", "wrong values", "differs", "raises", "refused")


@dataclass
class Table:
    """Rows by model type, each with a text for each of its columns; first the facts, then the runs."""

    columns: list[str] = field(default_factory=lambda: list(_FACTS))
    rows: dict[str, dict[str, str]] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Table:
        reader = csv.DictReader(io.StringIO(text))
        rows = {row["type"]: row for row in reader}
        return cls(list(reader.fieldnames or _FACTS), rows)

    def put(self, row: str, column: str, text: str) -> None:
        if column not in self.columns:
            self.columns.append(column)
        self.rows.setdefault(row, {"type": row})[column] = text

    def text(self) -> str:
        runs = sorted(self.columns[len(_FACTS) :], key=lambda name: FAMILIES.index(_family(name)))
        file = io.StringIO()
        writer = csv.DictWriter(file, [*_FACTS, *runs], restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(row for _, row in sorted(self.rows.items()))
        return file.getvalue()


def table(result: Sweep, before: str = "") -> str:
    """The file that is kept as ``docs/models.csv``; `before` is what it was."""
    found = Table.parse(before)
    for run, rows in result.rows.items():
        for case_id, row in rows.items():
            case = result.cases[case_id]
            found.put(case_id, "class", case["class"])
            found.put(case_id, "parameters", str(case["parameters"]))
            found.put(case_id, _CANNOT_BUILD, "")
            if row.get("ops"):
                found.put(case_id, "conversion ops", ", ".join(row["ops"]))
            if row.get("materialised") and Destination(run[1]).family == "zero3":
                why = next(iter(row["materialised"].values()))
                found.put(case_id, "materialised", f"{len(row['materialised'])}: {_plain(why, 60)}")
            _put_outcome(found, result, run, case_id, row)
    for case_id, why in result.cannot_build.items():
        found.rows.pop(case_id, None)
        found.put(case_id, _CANNOT_BUILD, _plain(why, 160))
    return found.text()


def page(result: Sweep, versions: str, text: str, before: str) -> str:
    """The page around the table, with a new summary of `text`, the table; `before` is what the page was."""
    found = Table.parse(text)
    cannot = sum(bool(row.get(_CANNOT_BUILD)) for row in found.rows.values())
    made_with = dict(re.findall(rf"^\| ({'|'.join(_TITLES.values())}) \| (.+) \|$", before, re.MULTILINE))
    made_with |= {_TITLES[Destination(destination).family]: versions for _, destination, _ in result.rows}
    lines = [
        f"{len(found.rows) - cannot} model types can be built; {cannot} cannot.",
        "",
        *_summary(found),
        "",
        "| | run with |",
        "| --- | --- |",
        *(f"| {title} | {made_with[title]} |" for title in _TITLES.values() if title in made_with),
    ]
    first, last = "<!-- summary -->\n", "<!-- end of summary -->\n"
    head, _, rest = before.partition(first)
    return "".join([head, first, "\n", *(f"{line}\n" for line in lines), "\n", last, rest.partition(last)[2]])


def _put_outcome(found: Table, result: Sweep, run: Run, case_id: str, row: Row) -> None:
    job, destination, dtype = run
    if job == "ours":
        found.put(case_id, f"{destination} {dtype}", _OURS[result.outcome(run, case_id)])
    else:
        found.put(case_id, f"stock {destination} {dtype}", _of_stock(row))


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


def _family(column: str) -> str:
    return Destination(column.removeprefix("stock ").partition(" ")[0]).family


def _summary(found: Table) -> list[str]:
    """How many models each run has of each outcome; then, folded, which types stock loads otherwise."""
    runs = list(dict.fromkeys(name.removeprefix("stock ") for name in found.columns[len(_FACTS) :]))
    lines = ["| | streamed | stock |", "| --- | --- | --- |"]
    folded = []
    for run in runs:
        ours, stock = _types(found, run), _types(found, f"stock {run}")
        lines.append(f"| {run} | {_counts(ours)} | {_counts(stock)} |")
        for outcome in ("wrong values", "differs"):
            if names := stock.get(outcome):
                folded += ["", f"<details><summary>stock, {run}: {outcome} ({len(names)})</summary>"]
                folded += [", ".join(sorted(names)), "</details>"]
    return [*lines, *folded]


def _types(found: Table, column: str) -> dict[str, list[str]]:
    """The types of a column by their outcome."""
    types: dict[str, list[str]] = {}
    for name, row in found.rows.items():
        if text := row.get(column, ""):
            types.setdefault(text.partition(":")[0].partition(" (")[0], []).append(name)
    return types


def _counts(types: dict[str, list[str]]) -> str:
    total = sum(map(len, types.values()))
    texts = [f"{it} {len(types[it])}" + f" of {total}" * (it == "equal") for it in _OUTCOMES if it in types]
    return ", ".join(texts)


def _plain(text: str, limit: int) -> str:
    """One short line."""
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 3] + "..."
