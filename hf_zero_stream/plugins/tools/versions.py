"""The versions that were tried: the lowest (``make compat``) and the newest (``make drift``)."""

from __future__ import annotations

from packaging.version import Version


TRIED: dict[str, tuple[str, str]] = {
    "torch": ("2.13.0", "2.15.0"),
    "transformers": ("5.1.0", "5.24.0"),
    "accelerate": ("1.4.0", "1.15.0"),
    "safetensors": ("0.4.3", "0.8.0"),
    "deepspeed": ("0.18.9", "0.19.8"),
}
"""First and last version of each package. docs/support.md has them too, with those of the tests; a test compares."""


def newer_than_tried(package: str, version: str) -> str:
    """The newest version that was tried, if `version` is of a later release than that; else ""."""
    newest = TRIED.get(package, ("", ""))[1]
    return newest if newest and Version(version).release > Version(newest).release else ""
