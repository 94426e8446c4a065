"""``doctor --replaced`` and docs/replaced.md: the table of replaced functions, as a page.

``python -m hf_zero_stream.plugins.tools.replaced`` prints the page.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from ...plugin_api import ROWS_OF_CORE, TABLE, PatchScope, Row, Severity, plugins


_HEAD = """\
# Replaced functions

Every function of another library that is replaced, or called though it is private, is a row of a table, and nothing is
replaced outside it. This page is made from it; `hf-zero-stream doctor --replaced` shows it for what is installed.

- After the colon stands ours; what has none is only called, or set.
- If an installed version lacks a row, what needs it is left to stock, with a warning. *Essential*: a `VersionError`.
  *Partitions*: loads under ZeRO-3 are refused too, because stock would take empty partitions for weights. *Speed*:
  slower.
- Rows are in place for a while only, and those of a module once somebody imports it.
"""


def sections() -> Iterator[tuple[PatchScope, list[tuple[str, Row]]]]:
    """Yield each patch scope and its rows, with the name of the plug-in that brings each; "" for the core's."""
    brought = [("", ROWS_OF_CORE), *((plugin.name, plugin.rows) for plugin in plugins())]
    for scope in TABLE:
        yield scope, [(name, row) for name, table in brought for row in table.get(scope, ())]


def data() -> list[dict[str, Any]]:
    """The rows as JSON."""
    return [
        {"installed": scope.description, "plugin": name, **row._asdict(), "severity": row.severity.name.lower()}
        for scope, rows in sections()
        for name, row in rows
    ]


def blocks() -> Iterator[str]:
    """The rows as text: for each patch scope a heading and a list."""
    for scope, rows in sections():
        lines = []
        for _, row in rows:
            versions = "".join(f", {word} {at}" for word, at in (("from", row.since), ("before", row.until)) if at)
            ours = row.leads_to.removeprefix(".").removeprefix("hf_zero_stream.")
            severity = "" if row.severity is Severity.FEATURE else f", {row.severity.name.lower()}"
            lines.append(f"- `{row.of}`{versions}{ours and f': `{ours}`'}{severity}")
        yield f"## {scope.description[0].upper()}{scope.description[1:]}\n\n" + "\n".join(lines)


def replaced(rows: Iterable[Row]) -> set[str]:
    """The functions in whose place `rows` put ours; two rows for one, for different times, are one function."""
    return {row.of for row in rows if row.leads_to}


def page() -> str:
    every, core = (replaced(chain.from_iterable(table.values())) for table in (TABLE, ROWS_OF_CORE))
    count = f"{len(every)} functions are replaced, {len(core)} of them by the core.\n"
    return "\n".join([_HEAD, count, *(f"{block}\n" for block in blocks())])


if __name__ == "__main__":
    print(page(), end="")
