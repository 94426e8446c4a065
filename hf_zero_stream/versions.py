"""Installed versions of other packages that lack what is relied on: one error for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata

from packaging.requirements import Requirement

from .errors import VersionError


__all__ = ["refuse_unknown_version"]

PACKAGE = "hf_zero_stream"


def refuse_unknown_version(package: str, missing: Sequence[str], purpose: str = "") -> None:
    """Raise a :class:`VersionError` if the installed version of `package` lacks names that this package relies on.

    Args:
        package: as it is installed, for instance ``"deepspeed"``.
        missing: the names that were looked for and not found; if there are none, nothing happens.
        purpose: what needs them, if that is not everything.
    """
    if missing:
        need = f", which {purpose} needs" if purpose else ""
        raise VersionError(
            f"{package} {metadata.version(package)} has no {', '.join(missing)}{need}; this version is not known to "
            f"{PACKAGE}: install {_requirement(package)} or a newer {PACKAGE}."
        )


def _requirement(package: str) -> str:
    """What this package's own metadata requires of `package`; its bare name if this package is not installed."""
    with suppress(metadata.PackageNotFoundError):
        for required in map(Requirement, metadata.requires(PACKAGE) or []):
            if required.name == package and not required.marker:
                return f"{package}{required.specifier}"
    return package
