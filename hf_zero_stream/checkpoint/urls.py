"""Checkpoints behind URLs: plug-ins know them, each by the schemes that it brings (``Plugin.sources``)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from ..errors import UrlError
from ..registry import broken_plugins, import_named, missing_plugin_error, plugins
from ..sources.base import ByteSource, Retries


if TYPE_CHECKING:
    from .index import Fault
    from .map import CheckpointMap

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]+)://", re.IGNORECASE)


class UrlCheckpoints(Protocol):
    """The functions of a plug-in's module for checkpoints behind URLs.

    A `url` is what :meth:`canonical` has returned. All but the first two are called inside a block
    (:func:`..settings.scope.inside`). What transformers looks for by name, a config or a tokenizer, comes by rows of
    the plug-in.
    """

    def canonical(self, path: str, revision: str | None = None, token: Any = None) -> str:
        """The URL by which a checkpoint is known from now on, from the arguments of ``from_pretrained``.

        Raises an UrlError if there can be no checkpoint; asks no server.
        """

    def source(self, retries: Retries) -> ByteSource:
        """Make the source that reads files at such URLs, once for each load."""

    def prefetching(self, url: str, names: Sequence[str]) -> AbstractContextManager[None]:
        """A context for a call that is going to need files with these `names`, of which most may not be there."""

    def has_file(self, url: str, name: str) -> bool:
        """Whether there is such a file in the checkpoint; raises a ReadError if that cannot be known."""

    def shards(self, url: str) -> tuple[list[str], dict[str, str] | None]:
        """(URLs of the files that a load would read, the index's weight map if there is an index).

        Raises:
            ReadError: there are none, or what names them cannot be read.
            CheckpointError: the index is not sound.
        """

    def checked(
        self, url: str, faults: list[Fault]
    ) -> tuple[list[str], dict[str, str] | None, dict[str, CheckpointMap]]:
        """As :meth:`shards`, by name, and the map of each shard whose header is sound; adds all `faults` of others."""

    def fetched(self, url: str) -> Path:
        """A copy on this host of a small file; a FileNotFoundError if it is not there, a ReadError."""

    def catch_up(self, url: str) -> None:
        """From now on files are those of the last save to `url`, also if it died before it had put them all there."""


class UrlPath:
    """A file or folder behind a URL, for code that reads small files by methods of a ``Path``; inside a block."""

    def __init__(self, url: str) -> None:
        self.url = url

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> UrlPath:
        return UrlPath(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> UrlPath:
        return UrlPath(self.url.rpartition("/")[0])

    def is_file(self) -> bool:
        return checkpoints_at(self.url).has_file(str(self.parent), self.name)

    def read_bytes(self) -> bytes:
        return on_this_host(self).read_bytes()

    def read_text(self, encoding: str) -> str:
        return self.read_bytes().decode(encoding)


def on_this_host(path: Path | UrlPath) -> Path:
    """The path of a file, or of a copy of one behind a URL; an OSError if there is no such file there."""
    return checkpoints_at(path.url).fetched(path.url) if isinstance(path, UrlPath) else path


def checkpoints_at(path: Any) -> UrlCheckpoints:
    """The functions for checkpoints at URLs such as `path`, which need be none of a checkpoint yet.

    Raises:
        MissingPluginError: the plug-in of this package is not there.
        UrlError: no plug-in brings the scheme.
    """
    sources = {scheme: source for plugin in plugins() for scheme, source in plugin.sources.items()}
    found = _SCHEME.match(str(path))
    if found is not None and found[1].lower() in sources:
        return cast(UrlCheckpoints, import_named(sources[found[1].lower()].module))
    url = repr(without_secrets(str(path)))
    if not any(plugin.name == "remote" for plugin in plugins()):
        raise missing_plugin_error("remote", url)
    raise UrlError(
        f"{url}: expected one of {', '.join(f'{scheme}://{source.form}' for scheme, source in sources.items())}. A "
        "folder of this host is given by its path, without file://. A URL must be a str: a Path loses one of its "
        f"slashes. {broken_plugins()}".rstrip()
    )


def without_secrets(url: str) -> str:
    """`url` as an error may quote it: without user and password before an @, and without the query's signatures."""
    return re.sub(r"//[^/?#]*@", "//...@", re.sub(r"\?.*", "?...", url, flags=re.DOTALL))
