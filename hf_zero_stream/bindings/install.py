"""What a row of the table is, and how rows of a moment are installed: in modules that are there, and that come later.

Attributes of classes and modules are replaced for a while, and put back.
"""

from __future__ import annotations

import enum
import functools
import importlib
import inspect
import logging
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple

from ..errors import PACKAGE, installed_version, refuse_unknown_version
from ..settings.scope import active_configs


logger = logging.getLogger(PACKAGE)


class Moment(enum.Enum):
    """For how long rows are installed."""

    MODELS = "from the first packed or sharded model on, and while a thread is inside streaming()"
    REACHED = "in a process that `hf-zero-stream run` has reached, and that has no ranks yet"
    BLOCK = "while a thread is inside streaming()"
    LOAD = "during a load"
    SHARDED = "during a load by distributed_config"
    HIDING = "while ZeRO-3 is hidden from transformers"
    DEFERRED = "while models live that accelerate will shard, or DeepSpeed cut"
    COMPRESSED = "while compressed-tensors dequantises lazy tensors"
    LAYOUT = "while a save lays out its files"
    FLAT = "while models live that stages 1 and 2 may flatten"
    EXPERTS = "from the first load of converted experts on"
    RECORDERS = "while DeepSpeed converts experts"


class Weight(enum.Enum):
    """What it means that an installed version lacks a function."""

    ESSENTIAL = "values would be wrong: a VersionError"
    FEATURE = "the row's feature is left to stock, with a warning"
    SPEED = "what follows is slower"


class Row(NamedTuple):
    """A function of another library, and what is called in its place, with the original first.

    Attributes:
        of: ``module:function`` or ``module:Class.method``. ``name()`` is the class of what the call returns, and
            ``*`` stands for the module's own public classes, as far as they define the method.
        leads_to: ``module:function``, below ``hf_zero_stream``; empty if the original is only called.
        relies_on: the parameters of the original that the function of ours knows by name, separated by spaces.
        feature: what is lost without the row.
        since: the first version of the package that has it, if not all that are supported do.
        until: the first version that has it no more.
    """

    of: str
    leads_to: str
    relies_on: str = ""
    weight: Weight = Weight.FEATURE
    feature: str = ""
    since: str = ""
    until: str = ""

    @property
    def module(self) -> str:
        return self.of.partition(":")[0]

    @property
    def package(self) -> str:
        return self.module.partition(".")[0]

    @property
    def name(self) -> str:
        """How messages name it: without the package."""
        _, _, module = self.module.partition(".")
        return ".".join(filter(None, (module, self.of.partition(":")[2])))

    def is_whole(self) -> bool:
        """Whether its module has been imported, to its end or as far as this function."""
        module = sys.modules.get(self.module)
        return module is not None and (not getattr(module.__spec__, "_initializing", False) or bool(self._found()))

    def is_of(self, version: str) -> bool:
        """Whether `version` of the package should have the function; what is no version is taken for the newest."""
        if not (self.since or self.until):
            return True
        from packaging.version import InvalidVersion, Version  # an import that most calls can do without

        try:
            found = Version(version)
        except InvalidVersion:
            return not self.until
        return (not self.since or found >= Version(self.since)) and (not self.until or found < Version(self.until))

    def is_imported(self) -> bool:
        """Whether its module has been imported, and is of a version that should have the function."""
        return self.is_whole() and self.is_of(installed_version(self.package))

    def places(self) -> list[tuple[Any, str]]:
        """Owner and attribute, once the module has been imported: none if it lacks it, several for ``*``."""
        return self._found() if self.is_imported() else []

    def _found(self) -> list[tuple[Any, str]]:
        *path, name = self.of.partition(":")[2].split(".")
        owners: list[Any] = [sys.modules[self.module]]
        for step in path:
            owners = [inner for owner in owners for inner in _inside(owner, step)]
        of_owners = [owner.__mro__ if isinstance(owner, type) else [owner] for owner in owners]
        # What a class has from `object` alone is replaced in the class itself.
        defining = [[each for each in mro if name in vars(each)] for mro in of_owners]
        return [
            (found[0] if found[0] is not object else mro[0], name)
            for mro, found in zip(of_owners, defining, strict=True)
            if found
        ]

    def lacking(self) -> str:
        """What the imported module lacks of what the row relies on; empty if it has it all, or is not there yet."""
        if not self.is_imported():
            return ""
        found = self._found()
        if not found and "*" not in self.of:
            return self.name
        for owner, name in found:
            known = _parameters(inspect.getattr_static(owner, name))
            unknown = [each for each in self.relies_on.split() if known is not None and each not in known]
            if unknown:
                return f"{self.name}({', '.join(unknown)})"
        return ""


