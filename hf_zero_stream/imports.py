"""Be told of modules when they have been imported, and import none for it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class Watch:
    """Inside ``with watch:``, calls `imported` with each module of these `names` right after its code has run."""

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
