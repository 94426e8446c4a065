"""A source of bytes that lie in memory: a test double, and an example of how to add a source.

Its "requests" may fail, and it notices changes by the identity of what it holds, as an object store does by ETags.
"""

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from hf_zero_stream.errors import CheckpointError, ReadError
from hf_zero_stream.sources.base import Hints, Retries, SourceFile


class Busy(OSError):
    """A fault that may pass."""


class MemoryFile:
    def __init__(self, content: bytes) -> None:
        self.size_bytes, self.tag, self._content = len(content), "", content

    def read(self, start: int, nbytes: int) -> bytes:
        return self._content[start : start + nbytes]


class MemoryFiles:
    """Files in memory (see `ByteSource` for what each method must do).

    Args:
        contents: by path; what is put into it later is found there too.
    """

    def __init__(self, contents: dict[str, bytes], retries: Retries | None = None, hints: Hints = Hints(64)) -> None:
        self.contents = contents
        self.failures: list[OSError] = []
        """Errors of the next requests."""
        self.bytes_read = self.reads = 0
        self._hints, self._retries = hints, retries or Retries()
        self._lock = threading.Lock()
        self._files: list[SourceFile] = []
        self._seen: dict[str, bytes] = {}

    @contextmanager
    def open_file(self, path: str) -> Iterator[MemoryFile]:
        content = self._request(path)
        self._seen.setdefault(path, content)
        yield MemoryFile(content)

    def is_transient(self, error: BaseException | None) -> bool:
        return isinstance(error, Busy)

    def add(self, files: Sequence[SourceFile]) -> None:
        self._files += files

    def hints(self, paths: Sequence[str]) -> Hints:
        return self._hints

    def open(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._content(number)

    def read_into(self, number: int, start: int, buffers: Sequence[memoryview]) -> None:
        content, stop = self._content(number), start + sum(map(len, buffers))
        if stop > len(content):
            raise ReadError(f"{self._files[number].path}: cannot read bytes {start} to {stop}: the file ends here.")
        with self._lock:
            self.bytes_read += stop - start
            self.reads += 1
        for buffer in buffers:
            buffer[:] = content[start : start + len(buffer)]
            start += len(buffer)

    def check_unchanged(self) -> None:
        self.open(range(len(self._files)))

    def finish(self) -> None:
        pass

    close = finish

    def _content(self, number: int) -> bytes:
        path = self._files[number].path
        try:
            content = self._retries.call(lambda: self._request(path), self.is_transient)
        except OSError as error:
            raise ReadError(f"{path}: cannot open: {error}.") from error
        if content is not self._seen.setdefault(path, content):
            raise CheckpointError(f"{path}: was replaced while it was being loaded.")
        return content

    def _request(self, path: str) -> bytes:
        with self._lock:
            if self.failures:
                raise self.failures.pop()
        if path not in self.contents:
            raise FileNotFoundError(f"no such file: {path}")
        return self.contents[path]
