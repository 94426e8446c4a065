"""Commands that look at checkpoints and machines: ``inspect``, ``verify``, ``doctor``."""

from __future__ import annotations

from ...plugin_api import Plugin


PLUGIN = Plugin("tools", commands={name: f"{__name__}.{name}" for name in ("inspect", "verify", "doctor")})
