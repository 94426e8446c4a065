"""Processes in which a plug-in of ours is not there."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from hf_zero_stream import registry
from hf_zero_stream.bindings.table import TABLE
from hf_zero_stream.registry import GROUP


@contextmanager
def without_plugin(name: str) -> Iterator[None]:
    """Inside, as after the folder of the plug-in `name` has been taken away."""
    module = f"{GROUP}.{name}"
    others = [entry for entry in registry._entries() if entry.module != module]
    with ExitStack() as stack:
        stack.callback(registry._found.cache_clear)  # when all is back again
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for each in [module, *(known for known in sys.modules if known.startswith(f"{module}."))]:
            patch.setitem(sys.modules, each, None)
        for moment, rows in TABLE.items():
            left = [row for row in rows if not row.leads_to.startswith(module)]
            patch.setitem(TABLE, moment, left)  # type: ignore[arg-type]
        patch.setattr(registry, "_entries", lambda: others)
        registry._found.cache_clear()
        yield
