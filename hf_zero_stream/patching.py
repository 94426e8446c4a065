"""Replace attributes of classes and modules for a while, and put them back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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
