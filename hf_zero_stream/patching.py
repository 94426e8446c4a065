"""Replacing attributes of classes and modules for a while, from several threads, and putting them back."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


__all__ = ["Patches", "class_method", "function", "module_function", "static_method"]

Make = Callable[[Any], Any]
"""Makes the replacement of an attribute from the attribute as it is found in its owner's ``__dict__``."""


class Patches:
    """Replaces attributes from the first :meth:`acquire` to the last :meth:`release`.

    Args:
        replacements: (owner, attribute) -> what makes the replacement.
    """

    def __init__(self, replacements: Mapping[tuple[Any, str], Make]) -> None:
        self._replacements = replacements
        self._lock = threading.Lock()
        self._users = 0
        self._saved: list[tuple[Any, str, Any, Any]] = []

    def acquire(self) -> None:
        """Put the replacements in, unless they are in already."""
        with self._lock:
            if self._users == 0:
                for (owner, name), make in self._replacements.items():
                    original = vars(owner)[name]
                    patched = make(original)
                    setattr(owner, name, patched)
                    self._saved.append((owner, name, original, patched))
            self._users += 1

    def release(self) -> None:
        """Put the originals back once every :meth:`acquire` has been released."""
        with self._lock:
            self._users -= 1
            if self._users == 0:
                while self._saved:
                    owner, name, original, patched = self._saved.pop()
                    if vars(owner)[name] is patched:  # somebody else's patch on top of ours is theirs to remove
                        setattr(owner, name, original)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, the replacements stay in."""
        self.acquire()
        try:
            yield
        finally:
            self.release()


def class_method(replacement: Callable[..., Any]) -> Make:
    """``replacement(bound original, cls, *args, **kwargs)`` in place of a class method."""

    def make(original: Any) -> Any:
        @functools.wraps(original.__func__)
        def patched(cls: Any, *args: Any, **kwargs: Any) -> Any:
            return replacement(functools.partial(original.__func__, cls), cls, *args, **kwargs)

        return classmethod(patched)

    return make


def static_method(replacement: Callable[..., Any]) -> Make:
    """``replacement(original, *args, **kwargs)`` in place of a static method."""

    def make(original: Any) -> Any:
        return staticmethod(function(replacement)(original.__func__))

    return make


def function(replacement: Callable[..., Any]) -> Make:
    """``replacement(original, *args, **kwargs)`` in place of a function or method."""

    def make(original: Any) -> Any:
        @functools.wraps(original)
        def patched(*args: Any, **kwargs: Any) -> Any:
            return replacement(original, *args, **kwargs)

        return patched

    return make


def module_function(replacement: Callable[..., Any]) -> Make:
    """As :func:`function`, for a function of a module; cheap enough to be called for every tensor of a checkpoint."""

    def make(original: Any) -> Any:
        return functools.update_wrapper(functools.partial(replacement, original), original)

    return make
