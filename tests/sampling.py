"""How tests find out that only a sample of them runs: see :mod:`tests`."""

from collections.abc import Iterable
from typing import TypeVar

import pytest


Thing = TypeVar("Thing")


is_sample = False
"""Whether slow tests are left out. `conftest.py` says so before it looks for tests."""


def chosen(request: pytest.FixtureRequest, names: Iterable[str], parameter: str = "name") -> list[str]:
    """Those of `names` that a row of this module has as its `parameter`, of the rows that are about to run."""
    rows = [item for item in request.session.items if isinstance(item, pytest.Function) and hasattr(item, "callspec")]
    wanted = {row.callspec.params.get(parameter) for row in rows if row.path == request.path}
    return [name for name in names if name in wanted]


def every(step: int, things: Iterable[Thing]) -> list[Thing]:
    """Each `step`-th of the `things` that one test goes over, and all of them in ``make test-all``."""
    return list(things)[:: step if is_sample else 1]


def examples(count: int) -> int:
    """How many generated examples a test tries which tries `count` in ``make test-all``."""
    return count // 10 if is_sample else count
