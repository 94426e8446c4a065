"""Install the rows of a moment, in modules that have been imported, and in others when they are."""

from __future__ import annotations

import functools
import importlib
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import PACKAGE, installed_version, refuse_unknown_version
from ..settings.scope import active_configs
from .patching import Patches, Watch
from .rows import Moment, Row, Weight
from .table import TABLE


logger = logging.getLogger(PACKAGE)


class _Lead:
    """Called in place of the function of a row: ours, which is imported at the first call inside ``streaming()``."""

    def __init__(self, row: Row, moment: Moment) -> None:
        self._row = row
        self._only_inside = moment is Moment.BLOCK
        self._function: Callable[..., Any] | None = None

    def __call__(self, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if self._function is None:
            if self._only_inside and not active_configs():
                return original(*args, **kwargs)
            module, _, name = self._row.leads_to.partition(":")
            self._function = getattr(importlib.import_module(f"{PACKAGE}.{module}"), name)
        return self._function(original, *args, **kwargs)


class Installation:
    """The rows of one moment, in place as long as any thread is in this context."""

    def __init__(self, moment: Moment, *, on_top_of: Installation | None = None) -> None:
        self._moment = moment
        self._below = on_top_of
        self._patches = Patches()
        self._waiting: list[Row] = []
        """Rows of modules that have not been imported yet."""
        self._off: set[tuple[str, str]] = set()
        """Packages and features that are left to stock."""
        self._watch = Watch({row.module for row in TABLE[moment]}, lambda module: self._install())
        self._lock = threading.RLock()  # a finaliser may leave from inside the garbage collector
        self._users = 0

    def __bool__(self) -> bool:
        """Whether any thread is in this context."""
        return self._users > 0

    def __enter__(self) -> Installation:
        """Raises a VersionError, and replaces nothing, if an installed version lacks an essential function."""
        with self._lock:
            if self._below is not None:
                self._below.__enter__()
            self._users += 1
            if self._users == 1:
                self._waiting, self._off = list(TABLE[self._moment]), set()
                self._watch.__enter__()
            try:
                self._install()
            except BaseException:
                self.__exit__()
                raise
        return self

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._patches.restore()
                self._watch.__exit__()
            if self._below is not None:
                self._below.__exit__()

    def _install(self) -> None:
        """Replace what has been imported since the last time."""
        with self._lock:
            rows = {row: row.is_whole() for row in self._waiting}
            new = [row for row, is_whole in rows.items() if is_whole]
            lacking = [(row, what) for row in new if (what := row.lacking())]
            for (package, feature, weight), names in _grouped(lacking).items():
                if weight is Weight.ESSENTIAL:
                    refuse_unknown_version(package, names, feature)
                elif weight is Weight.FEATURE:
                    self._off.add((package, feature))
                    _say_off(package, feature, *names)
            wanted = [row for row in new if row.leads_to and (row.package, row.feature) not in self._off]
            self._patches.put({place: _Lead(row, self._moment) for row in wanted for place in row.places()})
            self._waiting = [row for row, is_whole in rows.items() if not is_whole]


@functools.cache
def installed(moment: Moment) -> Installation:
    """The one installation of the rows of a moment."""
    below = {Moment.BLOCK: Moment.MODELS, Moment.LOAD: Moment.BLOCK}.get(moment)
    return Installation(moment, on_top_of=None if below is None else installed(below))


@functools.cache  # once
def keep_watching() -> None:
    """There are models now that transformers and PEFT alone would save, adapt or merge wrongly, everywhere."""
    installed(Moment.MODELS).__enter__()


def refuse_lacking(feature: str) -> None:
    """Raise a VersionError if an installed version lacks what a feature needs that stock would do wrongly."""
    for rows in TABLE.values():
        for row in rows:
            if row.feature == feature and (what := row.lacking()):
                refuse_unknown_version(row.package, [what], feature)


def _grouped(lacking: Sequence[tuple[Row, str]]) -> dict[tuple[str, str, Weight], list[str]]:
    """What is lacking, by package, feature and weight; the essential first."""
    found: dict[tuple[str, str, Weight], list[str]] = {}
    for row, what in sorted(lacking, key=lambda each: each[0].weight is not Weight.ESSENTIAL):
        found.setdefault((row.package, row.feature, row.weight), []).append(what)
    return found


@functools.cache  # once
def _say_off(package: str, feature: str, *lacking: str) -> None:
    logger.warning(
        "%s %s has no %s: %s are left to it. This version is not known to %s: install a newer one.",
        *(package, installed_version(package), ", ".join(lacking), feature, PACKAGE),
    )
