"""What a sweep found, as counts for the terminal and as a table in Markdown."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tests.sweep.run import Sweep


__all__ = ["counts", "failures", "markdown"]

_OURS = {"equal": "equal", "different": "**differs**", "failed": "**fails**", "": ""}


def counts(result: Sweep) -> str:
    """One line per job, dtype and world size."""
    lines = [f"built {len(result.cases)} model types; {len(result.cannot_build)} cannot be built"]
    for (job, dtype, world_size), rows in result.rows.items():
        found = Counter(result.outcome(job, dtype, world_size, case_id) for case_id in rows)
        parts = ", ".join(f"{found[name]} {name}" for name in ("equal", "different", "failed"))
        lines.append(f"{job} {dtype}, {world_size} ranks: {parts}")
    lines.append("seconds: " + ", ".join(f"{stage} {seconds:g}" for stage, seconds in result.seconds.items()))
    return "\n".join(lines)


def failures(result: Sweep) -> list[str]:
    """A line for each of our rows that is not equal."""
    lines = []
    for (job, dtype, world_size), rows in result.rows.items():
        for case_id, row in rows.items() if job == "ours" else ():
            what = row.get("error") or "; ".join(row["differences"][:3])
            if what:
                lines.append(f"{case_id} ({dtype}, {world_size} ranks): {what.splitlines()[0][:300]}")
    return lines


def markdown(result: Sweep, versions: str) -> str:
    """The table that is kept in ``docs/models.md``."""
    runs = [key for key in result.rows if key[0] == "ours"]
    stock = next((key for key in result.rows if key[0] == "stock"), None)
    heads = ["type", "class", "parameters", "conversion ops"]
    heads += [f"{dtype}, {world_size} ranks" for _, dtype, world_size in runs]
    heads += ["stock under ZeRO-3"] if stock else []
    heads += ["materialised"]
    lines = [
        "# Model types",
        "",
        f"Made by `make sweep` with {versions}.",
        "",
        "Each row is a tiny random model of one model type, saved in the hub's layout, loaded by plain",
        "`from_pretrained` and streamed into ZeRO-3 partitions, through its own class and through a Streaming Auto",
        "class. *equal* means: every parameter, buffer, tie, `requires_grad`, the training flag and the loading info,",
        "bit for bit, on every rank.",
        "",
        *(f"- {line}" for line in counts(result).splitlines()[:-1]),
        "",
        "| " + " | ".join(heads) + " |",
        "|" + " --- |" * len(heads),
    ]
    for case_id, case in sorted(result.cases.items()):
        rows = [result.rows[key].get(case_id, {}) for key in runs]
        ops = sorted({op for row in rows for op in row.get("ops", ())})
        materialised = {name: why for row in rows for name, why in row.get("materialised", {}).items()}
        cells = [f"`{case_id}`", case["class"], f"{case['parameters']:,}", ", ".join(ops)]
        cells += [_OURS[result.outcome(*key, case_id)] for key in runs]
        cells += [_stock_cell(result.rows[stock].get(case_id))] if stock else []
        cells += [f"{len(materialised)}: {_plain(next(iter(materialised.values())), 60)}" if materialised else ""]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "## Types that cannot be built", "", "| type | why |", "| --- | --- |"]
    lines += [f"| `{case_id}` | {_plain(why, 160)} |" for case_id, why in sorted(result.cannot_build.items())]
    return "\n".join(lines) + "\n"


def _stock_cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    if "error" in row:
        others = f" (other ranks {row['others']})" if row.get("others") else ""
        return f"raises{others}: {_plain(row['error'], 80)}"
    if row["differences"]:
        return f"differs: {_plain(row['differences'][0], 80)}"
    return "equal"


def _plain(text: str, limit: int) -> str:
    """One line that does not break a table."""
    text = " ".join(text.split()).replace("|", "/").replace("<", "&lt;").replace("`", "'").replace("*", "\\*")
    return text if len(text) <= limit else text[: limit - 3] + "..."
