"""Replace attributes of classes and modules for a while, from several threads, and put them back."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any


__all__ = ["Patches", "Replacement"]

Replacement = Callable[..., Any]
"""Called in place of a function or method, with its `self` or `cls`: ``replacement(original, *args, **kwargs)``."""


class Patches:
    """Replaces the keys, ``(owner, attribute)``, of `replacements` from the first `acquire` to the last `release`."""

    def __init__(self, replacements: Mapping[tuple[Any, str], Replacement]) -> None:
        self._replacements = replacements
        self._lock = threading.Lock()
        self._users = 0
        self._saved: list[tuple[Any, str, Any, Any]] = []

    def acquire(self) -> None:
        """Put the replacements in, unless they are in."""
        with self._lock:
            if self._users == 0:
                for (owner, name), replacement in self._replacements.items():
                    original = vars(owner)[name]
                    patched = _patched(owner, original, replacement)
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
