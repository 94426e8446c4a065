"""Installed versions of other packages that lack what is relied on: one error for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata

from packaging.requirements import Requirement

from .errors import VersionError


__all__ = ["refuse_unknown_version", "requirement_of"]

PACKAGE = "hf_zero_stream"


def refuse_unknown_version(package: str, missing: Sequence[str], purpose: str = "") -> None:
    """Raise if the installed version of `package` lacks private names that this package relies on.

    Args:
        package: as it is installed, for instance ``"deepspeed"``.
        missing: the names that were looked for and not found; an empty one is no error.
        purpose: what needs them, if that is not everything.

    Raises:
        VersionError: names what is missing, and the versions that this package is known to work with.
    """
    if missing:
        need = f", which {purpose} needs" if purpose else ""
        raise VersionError(
            f"{package} {metadata.version(package)} has no {', '.join(missing)}{need}; this version is not known to "
            f"{PACKAGE}: install {requirement_of(package)} or a newer {PACKAGE}."
        )


def requirement_of(package: str) -> str:
    """What this package's own metadata requires of `package`; its bare name if this package is not installed."""
    try:
        required = map(Requirement, metadata.requires(PACKAGE) or [])
    except metadata.PackageNotFoundError:
        return package
    return next(
        (f"{package}{each.specifier}" for each in required if each.name == package and not each.marker), package
    )
