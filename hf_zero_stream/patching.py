"""Replace attributes of classes and modules for a while, from several threads, and put them back."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from .errors import refuse_unknown_version


Replacement = Callable[..., Any]
"""Called in place of a function or method, with its `self` or `cls`: ``replacement(original, *args, **kwargs)``."""


class Patches:
    """Replaces the keys, ``(owner, attribute)``, of `replacements` as long as any thread is in this context.

    As long, whoever is here is in the context `on_top_of`, too.
    """

    def __init__(
        self, replacements: Mapping[tuple[Any, str], Replacement], *, on_top_of: Patches | None = None
    ) -> None:
        self._replacements = replacements
        self._below = on_top_of
        self._lock = threading.RLock()  # a finaliser may leave from inside the garbage collector
        self._users = 0
        self._saved: dict[tuple[Any, str], tuple[Any, Any]] = {}

    def __enter__(self) -> None:
        with self._lock:
            if self._below is not None:
                self._below.__enter__()
            if self._users == 0:
                self._replace(self._replacements)
            self._users += 1

    def add(self, replacements: Mapping[tuple[Any, str], Replacement]) -> bool:
        """Replace these too until the last thread leaves; returns whether any of them is replaced just now."""
        with self._lock:
            new = {place: each for place, each in replacements.items() if self._users and place not in self._saved}
            self._replace(new)
            return bool(new)

    def _replace(self, replacements: Mapping[tuple[Any, str], Replacement]) -> None:
        """Raises a VersionError, before anything is replaced, if an owner has no such attribute."""
        for owner, name in replacements:
            if name not in vars(owner):
                module = owner.__name__ if isinstance(owner, ModuleType) else owner.__module__
                package = module.partition(".")[0]
                refuse_unknown_version(package, [f"{owner.__name__.removeprefix(f'{package}.')}.{name}"])
        for (owner, name), replacement in replacements.items():
            original = vars(owner)[name]
            patched = _patched(owner, original, replacement)
            setattr(owner, name, patched)
            self._saved[owner, name] = original, patched

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._users -= 1
            while self._users == 0 and self._saved:
                (owner, name), (original, patched) = self._saved.popitem()
                if vars(owner)[name] is patched:  # somebody else's patch on top of ours is theirs to remove
                    setattr(owner, name, original)
            if self._below is not None:
                self._below.__exit__()


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
