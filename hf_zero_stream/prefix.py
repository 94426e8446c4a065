"""The hook by which ``hf-zero-stream run COMMAND`` reaches every Python process that the command starts.

A folder of ours is the first on their ``PYTHONPATH``. Python imports its ``sitecustomize`` when it starts, and that
calls :func:`reach`. Until the process imports transformers, nothing else happens in it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress

from .bindings.install import ImportWatch
from .errors import PACKAGE, ConfigError, requirements
from .settings.config import announced_local_rank, announces_local_rank, is_disabled


FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "site")

VARIABLE = "HF_ZERO_STREAM_RUN"
"""The variable that, set to 0, leaves a process and its children as without us."""


def environment(environ: Mapping[str, str], *, at_once: bool = False) -> dict[str, str]:
    """A copy of `environ` by which Python and all its children are reached; this process itself `at_once`."""
    others = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != FOLDER]
    value = _this_process() if at_once else "1"
    return {**environ, VARIABLE: value, "PYTHONPATH": os.pathsep.join([FOLDER, *others])}


def _this_process() -> str:
    return f"process {os.getpid()}"  # which stays when it becomes another program


def reach() -> None:
    """Once this process has imported transformers, enter ``streaming()``, at the latest when it has other ranks.

    What `python -m hf_zero_stream.run` has become enters at once. If that fails, the process goes on as without us,
    and says so: it may run inside ``import transformers``. A setting that is wrong is the user's to mend, and raises a
    ConfigError there.
    """
    if is_disabled():
        return
    if os.environ.get(VARIABLE) == _this_process():
        _enter("enter_for_process")
        return
    watch = ImportWatch({"transformers"}, lambda module: enter())

    def enter() -> None:
        watch.__exit__()
        _enter("enter_with_ranks")

    watch.__enter__()


def _enter(how: str) -> None:
    try:
        if unsupported := _unsupported_version():
            if announces_local_rank() and announced_local_rank() == 0:
                _warn(unsupported)
            return
        from .bindings import streaming

        getattr(streaming, how)()
    except ConfigError:
        raise
    except Exception as error:
        _warn(f"{type(error).__name__}: {error}")


def _warn(why: str) -> None:
    import logging

    logging.getLogger(PACKAGE).warning(
        "hf-zero-stream run: %s: what this process loads and saves is left to transformers.", why
    )


def _unsupported_version() -> str:
    """Name an installed package of a version that we do not know, and the version needed; empty if there is none."""
    from importlib import metadata

    try:
        wanted = requirements()
    except metadata.PackageNotFoundError:  # a checkout that is only imported
        return ""
    for needed in wanted:
        with suppress(metadata.PackageNotFoundError):  # of what is absent, each load that needs it says so
            found = metadata.version(needed.name)
            if not needed.specifier.contains(found, prereleases=True):
                return f"{needed.name} is {found}, and {PACKAGE} needs {needed}"
    return ""
