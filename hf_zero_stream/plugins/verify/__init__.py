"""Loads with ``verify="sample"`` or ``"full"`` compare what they placed with the files."""

from __future__ import annotations

from ...plugin_api import Plugin


PLUGIN = Plugin("verify", tools={"verify": f"{__name__}.verification:Verifier"})
