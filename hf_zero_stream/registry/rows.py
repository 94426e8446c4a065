"""Rows of the table of replaced functions: plain data, for the core's table and those of plug-ins."""

from __future__ import annotations

import enum
import inspect
import sys
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from ..errors import installed_version


@dataclass(frozen=True, eq=False)
class PatchScope:
    """The time for which rows are installed. A plug-in may make patch scopes of its own.

    Attributes:
        name: one word.
        description: completes "rows are installed ...".
        on_top_of: the patch scope whose rows are installed too, before those of this one.
    """

    name: str
    description: str
    on_top_of: PatchScope | None = None

    MODELS: ClassVar[PatchScope]
    REACHED: ClassVar[PatchScope]
    BLOCK: ClassVar[PatchScope]
    LOAD: ClassVar[PatchScope]
    SHARDED: ClassVar[PatchScope]
    HIDING: ClassVar[PatchScope]
    DEFERRED: ClassVar[PatchScope]
    LAYOUT: ClassVar[PatchScope]
    FLAT: ClassVar[PatchScope]
    EXPERTS: ClassVar[PatchScope]
    RECORDERS: ClassVar[PatchScope]
    SNAPSHOT: ClassVar[PatchScope]
    CALLED: ClassVar[PatchScope]


PatchScope.MODELS = PatchScope(
    "MODELS",
    "from the first packed or sharded model on, while a thread is inside streaming(), and while a save in the "
    "background reads from the memory of a training",
)
PatchScope.REACHED = PatchScope(
    "REACHED", "in a process that `hf-zero-stream run` has reached, and that has no ranks yet"
)
PatchScope.BLOCK = PatchScope("BLOCK", "while a thread is inside streaming()", PatchScope.MODELS)
PatchScope.LOAD = PatchScope("LOAD", "during a load", PatchScope.BLOCK)
PatchScope.SHARDED = PatchScope("SHARDED", "during a load by distributed_config", PatchScope.LOAD)
PatchScope.HIDING = PatchScope("HIDING", "while ZeRO-3 is hidden from transformers")
PatchScope.DEFERRED = PatchScope("DEFERRED", "while models live that accelerate will shard, or DeepSpeed cut")
PatchScope.LAYOUT = PatchScope("LAYOUT", "while a save lays out its files")
PatchScope.SNAPSHOT = PatchScope(
    "SNAPSHOT", "while a save in the background reads from the memory of a training", PatchScope.MODELS
)
PatchScope.FLAT = PatchScope("FLAT", "while models live that stages 1 and 2 may flatten")
PatchScope.EXPERTS = PatchScope("EXPERTS", "from the first load of converted experts on")
PatchScope.CALLED = PatchScope("CALLED", "never: they are only called")
PatchScope.RECORDERS = PatchScope("RECORDERS", "while DeepSpeed converts experts")


class Weight(enum.Enum):
    """The consequence if an installed version lacks a function."""

    ESSENTIAL = "values would be wrong: a VersionError"
    FEATURE = "the row's feature is left to stock, with a warning"
    PARTITIONS = "the row's feature is left to stock, which takes empty partitions for weights: no load under ZeRO-3"
    SPEED = "what follows is slower"


class Row(NamedTuple):
    """A function of another library, and ours that is called in its place, with the original as first argument.

    Attributes:
        of: ``module:function`` or ``module:Class.method``. ``name()`` is the class of what the call returns, and
            ``*`` stands for the module's own public classes, as far as they define the method.
        leads_to: ``module:function``; a module that begins with a dot is one of ours. Empty if the original is only
            called.
        relies_on: the parameters of the original that the function of ours knows by name, separated by spaces.
        feature: the feature that is lost without the row.
        when: ``module:function``, which is called as the original is, and says whether the row is needed at all: until
            then the original is called, and the module of `leads_to` is not imported. Empty: it is always needed.
        since: the first version of the package that has it, if not all that are supported do.
        until: the first version that has it no more.
    """

    of: str
    leads_to: str
    relies_on: str = ""
    weight: Weight = Weight.FEATURE
    feature: str = ""
    when: str = ""
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
        """The name for messages, without the package."""
        _, _, module = self.module.partition(".")
        return ".".join(filter(None, (module, self.of.partition(":")[2])))

    def is_loaded(self) -> bool:
        """Whether its module has been imported, to its end or as far as this function."""
        module = sys.modules.get(self.module)
        return module is not None and (not getattr(module.__spec__, "_initializing", False) or bool(self._found()))

    def exists_in(self, version: str) -> bool:
        """Whether `version` of the package should have the function; any other text counts as the newest."""
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
        return self.is_loaded() and self.exists_in(installed_version(self.package))

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
        """The names that the row relies on and the imported module lacks; empty if none, or if it is not there yet."""
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
