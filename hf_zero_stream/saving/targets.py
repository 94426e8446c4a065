"""Saves to URLs: plug-ins know where they can go, each by the schemes that it brings (``Plugin.targets``)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

from ..checkpoint.urls import checkpoints_at, without_secrets
from ..errors import ConfigError, UrlError
from ..registry import broken_plugins, import_named, plugins
from ..sources.base import is_url
from .publication import Publication


class PlannedShards(NamedTuple):
    """Shards that belong together, by their names below the URL that is saved to.

    Attributes:
        names: as a save into a folder would name them.
        index_name: the name of the file that names them if there are several.
        tensors: the names of the tensors in each, for an index.
        nbytes: bytes of tensors in all of them.
    """

    names: Sequence[str]
    index_name: str
    tensors: Sequence[Sequence[str]]
    nbytes: int


class ObjectWriter(Protocol):
    """Writes one object from its first byte to its last; nobody sees it before :meth:`finish` has returned."""

    def write(self, data: memoryview) -> None:
        """Send these bytes, or keep a copy of them until there are enough; raises a SaveError."""

    def finish(self) -> None:
        """Wait until all has been sent, and make the object visible; raises a SaveError."""

    def check(self) -> None:
        """Raise a SaveError if the object, which is finished, is not read as it was written."""


class RemotePublication(Protocol):
    """A save to a URL, as :class:`.publication.Publication` is one into a folder; made on rank 0, and ended there.

    Until :meth:`commit`, whoever loads from the URL finds what was there before; so it is if a process dies.
    """

    @property
    def temporary(self) -> Path:
        """A folder of this host, for the small files and for shards with headers and no values."""

    def assign(self, planned: Sequence[PlannedShards]) -> list[list[str]]:
        """Take the place over, and give the URLs of the objects that these shards become; before any is written.

        What an earlier save has left is finished or removed. Raises a SaveError.
        """

    def commit(self, weights_name: str, index_name: str, last_name: str = "", replaced: Sequence[str] = ()) -> None:
        """See :meth:`.publication.Publication.commit`."""

    def abandon(self) -> None:
        """Remove what has been written, as far as the server lets us.

        Raises a PlaceTakenError if another save has taken the place: that is why this one failed.
        """


class UploadTarget(Protocol):
    """The functions of a plug-in's module for saves to URLs."""

    def begin(self, url: str) -> RemotePublication:
        """Begin a save, which takes the place over in :meth:`RemotePublication.assign`; asks no server."""

    def finish_interrupted(self, url: str) -> None:
        """Finish the save to `url` that has happened and died before all was done; raises a SaveError."""

    def names(self, url: str) -> set[str]:
        """The names of what lies directly below `url`, those of folders with a slash behind; raises a SaveError."""

    def writer(self, url: str, size_bytes: int, *, checks: bool) -> ObjectWriter:
        """Begin an object of this size; if it `checks`, :meth:`ObjectWriter.check` is called at the end."""

    def canonical(self, url: str) -> str:
        """The URL without slashes at its end; raises an UrlError if nothing can be saved there. Asks no server."""


def target_at(url: Any) -> UploadTarget:
    """The functions for saves to URLs such as `url`.

    Raises:
        MissingPluginError: the plug-in of this package is not there.
        UrlError: no plug-in writes to this scheme.
    """
    checkpoints_at(url)  # raises if nothing can be read there either
    scheme = str(url).partition(":")[0].lower()
    targets = {scheme: module for plugin in plugins() for scheme, module in plugin.targets.items()}
    if scheme not in targets:
        raise UrlError(
            f"{without_secrets(str(url))!r}: checkpoints are read from {scheme}:// and not written there; expected a "
            f"folder, or one of {', '.join(f'{known}://' for known in targets)}. Save into a folder, then upload it "
            "from one rank (a repository of the Hub: `hf upload ORGANISATION/NAME FOLDER`). "
            f"{broken_plugins()}".rstrip()
        )
    return cast(UploadTarget, import_named(targets[scheme]))


AnyPublication = Publication | RemotePublication


def begin_at(place: Path | str) -> AnyPublication:
    """Begin a save into a folder or to a URL, which :func:`place_of_save` gave; on one rank."""
    return Publication.begin(place) if isinstance(place, Path) else target_at(place).begin(place)


def place_of_save(folder: str | os.PathLike[str]) -> Path | str:
    """The folder, or the URL that can be saved to, which `folder` names; raises as :func:`target_at`."""
    return target_at(folder).canonical(str(folder)) if is_url(folder) else Path(folder)


def refuse_other_places(of_ranks: Sequence[Path | str]) -> None:
    """Raise a ConfigError if only some ranks save to a URL, or to another one; folders may have other names."""
    first = of_ranks[0]
    for rank, place in enumerate(of_ranks):
        if place != first and not (isinstance(place, Path) and isinstance(first, Path)):
            raise ConfigError(
                f"Expected one place to save to on all ranks; rank {rank} saves to {place}, rank 0 to {first}."
            )
