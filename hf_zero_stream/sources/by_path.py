"""The source for files wherever they are: each goes to the source for files of this host, or to that for URLs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from .base import ByteSource, Hints, ReadableFile, SourceFile
from .local import LocalFiles
from .urls import is_url


if TYPE_CHECKING:
    from .remote import RemoteFiles


class FilesByPath:
    """Files of this host and objects by URL (see :class:`.base.ByteSource`); most loads have only one of the kinds."""

    def __init__(self, local: LocalFiles, make_remote: Callable[[], RemoteFiles]) -> None:
        self.local, self._make_remote = local, make_remote
        self._remote: RemoteFiles | None = None
        self._places: list[tuple[ByteSource, int]] = []
        """For each file, its source and its number there."""

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
        """Those for URLs if there is one: a local file read by them is read well enough."""
        urls = [path for path in paths if is_url(path)]
        return self._of(urls[0]).hints(urls) if urls else self.local.hints(paths)

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
        return [self.local] if self._remote is None else [self.local, self._remote]

    def _of(self, path: str) -> ByteSource:
        if not is_url(path):
            return self.local
        if self._remote is None:
            self._remote = self._make_remote()
        return self._remote
