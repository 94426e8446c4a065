"""The versions that the tests ran with: the lowest (``make compat``) and the newest (``make test``)."""

from __future__ import annotations

from packaging.version import Version


TRIED: dict[str, tuple[str, str]] = {
    "torch": ("2.13.0", "2.13.0"),
    "transformers": ("5.1.0", "5.23.0"),
    "accelerate": ("1.4.0", "1.15.0"),
    "safetensors": ("0.4.3", "0.8.0"),
    "deepspeed": ("0.18.9", "0.19.8"),
}
"""By package: from and to. The files of constraints and docs/support.md have the same; a test compares them."""


def newer_than_tried(package: str, version: str) -> str:
    """The newest version that was tried, if `version` is of a later release than that; else ""."""
    newest = TRIED.get(package, ("", ""))[1]
    return newest if newest and Version(version).release > Version(newest).release else ""
