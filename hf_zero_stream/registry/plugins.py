"""Plug-ins: found by entry points, declared as data, and imported when a format, scheme or command of theirs is met.

A plug-in is a distribution with an entry point of the group ``hf_zero_stream.plugins`` that leads to a
:class:`Plugin`. The folders of :mod:`hf_zero_stream.plugins` are found so too. A declaration names functions as
``module:name``; these modules are imported at their first use, so that a load pays for nothing that it does not need.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import PACKAGE, ConfigError, MissingPluginError
from .formats import FileFormat, FolderFormat
from .rows import PatchScope, Row


GROUP = "hf_zero_stream.plugins"

OURS: Mapping[str, str] = {
    "hosts": "states on the hosts' own disks or in their memory",
    "demo": "hf-zero-stream demo, plan --suggest, --plot and --html, doctor --bundle",
    "remote": "checkpoints at s3://, gs://, az://, https:// and hf:// URLs",
    "packed": "quantised checkpoints: weights that stay quantised, dequantising and quantising while loading",
    "pickled": "checkpoints of torch.save, torch.distributed.checkpoint and DeepSpeed, and hf-zero-stream convert",
    "stream": "weights for inference engines",
}
"""The plug-ins of this package, and the features that are missing without each."""


class Source(NamedTuple):
    """A source of checkpoints behind URLs of one scheme.

    Attributes:
        form: the part of a checkpoint's URL behind ``scheme://``, for messages.
        module: a module with the functions of :class:`..checkpoint.urls.UrlCheckpoints`. Schemes with the same module
            are read by one source.
    """

    form: str
    module: str


@dataclass(frozen=True)
class Plugin:
    """The declaration of a plug-in: all that it brings.

    Attributes:
        name: for messages.
        rows: functions of other libraries that are replaced or relied on; see :class:`.rows.Row`.
        commands: commands of ``hf-zero-stream``: name -> module with a function ``run``, as typer takes it, and the
            text ``EXAMPLE``.
        destinations: name, for :attr:`..settings.config.StreamingConfig.destination`, ->
            ``module:function``, which takes a Coordinator, the StreamingConfig and the DeepSpeed config (empty if
            there is none), and returns a :class:`..destinations.base.Destination`.
        holders: each a ``module:function`` that is a :class:`..holdings.holding.Holder`; asked before the core's.
        sources: scheme of URLs, in lower case -> :class:`Source`.
        targets: scheme of URLs, in lower case -> a module with the functions of
            :class:`..saving.targets.UploadTarget`, by which checkpoints are saved to such URLs.
        tools: functions, or classes, that the core calls for an option of a command, or for what a load or a save
            meets: name -> ``module:function``. Without one the name is the subject of the error.
        quantisers: ``quant_method`` as transformers knows it, of weights that can stay quantised -> the
            ``module:function`` that dequantises them, see :mod:`..plugins.packed.quantisers`.
        files: formats of files, told apart by the ends of their names.
        folders: formats of whole folders, told apart by the names of what is in them. They go before those of files.
        resumes: training states of other libraries: ``module:name`` of a function of a folder, which says whether it
            is that of such a state -> of one that reads it, and gives a :class:`..state.foreign.ForeignState`.
        mounts: folders whose shards lie elsewhere: the name of a file in such a folder -> ``module:function`` of the
            folder and the Coordinator of a load, which all ranks call; inside what it returns, loads read the shards.
        guard_files: ``module:name`` of functions of a folder and a tag, which write files that tell others' tools what
            the training state is that DeepSpeed's engine has saved there.
    """

    name: str
    rows: Mapping[PatchScope, Sequence[Row]] = field(default_factory=dict)
    commands: Mapping[str, str] = field(default_factory=dict)
    destinations: Mapping[str, str] = field(default_factory=dict)
    holders: Sequence[str] = ()
    sources: Mapping[str, Source] = field(default_factory=dict)
    targets: Mapping[str, str] = field(default_factory=dict)
    tools: Mapping[str, str] = field(default_factory=dict)
    quantisers: Mapping[str, str] = field(default_factory=dict)
    files: Sequence[FileFormat] = ()
    folders: Sequence[FolderFormat] = ()
    resumes: Mapping[str, str] = field(default_factory=dict)
    mounts: Mapping[str, str] = field(default_factory=dict)
    guard_files: Sequence[str] = ()


@functools.cache
def plugins() -> tuple[Plugin, ...]:
    """All installed plug-ins, by name; raises a ConfigError if an entry point leads to no :class:`Plugin`."""
    found: dict[str, Plugin] = {}
    for entry in sorted(_entries(), key=lambda entry: entry.name):
        plugin = entry.load()
        if not isinstance(plugin, Plugin):
            raise ConfigError(
                f"the entry point {entry.name} of {GROUP}: expected a Plugin at {entry.value}; found {plugin!r}."
            )
        found[plugin.name] = plugin
    return tuple(found.values())


def _entries() -> Iterable[metadata.EntryPoint]:
    """Entry points of all distributions, but of ours those that have a folder, whatever was there at installation."""
    folders = [file.parent.name for file in (Path(__file__).parent.parent / "plugins").glob("*/__init__.py")]
    own = {f"{GROUP}.{name}": name for name in folders}
    found = metadata.entry_points(group=GROUP)
    installed = {entry.module: entry for entry in found if entry.module in own or not entry.module.startswith(GROUP)}
    made = {module: metadata.EntryPoint(name, f"{module}:PLUGIN", GROUP) for module, name in own.items()}
    return (made | installed).values()


def import_object(place: str) -> Any:
    """Import and return ``module:name``; a module that begins with a dot is one of this package."""
    module, _, name = place.partition(":")
    return getattr(import_module(module, PACKAGE), name)


def missing_plugin_error(name: str, what: str) -> MissingPluginError:
    """The error that `what` needs the plug-in `name` of ours, which is not there."""
    return MissingPluginError(
        f"{what} needs the plug-in {name!r} of {PACKAGE} ({OURS[name]}), which is not installed. Install {PACKAGE} as "
        f"a whole, or leave out what needs it."
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
