"""Be told of modules when they have been imported, and import none for it."""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Callable, Collection, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


__all__ = ["Watch"]


class Watch(importlib.abc.MetaPathFinder):
    """Calls `imported` with each module of these `names` right after its code has run; finds no module itself.

    It watches inside ``with watch:``.
    """

    def __init__(self, names: Collection[str], imported: Callable[[ModuleType], None]) -> None:
        self._names = names
        self._imported = imported

    def __enter__(self) -> None:
        sys.meta_path.insert(0, self)

    def __exit__(self, *exception: object) -> None:
        if self in sys.meta_path:  # somebody else may have put the list in order
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._names:
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
                self._imported(module)

            loader.exec_module = exec_module
        return spec
