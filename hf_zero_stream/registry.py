"""Plug-ins as data: what they bring, how they are found, and how what they name is imported.

A plug-in is a distribution with an entry point of the group ``hf_zero_stream.plugins`` that leads to a
:class:`Plugin`. The folders of :mod:`hf_zero_stream.plugins` are found so too. A declaration names functions as
``module:name``; these modules are imported at their first use, so that a load pays for nothing that it does not need.
Functions of other libraries that are replaced or relied on are rows (:class:`Row`), also those of the core.
"""

from __future__ import annotations

import enum
import functools
import inspect
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib import import_module, metadata
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

from .errors import PACKAGE, MissingPluginError, installed_version


TORCH_ENDINGS, DISTRIBUTED_ENDING = (".bin", ".pt", ".pth"), ".distcp"
"""Ends of the names of files with tensors that ``torch.save`` and torch.distributed.checkpoint wrote."""

METADATA = ".metadata"
"""The file of torch.distributed.checkpoint that describes the others."""


class FileFormat(NamedTuple):
    """A format of files.

    Attributes:
        name: for messages and :attr:`.checkpoint.map.CheckpointMap.format`.
        endings: the ends of its files' paths.
        module: a :class:`.checkpoint.formats.Format`.
        holds_values: these files hold the tensors themselves; otherwise they say which other files do.
        is_always_map: its reader raises no :class:`.checkpoint.format.NotAMap`. Otherwise the module has a function
            ``not_a_map_reason(source, paths)`` too: why the files are no maps of bytes; ``""`` if they are.
    """

    name: str
    endings: tuple[str, ...]
    module: str
    holds_values: bool = True
    is_always_map: bool = True


class FolderFormat(NamedTuple):
    """A format of whole folders, which can be inspected and converted.

    Attributes:
        name: as of a :class:`FileFormat`.
        find: ``module:name`` of a function of a path: the path that `read` takes, or None if the folder is of another
            format. It goes by the names of files.
        read: ``module:name`` of a function of that path, which gives a :class:`.checkpoint.map.CheckpointMap`.
        refusal: why ``from_pretrained`` cannot load it, and what to do; empty if it can.
    """

    name: str
    find: str
    read: str
    refusal: str = ""


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
    BLOCK: ClassVar[PatchScope]
    LOAD: ClassVar[PatchScope]
    SAVE: ClassVar[PatchScope]


PatchScope.MODELS = PatchScope(
    "MODELS",
    "from the first packed or sharded model on, while a thread is inside streaming(), and during a save",
)
PatchScope.BLOCK = PatchScope("BLOCK", "while a thread is inside streaming()", PatchScope.MODELS)
PatchScope.LOAD = PatchScope(
    "LOAD", "during a load, and as long as ZeRO-3 is hidden from transformers", PatchScope.BLOCK
)
PatchScope.SAVE = PatchScope(
    "SAVE", "while a save lays out its files, or reads from the memory of a training", PatchScope.MODELS
)


class Severity(enum.Enum):
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
    severity: Severity = Severity.FEATURE
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


def rows(
    lines: str,
    of: str = "",
    ours: str = ".",
    *,
    feature: str = "",
    severity: Severity = Severity.FEATURE,
    when: str = "",
) -> list[Row]:
    """The rows that `lines` describe, a line for each.

    It has a function of another library, with `of` before it; ours, with `ours` before it, unless the other is only
    called; the names of parameters that the row relies on; and ``>=5.2``, the first version of the package that has
    it, or ``<5.2``, the first that has it no more.
    """
    found = []
    for name, *words in filter(None, map(str.split, lines.split("\n"))):
        leads_to = next((f"{ours}{word}" for word in words if ":" in word), "")
        since = next((word[2:] for word in words if word.startswith(">=")), "")
        until = next((word[1:] for word in words if word.startswith("<")), "")
        relies_on = " ".join(word for word in words if word.isidentifier())
        found.append(Row(f"{of}{name}", leads_to, relies_on, severity, feature, when, since, until))
    return found


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


