"""Two arms of a suite, compared test by test."""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple


_WORST = ("passed", "skipped", "failed")


class Result(NamedTuple):
    """What became of a test.

    Attributes:
        outcome: "passed", "skipped" or "failed".
        recorded: what it has recorded of itself; the same in both arms.
        text: the end of its error, or the reason why it was skipped.
    """

    outcome: str
    recorded: Mapping[str, Any]
    text: str = ""


def read_results(path: Path) -> dict[str, Result]:
    """By test, from the lines of :mod:`.site.peers_plugin`: one for each phase, of which the worst counts."""
    found: dict[str, Result] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        row = json.loads(line)
        new, old = Result(row["outcome"], row["recorded"], row["text"]), found.get(row["test"])
        if old is None or _WORST.index(new.outcome) >= _WORST.index(old.outcome):
            found[row["test"]] = new
    return found


def differences(stock: Mapping[str, Result], ours: Mapping[str, Result]) -> list[str]:
    """Each test that one arm has not run, that came out otherwise, or that recorded something else."""
    found = []
    for test in sorted(stock.keys() | ours.keys()):
        if test not in stock or test not in ours:
            found.append(f"{test}: only in the arm {'stock' if test in stock else 'ours'}")
            continue
        theirs, mine = stock[test], ours[test]
        if theirs.outcome != mine.outcome:
            failed = mine if mine.outcome == "failed" else theirs
            found.append(f"{test}: stock {theirs.outcome}, ours {mine.outcome}\n{failed.text}")
        for name in sorted(theirs.recorded.keys() | mine.recorded.keys()) if mine.outcome == "passed" else ():
            pair = theirs.recorded.get(name), mine.recorded.get(name)
            if theirs.outcome == "passed" and pair[0] != pair[1]:
                found.append(f"{test}: {name}: stock {pair[0]}, ours {pair[1]}")
    return found


def faults_of(
    stock: Mapping[str, Result], ours: Mapping[str, Result], events: Mapping[str, Mapping[str, int]]
) -> list[str]:
    """The differences, and why they would mean nothing; `events`: how often what streamed, by arm."""
    found = differences(stock, ours)
    if not Counter(result.outcome for result in ours.values())["passed"]:
        found.append("no test has passed: nothing was compared")
    if not events["ours"].get("load"):
        found.append("no load has streamed in the arm ours: it is stock's as well")
    if events["stock"]:
        found.append(f"the arm stock was not without us: {dict(events['stock'])}")
    return found
