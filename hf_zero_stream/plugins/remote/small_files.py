"""Small files of a checkpoint behind a URL: each comes into a temporary folder, weights never do."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

from ...plugin_api import RETRIES, ByteSource, Retries, resource_around
from .files import RemoteFiles
from .response_cache import ResponseCache
from .urls import RequestFailed


MOST_BYTES = 200_000_000
"""Of one file: the index of a large checkpoint has 8 MB, a tokenizer 30 MB."""

_WHOLE = "whole"
"""Names all of a small file among the answers of a call."""


T = TypeVar("T")


class SmallFiles:
    """Copies of small files, until it is closed.

    A file may change, so it is fetched anew whenever it is asked for, but once in a call (``cached_responses()``).
    """

    def __init__(self) -> None:
        self._retries = Retries(RETRIES)
        self._remote = RemoteFiles(self._retries)
        around = resource_around(SmallFiles)
        # A load inside another one reads the same save.
        self._known: dict[str, bytes | None] = {} if around is None else dict(around._known)
        self._folder = tempfile.TemporaryDirectory(prefix="hf-zero-stream-")

    def fetch(self, url: str, folder: Path | None = None) -> Path:
        """The copy of the file, under its own name, in `folder` or a new one.

        Raises RequestFailed if it is not there (status 404) or cannot be read.
        """
        self._refuse_removed(url)
        path = (folder or self.new_folder(url)) / url.rpartition("/")[2]
        read, cache = partial(self._remote.read_whole, url, MOST_BYTES), ResponseCache.current()
        data = self._known.get(url)
        if data is None:
            data = read() if cache is None else cache.get((_WHOLE, url), read)
        path.write_bytes(data)
        return path

    def know(self, contents: Mapping[str, bytes | None]) -> None:
        """Give these `contents`, by URL, in place of what the server has; None is a file that is not there."""
        self._known |= contents

    def _refuse_removed(self, url: str) -> None:
        if self._known.get(url, b"") is None:
            raise RequestFailed("the last save there has replaced it by another file (404).", 404)

    def prefetch(self, urls: Iterable[str], beginnings: Iterable[str], cache: ResponseCache) -> None:
        """Begin to fetch small files, of which some may not be there, and the beginnings of large ones."""
        for url in urls:
            cache.prefetch((_WHOLE, url), partial(self._remote.read_whole, url, MOST_BYTES))
        self._remote.prefetch_beginnings(beginnings, cache)

    def new_folder(self, url: str) -> Path:
        """An empty folder with the last name of `url`."""
        name = "".join(letter if letter.isalnum() else "_" for letter in url.rstrip("/").rpartition("/")[2])
        folder = Path(tempfile.mkdtemp(dir=self._folder.name), name)
        folder.mkdir()
        return folder

    def require(self, url: str) -> None:
        """Raise as :meth:`fetch` if there is no such file; only its beginning is read."""
        self._refuse_removed(url)
        if url in self._known:
            return
        self._retries.call(partial(self._remote.beginning, url), self._remote.is_transient, jitter=True)

    def header(self, url: str, read: Callable[[ByteSource, str], T]) -> T:
        """Return what `read` reads of a file, tried again while its error has a passing cause."""
        return self._retries.call(
            lambda: read(self._remote, url), lambda error: self._remote.is_transient(error.__cause__), jitter=True
        )

    def pinned(self, url: str) -> str:
        """`url` such that it means the same file for a whole load: of the Hub's, with the commit for the revision."""
        return self._remote.hub.pinned(url)

    def close(self) -> None:
        self._remote.close()
        self._folder.cleanup()
