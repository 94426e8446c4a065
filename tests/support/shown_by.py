"""Which tests show what a table of the documentation says."""

import ast
from collections.abc import Mapping

from tests.support.cluster import ROOT


def assert_tests_exist(shown_by: Mapping[str, str]) -> None:
    """Each entry names tests, separated by spaces, and all of them are defined somewhere below tests/."""
    defined = {
        node.name
        for path in (ROOT / "tests").rglob("test_*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
    for tests in shown_by.values():
        assert tests and set(tests.split()) <= defined, tests
