"""Installs the rows of a patch scope, in modules that are imported already and in those that will be.

Attributes of classes and modules are replaced for a while, and put back. So there are two frames of ours between a
script and transformers for each function that is replaced, and an error is raised below more of them. They are cut
from tracebacks, which would bury the sentence that says what to do, and an error that another rank has had is shown as
one line. With our logger at level DEBUG nothing is cut.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType, TracebackType
from typing import Any, TypeVar, cast

from ..errors import PACKAGE, HfZeroStreamError, installed_version, refuse_unknown_version
from ..registry import PatchScope, Row, Severity, import_object
from ..settings.scope import active_configs


logger = logging.getLogger(PACKAGE)


class LazyReplacement:
    """Calls the replacement of a row, which is imported at the first call inside ``streaming()``."""

    def __init__(self, row: Row, scope: PatchScope) -> None:
        self._row = row
        self._only_inside = scope is PatchScope.BLOCK
        self._function: Callable[..., Any] | None = None

    def __call__(self, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if self._function is None:
            if self._only_inside and not active_configs():
                return original(*args, **kwargs)
            if self._row.when and not import_object(self._row.when)(*args, **kwargs):
                return original(*args, **kwargs)
            self._function = import_object(self._row.leads_to)
        try:
            return self._function(original, *args, **kwargs)
        except BaseException as error:
            shorten(error)
            raise


class Installation:
    """The rows of one patch scope, in place as long as any thread is in this context."""

    def __init__(
        self, scope: PatchScope, table: Mapping[PatchScope, Sequence[Row]], *, on_top_of: Installation | None = None
    ) -> None:
        self._scope, self._table = scope, table
        self._below = on_top_of
        self._saved: list[tuple[Any, str, Any, Any]] = []
        """What is replaced just now: owner, attribute, the original (None: inherited), and what is in its place."""
        self._waiting: list[Row] = []
        """Rows of modules that have not been imported yet."""
        self._disabled: set[tuple[str, str]] = set()
        """Packages and features that are left to stock."""
        self._watch = ImportWatch({row.module for row in table[scope]}, lambda module: self._install())
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
                self._waiting, self._disabled = list(self._table[self._scope]), set()
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
                self._restore()
                self._watch.__exit__()
            if self._below is not None:
                self._below.__exit__()

    def while_alive(self, owner: object) -> None:
        """Have the rows in place as long as `owner` lives."""
        self.__enter__()
        weakref.finalize(owner, self.__exit__)

    def _install(self) -> None:
        """Replace what has been imported since the last time."""
        with self._lock:
            rows = {row: row.is_loaded() for row in self._waiting}
            new = [row for row, is_loaded in rows.items() if is_loaded]
            lacking: dict[tuple[str, str, Severity], list[str]] = {}
            for row in sorted(new, key=lambda row: row.severity is not Severity.ESSENTIAL):  # the essential first
                if what := row.lacking():
                    lacking.setdefault((row.package, row.feature, row.severity), []).append(what)
            for (package, feature, severity), names in lacking.items():
                if severity is Severity.ESSENTIAL:
                    refuse_unknown_version(package, names, feature)
                elif severity in (Severity.FEATURE, Severity.PARTITIONS):
                    self._disabled.add((package, feature))
                    _warn_disabled(package, feature, *names)
            wanted = [row for row in new if row.leads_to and (row.package, row.feature) not in self._disabled]
            for row in wanted:
                self._replace(row)
            self._waiting = [row for row, is_loaded in rows.items() if not is_loaded]

    def _replace(self, row: Row) -> None:
        """Replace the function of `row` in all its places; what is put last is called first."""
        replacement = LazyReplacement(row, self._scope)
        for owner, name in dict.fromkeys(row.places()):
            original = inspect.getattr_static(owner, name)
            patched = _patched(owner, original, replacement)
            self._saved.append((owner, name, original if name in vars(owner) else None, patched))
            setattr(owner, name, patched)

    def _restore(self) -> None:
        while self._saved:
            owner, name, original, patched = self._saved.pop()
            if vars(owner)[name] is not patched:  # somebody else's patch on top of ours is theirs to remove
                continue
            if original is None:  # it is inherited
                delattr(owner, name)
            else:
                setattr(owner, name, original)


@functools.cache  # once
def _warn_disabled(package: str, feature: str, *lacking: str) -> None:
    logger.warning(
        "%s %s has no %s; left to it: %s. This version is not known to %s: install a newer one.",
        *(package, installed_version(package), ", ".join(lacking), feature, PACKAGE),
    )


Replacement = Callable[..., Any]
"""Replaces a function, or a method with its `self` or `cls`: ``replacement(original, *args, **kwargs)``."""


def _patched(owner: Any, original: Any, replacement: Replacement) -> Any:
    """A class method, a static method or a function, as `original` is, that calls `replacement`."""
    if isinstance(original, (classmethod, staticmethod)):
        return type(original)(_patched(owner, original.__func__, replacement))
    if isinstance(owner, ModuleType):
        # No function around the function: some are called for every tensor of a checkpoint.
        return functools.update_wrapper(functools.partial(replacement, original), original)

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        try:
            return replacement(original, *args, **kwargs)
        except BaseException as error:
            shorten(error)
            raise

    return function


def is_replaced(method: Any) -> bool:
    """Whether a method is one of ours, in the place of another library's."""
    return getattr(method, "__globals__", None) is globals()


