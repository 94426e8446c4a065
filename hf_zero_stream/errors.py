"""Every exception of hf_zero_stream.

All of them derive from :class:`HfZeroStreamError`; each also inherits the builtin that a caller would expect for
its kind of fault, so that ``except OSError`` keeps working around a failed read.
"""

from __future__ import annotations


__all__ = [
    "CheckpointError",
    "ConfigError",
    "DisagreementError",
    "HfZeroStreamError",
    "LoadError",
    "PeerError",
    "ReadError",
    "SaveError",
    "UnsupportedError",
    "VersionError",
]


class HfZeroStreamError(Exception):
    """Base class of every error that hf_zero_stream raises on purpose."""


class ConfigError(HfZeroStreamError, ValueError):
    """A setting has a name or a value that is not known."""


class CheckpointError(HfZeroStreamError, ValueError):
    """A checkpoint is not what its format promises; names the file and the field or tensor."""


class ReadError(HfZeroStreamError, OSError):
    """Bytes of a shard could not be read; names the file and the byte range."""


class DisagreementError(HfZeroStreamError, RuntimeError):
    """Ranks that load together are about to load different things; names the rank and what differs."""


class LoadError(HfZeroStreamError, RuntimeError):
    """A parameter ended up with no values, or with the wrong shape; a wrong load must be loud."""


class SaveError(HfZeroStreamError, OSError):
    """A checkpoint could not be written, or is not what was written; what was there before is still there."""


class PeerError(HfZeroStreamError, RuntimeError):
    """Another rank died, or failed with an error that is not ours; names the rank and quotes its error."""


class UnsupportedError(HfZeroStreamError, NotImplementedError):
    """A combination of settings that cannot be right is refused before anything is loaded."""


class VersionError(HfZeroStreamError, ImportError):
    """transformers or DeepSpeed lacks something that we rely on; names the version found."""
