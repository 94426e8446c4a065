"""Refuse installed versions of other packages that lack what this package relies on."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata

from packaging.requirements import Requirement

from .errors import VersionError


__all__ = ["refuse_unknown_version"]

PACKAGE = "hf_zero_stream"


def refuse_unknown_version(package: str, missing: Sequence[str], purpose: str = "") -> None:
    """Raise a :class:`VersionError` if names are `missing` in the installed `package`; `purpose`: what needs them."""
    if missing:
        need = f", which {purpose} needs" if purpose else ""
        raise VersionError(
            f"{package} {metadata.version(package)} has no {', '.join(missing)}{need}; this version is not known to "
            f"{PACKAGE}: install {_requirement(package)} or a newer {PACKAGE}."
        )


def _requirement(package: str) -> str:
    """The requirement in this package's metadata; the bare name if this package is not installed."""
    with suppress(metadata.PackageNotFoundError):
        for required in map(Requirement, metadata.requires(PACKAGE) or []):
            if required.name == package and not required.marker:
                return f"{package}{required.specifier}"
    return package