def _inside(owner: Any, step: str) -> list[Any]:
    if step == "*":
        own = [each for each in vars(owner).values() if isinstance(each, type) and each.__module__ == owner.__name__]
        return [each for each in own if not each.__name__.startswith("_")]
    if step.endswith("()"):
        return [type(getattr(owner, step[:-2])())]
    return [getattr(owner, step)] if hasattr(owner, step) else []


def _parameters(function: Any) -> set[str] | None:
    """The names of the parameters of a function; None if it takes any, or nobody knows."""
    function = inspect.unwrap(getattr(function, "__func__", function))
    code = getattr(function, "__code__", None)
    if code is None:
        return None
    if code.co_flags & inspect.CO_VARKEYWORDS:
        return None
    return set(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])


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

    def __init__(
        self, moment: Moment, table: Mapping[Moment, Sequence[Row]], *, on_top_of: Installation | None = None
    ) -> None:
        self._moment, self._table = moment, table
        self._below = on_top_of
        self._patches = Patches()
        self._waiting: list[Row] = []
        """Rows of modules that have not been imported yet."""
        self._off: set[tuple[str, str]] = set()
        """Packages and features that are left to stock."""
        self._watch = Watch({row.module for row in table[moment]}, lambda module: self._install())
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
                self._waiting, self._off = list(self._table[self._moment]), set()
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


def _grouped(lacking: Sequence[tuple[Row, str]]) -> dict[tuple[str, str, Weight], list[str]]:
    """What is lacking, by package, feature and weight; the essential first."""
    found: dict[tuple[str, str, Weight], list[str]] = {}
    for row, what in sorted(lacking, key=lambda each: each[0].weight is not Weight.ESSENTIAL):
        found.setdefault((row.package, row.feature, row.weight), []).append(what)
    return found


@functools.cache  # once
def _say_off(package: str, feature: str, *lacking: str) -> None:
    logger.warning(
        "%s %s has no %s; left to it: %s. This version is not known to %s: install a newer one.",
        *(package, installed_version(package), ", ".join(lacking), feature, PACKAGE),
    )


Replacement = Callable[..., Any]
"""Called in place of a function or method, with its `self` or `cls`: ``replacement(original, *args, **kwargs)``."""


class Patches:
    """Attributes of classes and modules that are replaced just now; used by one thread at a time."""

    def __init__(self) -> None:
        self._saved: dict[tuple[Any, str], tuple[Any, Any]] = {}

    def put(self, replacements: Mapping[tuple[Any, str], Replacement]) -> None:
        """Replace these, ``(owner, attribute)``, which the owners must have, if they are not replaced already."""
        for (owner, name), replacement in replacements.items():
            if (owner, name) not in self._saved:
                original = inspect.getattr_static(owner, name)
                patched = _patched(owner, original, replacement)
                self._saved[owner, name] = original if name in vars(owner) else None, patched
                setattr(owner, name, patched)

    def restore(self) -> None:
        while self._saved:
            (owner, name), (original, patched) = self._saved.popitem()
            if vars(owner)[name] is not patched:  # somebody else's patch on top of ours is theirs to remove
                continue
            if original is None:  # it is inherited
                delattr(owner, name)
            else:
                setattr(owner, name, original)


def _patched(owner: Any, original: Any, replacement: Replacement) -> Any:
    """A class method, a static method or a function, as `original` is, that calls `replacement`."""
    if isinstance(original, (classmethod, staticmethod)):
        return type(original)(_patched(owner, original.__func__, replacement))
    if isinstance(owner, ModuleType):
        # No function around the function: some are called for every tensor of a checkpoint.
        return functools.update_wrapper(functools.partial(replacement, original), original)

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

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
    """Those of the methods of `owner` in whose place somebody has put another, for all objects or for `instance`."""
    return [name for name in names if not is_defined_by(owner, getattr(instance, name, None))]


@contextmanager
def standing_in(instance: Any, **methods: Any) -> Iterator[None]:
    """Inside, `methods` hide those of the class of `instance`; afterwards it has what it had of its own."""
    own = {name: vars(instance)[name] for name in methods if name in vars(instance)}
    vars(instance).update(methods)
    try:
        yield
    finally:
        for name in methods:
            vars(instance).pop(name, None)
        vars(instance).update(own)


class Watch:
    """Inside ``with watch:``, calls `imported` with each of these modules when its code has run; imports none."""

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
    """Finds no module itself; of those that are watched it changes how the others' loaders end."""

    def __init__(self) -> None:
        self.watches: list[Watch] = []

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
"""The one finder of all watches."""
