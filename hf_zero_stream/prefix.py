"""The hook by which ``hf-zero-stream run COMMAND`` reaches every Python process that the command starts.

A folder of ours is the first on their ``PYTHONPATH``. Python imports its ``sitecustomize`` when it starts, and that
calls :func:`await_transformers`. Until the process imports transformers, nothing else happens in it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import ModuleType

from .bindings.install import ImportWatch
from .errors import PACKAGE, requirements
from .settings.config import announced_local_rank, announces_local_rank


FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "site")

VARIABLE = "HF_ZERO_STREAM_RUN"
"""The variable that, set to 0, leaves a process and its children as without us."""


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """A copy of `environ` by which Python and all its children are reached."""
    others = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != FOLDER]
    return {**environ, VARIABLE: "1", "PYTHONPATH": os.pathsep.join([FOLDER, *others])}


def await_transformers() -> None:
    """Once this process has imported transformers, enter ``streaming()``, at the latest when it has other ranks."""
    watch = ImportWatch({"transformers"}, lambda module: enter(module))

    def enter(module: ModuleType) -> None:
        watch.__exit__()
        unsupported = _unsupported_version()
        if not unsupported:
            from .bindings.streaming import enter_with_ranks

            enter_with_ranks()
        elif announces_local_rank() and announced_local_rank() == 0:
            import logging

            logging.getLogger(PACKAGE).warning(
                "hf-zero-stream run: %s: what this process loads and saves is left to transformers.", unsupported
            )

    watch.__enter__()


def _unsupported_version() -> str:
    """Name an installed package of a version that we do not know, and the version needed; empty if there is none."""
    from importlib import metadata

    try:
        for needed in requirements():
            found = "" if needed.marker else metadata.version(needed.name)
            if found and not needed.specifier.contains(found, prereleases=True):
                return f"{needed.name} is {found}, and {PACKAGE} needs {needed}"
    except metadata.PackageNotFoundError:  # of what may be absent, each load says so
        pass
    return ""
