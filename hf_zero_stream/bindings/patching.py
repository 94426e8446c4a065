"""Replace attributes of classes and modules for a while, and put them back; be told of modules that are imported."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


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
                original = vars(owner)[name]
                patched = _patched(owner, original, replacement)
                setattr(owner, name, patched)
                self._saved[owner, name] = original, patched

    def restore(self) -> None:
        while self._saved:
            (owner, name), (original, patched) = self._saved.popitem()
            if vars(owner)[name] is patched:  # somebody else's patch on top of ours is theirs to remove
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


def is_defined_by(owner: type, function: Any) -> bool:
    """Whether the module of `owner` defines `function`, perhaps a method of an object; our patches do not count."""
    function = getattr(function, "__func__", function)
    while getattr(function, "__globals__", None) is globals():
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
