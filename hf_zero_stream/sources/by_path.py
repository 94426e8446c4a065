"""One source for files of this host and for URLs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import cast

from ..ranks.coordinator import Coordinator
from ..registry import import_object, plugins
from ..settings.scope import set_in_context
from .base import ByteSource, Hints, ReadableFile, Retries, SourceFile, is_url
from .local import LocalFiles


_mounted: ContextVar[tuple[tuple[str, Callable[[Retries], ByteSource]], ...]] = ContextVar(
    "hf_zero_stream_mounted_folders", default=()
)
"""Folders whose files another source gives, with what makes it; the innermost comes first."""


@contextmanager
def mounted(folder: str | os.PathLike[str], make: Callable[[Retries], ByteSource]) -> Iterator[None]:
    """Inside, the files of `folder` are read from what `make` makes, by this load and not by others beside it."""
    prefix = os.path.join(os.path.abspath(folder), "")
    with set_in_context(_mounted, ((prefix, make), *_mounted.get())):
        yield


def mounted_folders() -> list[str]:
    """The folders that are mounted here."""
    return sorted({prefix for prefix, _ in _mounted.get()})


def mount_of(folder: object) -> str:
    """The function of a plug-in that finds the shards of `folder` elsewhere, as ``module:name``; else ""."""
    if not isinstance(folder, (str, os.PathLike)):
        return ""
    found = {os.path.join(folder, name): place for plugin in plugins() for name, place in plugin.mounts.items()}
    return next((place for path, place in found.items() if os.path.isfile(path)), "")


@contextmanager
def mounted_by_plugin(folder: object, coordinator: Coordinator) -> Iterator[None]:
    """Inside, loads read the shards in a `folder` whose shards a plug-in finds elsewhere (all ranks, in a meeting)."""
    # Another host than rank 0's may be the one that has the folder.
    place = next(filter(None, coordinator.all_gather(mount_of(folder))), "")
    with import_object(place)(Path(cast(str, folder)), coordinator) if place else nullcontext():
        yield


class FilesByPath:
    """Files of this host and of mounted folders, and objects by URL (see :class:`ByteSource`).

    Most loads have only one of the kinds.

    `maker_at` returns the function that makes the source for a URL; URLs with the same maker share one source.
    """

    def __init__(
        self, local: LocalFiles, retries: Retries, maker_at: Callable[[str], Callable[[Retries], ByteSource]]
    ) -> None:
        self.local, self._retries, self._maker_at = local, retries, maker_at
        self._others: dict[Callable[[Retries], ByteSource], ByteSource] = {}
        self._places: list[tuple[ByteSource, int]] = []
        """The source of each file, and the file's number there."""

    @property
    def bytes_read(self) -> int:
        return sum(source.bytes_read for source in self._sources)

    @property
    def reads(self) -> int:
        return sum(source.reads for source in self._sources)

    def open_file(self, path: str) -> AbstractContextManager[ReadableFile]:
        return self._of(path).open_file(path)

    def is_transient(self, error: BaseException | None) -> bool:
        return any(source.is_transient(error) for source in self._sources)

    def add(self, files: Sequence[SourceFile]) -> None:
        for file in files:
            source = self._of(file.path)
            number = sum(found is source for found, _ in self._places)
            source.add([file])
            self._places.append((source, number))

    def hints(self, paths: Sequence[str]) -> Hints:
        """The hints for URLs or mounted folders if there is one: they are good enough for a local file."""
        first = next((source for source in map(self._of, paths) if source is not self.local), self.local)
        return first.hints([path for path in paths if self._of(path) is first])

    def open(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            source, there = self._places[number]
            source.open([there])

    def read_into(self, number: int, start: int, buffers: Sequence[memoryview]) -> None:
        source, there = self._places[number]
        source.read_into(there, start, buffers)

    def check_unchanged(self) -> None:
        for source in self._sources:
            source.check_unchanged()

    def finish(self) -> None:
        for source in self._sources:
            source.finish()

    def close(self) -> None:
        for source in self._sources:
            source.close()

    @property
    def _sources(self) -> list[ByteSource]:
        return [self.local, *self._others.values()]

    def _of(self, path: str) -> ByteSource:
        if is_url(path):
            make = self._maker_at(path)
        else:
            mounts = _mounted.get()
            place = os.path.abspath(path) if mounts else ""
            found = next((make for prefix, make in mounts if place.startswith(prefix)), None)
            if found is None:
                return self.local
            make = found
        if make not in self._others:
            self._others[make] = make(self._retries)
        return self._others[make]
