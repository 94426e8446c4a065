"""The demonstration."""

from __future__ import annotations

from ...plugin_api import Plugin


PLUGIN = Plugin(
    "demo",
    commands={"demo": f"{__name__}.demo"},
)