GROUP = "hf_zero_stream.plugins"

OURS: Mapping[str, str] = {
    "autoep": "mixtures of experts by DeepSpeed's expert_parallel (AutoEP)",
    "autotp": "tensor parallelism by DeepSpeed's tensor_parallel.autotp_size (AutoTP)",
    "flat": "engines of ZeRO stages 1 and 2 without a second copy of the model",
    "nvme": "parameters in DeepSpeed's swap files (offload_param to NVMe)",
    "verify": "loads that compare what they placed with the files: verify=sample, full",
    "from_files": "frozen weights that stay in their files: frozen_weights=files",
    "hosts": "states on the hosts' own disks or in their memory",
    "demo": "hf-zero-stream demo",
    "forecast": "plan(), hf-zero-stream plan, and the memory that reports say training will need",
    "relay": "ranks that read for others: read_from=rank0, local_rank0; pieces of states that lie on other hosts",
    "remote": "checkpoints at s3://, gs://, az://, https:// and hf:// URLs",
    "packed": "quantised checkpoints: weights that stay quantised, dequantising and quantising while loading",
    "pickled": "checkpoints of torch.save, torch.distributed.checkpoint and DeepSpeed, and hf-zero-stream convert",
    "stream": "weights for inference engines",
    "tools": "hf-zero-stream inspect, verify and doctor",
    "watch": "the watch over ranks that die or stop answering",
}
"""The plug-ins of this package, and the features that are missing without each."""


class Source(NamedTuple):
    """A source of checkpoints behind URLs of one scheme.

    Attributes:
        form: the part of a checkpoint's URL behind ``scheme://``, for messages.
        module: a module with the functions of :class:`.checkpoint.urls.UrlCheckpoints`. Schemes with the same module
            are read by one source.
    """

    form: str
    module: str


@dataclass(frozen=True)
class Plugin:
    """The declaration of a plug-in: all that it brings.

    Attributes:
        name: for messages.
        rows: functions of other libraries that are replaced or relied on; see :class:`Row`.
        commands: commands of ``hf-zero-stream``: name -> module with a function ``run``, as typer takes it, and the
            text ``EXAMPLE``.
        destinations: name, for :attr:`.settings.config.StreamingConfig.destination`, ->
            ``module:function``, which takes a Coordinator, the StreamingConfig and the DeepSpeed config (empty if
            there is none), and returns a :class:`.destinations.base.Destination`.
        holders: each a ``module:function`` that is a :class:`.holdings.holding.Holder`; asked before the core's.
        sources: scheme of URLs, in lower case -> :class:`Source`.
        targets: scheme of URLs, in lower case -> a module with the functions of
            :class:`.saving.places.UrlPlaces`, by which checkpoints are saved to such URLs.
        tools: functions, classes or modules that the core asks for when a load or a save meets what needs them: name,
            that of the function or of the option, -> ``module:function``, or a module.
        files: formats of files, told apart by the ends of their names.
        folders: formats of whole folders, told apart by the names of what is in them. They go before those of files.
        mounts: folders whose shards lie elsewhere: the name of a file in such a folder -> ``module:function`` of the
            folder and the Coordinator of a load, which all ranks call; inside what it returns, loads read the shards.
    """

    name: str
    rows: Mapping[PatchScope, Sequence[Row]] = field(default_factory=dict)
    commands: Mapping[str, str] = field(default_factory=dict)
    destinations: Mapping[str, str] = field(default_factory=dict)
    holders: Sequence[str] = ()
    sources: Mapping[str, Source] = field(default_factory=dict)
    targets: Mapping[str, str] = field(default_factory=dict)
    tools: Mapping[str, str] = field(default_factory=dict)
    files: Sequence[FileFormat] = ()
    folders: Sequence[FolderFormat] = ()
    mounts: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            kind = str if each.name == "name" else Sequence if each.default == () else Mapping
            if not isinstance(value, kind) or (isinstance(value, str) and kind is Sequence):
                raise TypeError(f"Plugin({each.name}=...): expected a {kind.__name__}, found {value!r}")


