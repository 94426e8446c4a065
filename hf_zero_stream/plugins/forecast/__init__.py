"""What a load reads and what memory training needs, computed before and without it: ``plan()``, its command."""

from __future__ import annotations

from ...plugin_api import Plugin


PLUGIN = Plugin(
    "forecast",
    commands={"plan": f"{__name__}.command"},
    tools={"forecast": f"{__name__}.memory:model_memory"},
)