def is_defined_by(owner: type, function: Any) -> bool:
    """Whether the module of `owner` defines `function`, perhaps a method of an object; our patches do not count."""
    function = getattr(function, "__func__", function)
    while is_replaced(function):
        function = function.__wrapped__
    return getattr(function, "__globals__", {}).get("__name__") == owner.__module__


def replaced_methods(owner: type, instance: Any, *names: str) -> list[str]:
    """The methods among `names` that somebody has replaced in `owner`, for all objects or for `instance` alone."""
    return [name for name in names if not is_defined_by(owner, getattr(instance, name, None))]


@contextmanager
def override_methods(instance: Any, **methods: Any) -> Iterator[None]:
    """Override methods of `instance` alone, inside; afterwards it has what it had of its own."""
    own = {name: vars(instance)[name] for name in methods if name in vars(instance)}
    vars(instance).update(methods)
    try:
        yield
    finally:
        for name in methods:
            vars(instance).pop(name, None)
        vars(instance).update(own)


class ImportWatch:
    """A context in which `imported` is called with each of these modules when its code has run; imports none."""

    def __init__(self, names: Collection[str], imported: Callable[[ModuleType], None]) -> None:
        self.names = names
        self.imported = imported

    def __enter__(self) -> None:
        if _finder not in sys.meta_path:  # somebody else may have put the list in order
            sys.meta_path.insert(0, _finder)
        _finder.watches.append(self)

    def __exit__(self, *exception: object) -> None:
        _finder.watches.remove(self)
        if not _finder.watches and _finder in sys.meta_path:
            sys.meta_path.remove(_finder)


class _Finder:
    """A finder that finds no module itself, and wraps the others' loaders of watched modules."""

    def __init__(self) -> None:
        self.watches: list[ImportWatch] = []

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not any(fullname in watch.names for watch in self.watches):
            return None
        # Only those behind this one: those before it were asked already, and one of them may be such a watch too.
        position = next((number for number, finder in enumerate(sys.meta_path) if finder is self), -1)
        behind = sys.meta_path[position + 1 :]
        specs = (finder.find_spec(fullname, path, target) for finder in behind if hasattr(finder, "find_spec"))
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                for watch in [watch for watch in self.watches if fullname in watch.names]:
                    watch.imported(module)

            loader.exec_module = exec_module
        return spec


_finder = _Finder()
"""The finder that all watches share."""


# -------------------------------------------------------------------------------------- errors that leave the package

Function = TypeVar("Function", bound=Callable[..., Any])

_OURS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")


def shorten(error: BaseException) -> None:
    """Cut the frames of this package from an `error` that leaves it, and from all that the error was raised from.

    So is the frame that calls this, if it goes on with a mere ``raise``.
    """
    if logger.isEnabledFor(logging.DEBUG):
        return
    for each in _chain(error):
        each.__traceback__ = _without_ours(each.__traceback__)
    if _is_of_another_rank(error) and getattr(sys.excepthook, "func", None) is not _show:
        # Only now: the script must find Python's own hook, and may have put another in its place.
        sys.excepthook = functools.partial(_show, sys.excepthook)


def shortening(function: Function) -> Function:
    """Decorate a function that scripts call, whose errors are to be shortened."""

    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            shorten(error)
            raise

    return cast(Function, inner)


def callers_line() -> str:
    """The line, ``file:number``, that has called this package, perhaps by transformers."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not _is_ours(frame) and _module_of(frame) != "transformers":
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _show(
    shown_by: Callable[..., Any], kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Show an uncaught error as `shown_by` does; of one that another rank has had, its sentence alone."""
    if _is_of_another_rank(error):
        error.__cause__, error.__context__, trace = None, None, None
    shown_by(kind, error.with_traceback(trace), trace)


def _is_of_another_rank(error: BaseException) -> bool:
    return isinstance(error, HfZeroStreamError) and error.is_of_another_rank


def _chain(error: BaseException) -> Iterator[BaseException]:
    found, waiting = set[int](), [error]
    while waiting:
        each = waiting.pop()
        if id(each) not in found:
            found.add(id(each))
            yield each
            waiting += [other for other in (each.__cause__, each.__context__) if other is not None]


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    kept, is_cut = [], False
    while trace is not None:
        # Of ours, and what those go through to others of ours.
        is_cut = _is_ours(trace.tb_frame) or (is_cut and _module_of(trace.tb_frame) == "contextlib")
        if not is_cut:
            kept.append(trace)
        trace = trace.tb_next
    for each in reversed(kept):
        trace = TracebackType(trace, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return trace


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_OURS)


def _module_of(frame: FrameType) -> str:
    """The module, or the package that it is in."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
