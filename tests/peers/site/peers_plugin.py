"""Of both arms: writes what became of each phase of a test."""

import json
import os

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when != "call" and report.outcome == "passed":
        return
    text = report.longreprtext[-4000:] if report.failed else str(report.longrepr)[-300:] if report.skipped else ""
    row = {"test": report.nodeid, "outcome": report.outcome, "recorded": dict(report.user_properties), "text": text}
    with open(os.environ["PEERS_RESULTS"], "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
