"""Every exception of hf_zero_stream; each also inherits the builtin that a caller would expect."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
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
    """The base class of all errors that hf_zero_stream raises on purpose.

    Catch it to catch them all.
    """

    is_of_another_rank = False  # which has died or failed, and says more about it


class ConfigError(HfZeroStreamError, ValueError):
    """A setting or an argument has a name or a value that is not allowed.

    Correct it where the message says.
    """


class UrlError(ConfigError, OSError):
    """A URL cannot be the address of a checkpoint, or nothing is saved to its kind.

    Write it as the message says. An OSError, because transformers replaces others.
    """


class CheckpointError(HfZeroStreamError, ValueError):
    """A file is not what its format or the index says, was changed during the load, or differs between hosts.

    Run `hf-zero-stream verify PATH`, which lists every fault; download or copy the file again.
    """


class ReadError(HfZeroStreamError, OSError):
    """Bytes of a shard could not be read.

    Look at the named file on the host of the named rank. Where hosts do not see it, set `read_from`.
    """


class DisagreementError(HfZeroStreamError, RuntimeError):
    """Ranks were about to load or save different things together.

    Make the named rank do what rank 0 does; often a path depends on the rank, or one skipped a load.
    """


class LoadError(HfZeroStreamError, RuntimeError):
    """The checkpoint does not fit the model, a parameter got no or wrong values, or a rank ran out of memory.

    Use the checkpoint's class and config; for memory, more ranks or `offload_param` (see `hf-zero-stream plan`).
    """


class SaveError(HfZeroStreamError, OSError):
    """A checkpoint could not be written; what was there before is still there.

    Free space, or mend the named folder; call the save on every rank.
    """


@contextmanager
def system_errors_as(kind: type[HfZeroStreamError], place: Path, doing: str, advice: str) -> Iterator[None]:
    """Turn an error of the system inside into one of this `kind`, which names its file, or else `place`."""
    try:
        yield
    except OSError as error:
        if isinstance(error, HfZeroStreamError):
            raise
        raise kind(f"{error.filename or place}: {doing}: {error.strerror or error}. {advice}") from error


class PlaceTakenError(SaveError):
    """Another save to the same folder or URL has begun since; this one is not published.

    End the job that is not to go on, or give it another place.
    """


class StreamError(HfZeroStreamError, RuntimeError):
    """A weight stream does not fit its receiver, or a pass of it has not come to its end on all ranks.

    See the error of the named rank. An engine that got a part of the weights is lost: start it anew.
    """


class PeerError(HfZeroStreamError, RuntimeError):
    """Another rank died, did not come, or failed with an error that is not ours, which the message quotes.

    Read that rank's output. If it left none, the system may have killed it: see `dmesg`.
    """


class UnsupportedError(HfZeroStreamError, NotImplementedError):
    """Settings, or a model and a setting, do not work together; raised before anything is read or written.

    The message says what to use instead.
    """


class VersionError(HfZeroStreamError, ImportError):
    """An installed library lacks something that this package relies on.

    Install the version that the message names.
    """


class MissingPluginError(HfZeroStreamError, ImportError):
    """A plug-in is needed that is not installed, or cannot be imported; a warning has named its error.

    Install the package as a whole, mend or uninstall the plug-in, or leave out what the message names.
    """


def refuse_unknown_version(package: str, missing: Sequence[str], purpose: str = "") -> None:
    """Raise a :class:`VersionError` if names are `missing` in the installed `package`; `purpose`: what needs them."""
    if not missing:
        return
    from importlib import metadata  # an import that every other call can do without

    known = [package]
    with suppress(metadata.PackageNotFoundError):  # this package may not be installed
        known = [f"{package}{it.specifier}" for it in requirements() if it.name == package] or known
    need = f", which {purpose} needs" if purpose else ""
    raise VersionError(
        f"{package} {installed_version(package)} has no {', '.join(missing)}{need}; this version is not known to "
        f"{PACKAGE}: install {known[0]} or a newer {PACKAGE}."
    )


def require_names(package: str, owner: Any, *names: str, purpose: str = "") -> None:
    """Raise a :class:`VersionError` if a module or a class of the installed `package` lacks names that we rely on.

    `purpose`: what needs them. ``tests/drift`` reads these calls, whose `owner` is imported by its name.
    """
    missing = [name for name in names if not hasattr(owner, name)]
    refuse_unknown_version(package, [f"{owner.__name__}.{name}" for name in missing], purpose)


def requirements() -> list[Requirement]:
    """The requirements in this package's metadata, with DeepSpeed; a PackageNotFoundError if it is only imported."""
    from importlib import metadata

    from packaging.requirements import Requirement

    every = [Requirement(text) for text in metadata.requires(PACKAGE) or []]
    wanted = [it for it in every if it.marker is None or it.marker.evaluate({"extra": "deepspeed"})]
    return [Requirement(f"{it.name}{it.specifier}") for it in wanted]


@functools.cache
def installed_version(package: str) -> str:
    """The version of an imported `package`, by its distribution, or by what it says of itself."""
    from importlib import metadata

    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return str(getattr(sys.modules.get(package), "__version__", "(unknown version)"))