@functools.cache
def _found() -> tuple[tuple[Plugin, ...], tuple[str, ...]]:
    """The plug-ins that are installed, and what is wrong with each that cannot be had: it must break nothing else."""
    found: dict[int, Plugin] = {}
    broken: list[str] = []
    for entry in sorted(_entries(), key=lambda entry: (entry.name, entry.value)):
        try:
            plugin = entry.load()
            if not isinstance(plugin, Plugin):
                raise TypeError(f"expected a Plugin, found {plugin!r}")
            found[id(plugin)] = plugin
        except (Exception, SystemExit) as error:
            whose = PACKAGE if entry.dist is None else entry.dist.name
            broken.append(f"{entry.name} of {whose} ({entry.value}: {type(error).__name__}: {error})")
    return tuple(found.values()), tuple(broken)


def plugins() -> tuple[Plugin, ...]:
    """All plug-ins that are installed and can be imported, in the order of their names."""
    return _found()[0]


def broken_plugins() -> str:
    """A sentence for warnings and errors on the plug-ins that cannot be imported; empty if all can be."""
    broken = _found()[1]
    return f"Installed plug-ins that cannot be imported: {'; '.join(broken)}. Mend or uninstall them." * bool(broken)


def _entries() -> Iterable[metadata.EntryPoint]:
    """Entry points of all distributions, but of ours those that have a folder, whatever was there at installation."""
    folders = [file.parent.name for file in (Path(__file__).parent / "plugins").glob("*/__init__.py")]
    own = {f"{GROUP}.{name}:PLUGIN": name for name in folders}
    found = metadata.entry_points(group=GROUP)
    installed = {
        entry.value: entry for entry in found if entry.value in own or not entry.value.startswith(f"{GROUP}.")
    }
    made = {place: metadata.EntryPoint(name, place, GROUP) for place, name in own.items()}
    return (made | installed).values()


def import_named(module: str) -> ModuleType:
    """Import a module that a declaration names; one that begins with a dot is one of this package.

    Raises a MissingPluginError, which names it, if it is one of somebody else's and cannot be imported.
    """
    try:
        return import_module(module, PACKAGE)
    except (Exception, SystemExit) as error:
        if module.startswith((".", f"{PACKAGE}.")):
            raise
        raise MissingPluginError(
            f"{module}, which a plug-in of {module.partition('.')[0]} names, cannot be imported: "
            f"{type(error).__name__}: {error}. Mend or uninstall that plug-in."
        ) from error


def import_object(place: str) -> Any:
    """Import and return ``module:name``, or a module; see :func:`import_named`."""
    module, _, name = place.partition(":")
    return getattr(import_named(module), name) if name else import_named(module)


def missing_plugin_error(name: str, what: str) -> MissingPluginError:
    """The error that `what` needs the plug-in `name` of ours, which is not there."""
    return MissingPluginError(
        f"{what} needs the plug-in {name!r} of {PACKAGE} ({OURS[name]}), which is not installed. Install {PACKAGE} as "
        f"a whole, or leave out what needs it. {broken_plugins()}".rstrip()
    )


def has_tool(name: str) -> bool:
    """Whether any plug-in brings the function `name`."""
    return any(name in plugin.tools for plugin in plugins())


def tool(name: str, of: str, what: str = "") -> Any:
    """The function that plug-ins bring as `name`; a MissingPluginError names the plug-in of ours `of` if none does.

    `what` needs it, in words for the error; default: the name.
    """
    for plugin in plugins():
        if name in plugin.tools:
            return import_object(plugin.tools[name])
    raise missing_plugin_error(of, what or name)
