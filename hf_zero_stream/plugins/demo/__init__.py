"""The demonstration, and the bundle of ``doctor``."""

from __future__ import annotations

from ...registry import Plugin


PLUGIN = Plugin(
    "demo",
    commands={"demo": f"{__name__}.demo"},
    tools={
        "doctor --bundle": f"{__name__}.bundle:write_bundle",
    },
)
