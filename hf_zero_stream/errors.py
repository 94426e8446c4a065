"""Every exception of hf_zero_stream; each also inherits the builtin that a caller would expect."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from packaging.requirements import Requirement


__all__ = [
    "PACKAGE",
    "CheckpointError",
    "ConfigError",
    "DisagreementError",
    "HfZeroStreamError",
    "LoadError",
    "MissingPluginError",
    "PeerError",
    "PlaceTakenError",
    "ReadError",
    "SaveError",
    "StreamError",
    "UnsupportedError",
    "UrlError",
    "VersionError",
    "refuse_unknown_version",
    "require_names",
]

PACKAGE = "hf_zero_stream"


class HfZeroStreamError(Exception):
    """Base class of all errors that hf_zero_stream raises on purpose."""


class ConfigError(HfZeroStreamError, ValueError):
    """A setting has a name or a value that is not known."""


class UrlError(ConfigError, OSError):
    """A URL that cannot be the address of a checkpoint. An OSError, because transformers replaces others."""


class CheckpointError(HfZeroStreamError, ValueError):
    """A checkpoint violates its format; names the file and the field or tensor."""


class ReadError(HfZeroStreamError, OSError):
    """Bytes of a shard could not be read; names the file and the byte range."""


class DisagreementError(HfZeroStreamError, RuntimeError):
    """Ranks would load different things together; names the rank and what differs."""


class LoadError(HfZeroStreamError, RuntimeError):
    """A parameter got no values or has the wrong shape, or a rank ran out of memory."""


class SaveError(HfZeroStreamError, OSError):
    """A checkpoint could not be written, or is not what was written; what was there before is still there."""


class PlaceTakenError(SaveError):
    """Another save to the same folder or URL has begun since; this one is not published, and removes only its own."""


class StreamError(HfZeroStreamError, RuntimeError):
    """An update of weights was interrupted; discard a receiver that got some of them."""


class PeerError(HfZeroStreamError, RuntimeError):
    """Another rank died, or failed with an error that is not ours; names the rank and quotes its error."""


class UnsupportedError(HfZeroStreamError, NotImplementedError):
    """Settings that do not work together; raised before anything is loaded."""


class VersionError(HfZeroStreamError, ImportError):
    """transformers or DeepSpeed lacks something that this package relies on; names the version found."""


class MissingPluginError(HfZeroStreamError, ImportError):
    """A plug-in is needed that is not installed, or cannot be imported; names it, and what needs it."""


def refuse_unknown_version(package: str, missing: Sequence[str], purpose: str = "") -> None:
    """Raise a :class:`VersionError` if names are `missing` in the installed `package`; `purpose`: what needs them."""
    if not missing:
        return
    from importlib import metadata  # an import that every other call can do without

    known = [package]
    with suppress(metadata.PackageNotFoundError):  # this package may not be installed
        known = [f"{package}{it.specifier}" for it in requirements() if it.name == package and not it.marker] or known
    need = f", which {purpose} needs" if purpose else ""
    raise VersionError(
        f"{package} {installed_version(package)} has no {', '.join(missing)}{need}; this version is not known to "
        f"{PACKAGE}: install {known[0]} or a newer {PACKAGE}."
    )


def require_names(package: str, owner: Any, *names: str) -> None:
    """Raise a :class:`VersionError` if a module or a class of the installed `package` lacks names that we rely on."""
    missing = [name for name in names if not hasattr(owner, name)]
    refuse_unknown_version(package, [f"{owner.__name__}.{name}" for name in missing])


def requirements() -> list[Requirement]:
    """The requirements in this package's metadata; a PackageNotFoundError if it is not installed, only imported."""
    from importlib import metadata

    from packaging.requirements import Requirement

    return [Requirement(text) for text in metadata.requires(PACKAGE) or []]


@functools.cache
def installed_version(package: str) -> str:
    """The version of an imported `package`, by its distribution, or by what it says of itself."""
    from importlib import metadata

    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return str(getattr(sys.modules.get(package), "__version__", "(unknown version)"))
