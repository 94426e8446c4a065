"""The demonstration, and what commands draw, suggest and bundle."""

from __future__ import annotations

from ...registry import Plugin


PLUGIN = Plugin(
    "demo",
    commands={"demo": f"{__name__}.demo"},
    tools={
        "plan --suggest": f"{__name__}.suggest:suggest",
        "plan --plot": f"{__name__}.picture:draw",
        "plan --html": f"{__name__}.picture:as_svg",
        "doctor --bundle": f"{__name__}.bundle:write_bundle",
    },
)
