"""What the log shows: the level of our loggers, and where lines go if nobody has said."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping

from ..errors import PACKAGE, ConfigError


NOTICE = 25
"""The level of the one line that says what a load or a save has done: below WARNING, and shown by default."""

LOG_VARIABLE = "HF_ZERO_STREAM_LOG"

_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "notice": NOTICE,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}

logging.addLevelName(NOTICE, "NOTICE")


class _Stderr(logging.Handler):
    """Writes to stderr, as Python does, unless the application has a handler of its own: that has the lines then."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers and logging.getLogger(PACKAGE).handlers == [self]:
            text = self.format(record)
            print(text if text.startswith(PACKAGE) else f"{PACKAGE}: {text}", file=sys.stderr, flush=True)


_stderr = _Stderr()
_own_level = logging.NOTSET
"""The level that :func:`follow_levels` has set. Another one is the application's, and stays."""


def follow_levels() -> None:
    """Give our loggers the level that the user wants now; called at the beginning of blocks, loads and saves.

    That is the level which the application has set on them; else `HF_ZERO_STREAM_LOG`; else transformers' verbosity,
    or the root logger's level, if they are not as they come; else NOTICE.

    Raises:
        ConfigError: the variable names no level.
    """
    global _own_level
    level, logger = _wanted_level(), logging.getLogger(PACKAGE)
    if logger.level in (logging.NOTSET, _own_level):
        logger.setLevel(level)
        _own_level = level
    if _stderr not in logger.handlers:
        logger.addHandler(_stderr)


def level_in(environ: Mapping[str, str] = os.environ) -> int | None:
    """The level of `HF_ZERO_STREAM_LOG`, None without one; raises a ConfigError if it names none."""
    if (name := environ.get(LOG_VARIABLE)) is None:
        return None
    if (level := _LEVELS.get(name.strip().lower())) is None:
        raise ConfigError(f"environment variable {LOG_VARIABLE}: expected one of {', '.join(_LEVELS)}; got {name!r}")
    return level


def _wanted_level() -> int:
    if (level := level_in()) is not None:
        return level
    of_transformers = logging.getLogger("transformers").level  # its verbosity; importing it would take seconds
    if of_transformers not in (logging.NOTSET, logging.WARNING):
        return of_transformers
    return NOTICE if logging.getLogger().level == logging.WARNING else logging.NOTSET
