"""The versions that were tried: the lowest (``make compat``) and the newest (``make drift``)."""

from __future__ import annotations

from packaging.version import Version


TRIED: dict[str, tuple[str, str]] = {
    "torch": ("2.13.0", "2.14.1"),
    "transformers": ("5.1.0", "5.24.0"),
    "accelerate": ("1.4.0", "1.15.0"),
    "safetensors": ("0.4.3", "0.8.0"),
    "deepspeed": ("0.18.9", "0.19.8"),
}
"""By package: from and to. docs/support.md has the same, and what the tests are run with; a test compares them."""


def newer_than_tried(package: str, version: str) -> str:
    """The newest version that was tried, if `version` is of a later release than that; else ""."""
    newest = TRIED.get(package, ("", ""))[1]
    return newest if newest and Version(version).release > Version(newest).release else ""
