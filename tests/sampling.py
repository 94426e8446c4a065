"""How tests find out that only a sample of them runs: see :mod:`tests`."""

from __future__ import annotations

from collections.abc import Iterable

import pytest


__all__ = ["chosen", "examples", "is_sample"]

is_sample = False
"""Whether slow tests are left out. `conftest.py` says so before it looks for tests."""


def chosen(request: pytest.FixtureRequest, names: Iterable[str], parameter: str = "name") -> list[str]:
    """Those of `names` that a row of this module has as its `parameter`, of the rows that are about to run."""
    rows = [item for item in request.session.items if isinstance(item, pytest.Function) and hasattr(item, "callspec")]
    wanted = {row.callspec.params.get(parameter) for row in rows if row.path == request.path}
    return [name for name in names if name in wanted]


def examples(count: int) -> int:
    """How many generated examples a test tries which tries `count` in ``make test-all``."""
    return count // 4 if is_sample else count
