"""The source for objects in buckets and files on web servers: ranges by obstore, the Rust ``object_store``.

Credentials, endpoints and regions are obstore's conventions (``AWS_ACCESS_KEY_ID``, ``AWS_ENDPOINT_URL``,
``GOOGLE_APPLICATION_CREDENTIALS``, ...; docs/sources.md). obstore itself checks that an answer is the range that was
asked for before its body is read; which version of the object it is, and how long the body is, is checked here.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ...errors import CheckpointError, ReadError
from ...plugin_api import Hints, Retries, SourceFile, advance
from .hub import HubFiles
from .response_cache import ResponseCache
from .urls import PASSING_STATUS, RequestFailed, located, scheme_of


if TYPE_CHECKING:
    from obstore import GetResult
    from obstore.store import ClientConfig, RetryConfig

REQUEST_BYTES = 2 * 2**20
"""So small that the default of 64 MiB of staging buffers gives 32 requests in flight: at 400 MB/s and 50 ms they use
all of a link, of which 16 of 4 MiB used 82 %."""

HUB_REQUEST_BYTES = 4 * 2**20
"""The Hub puts files together from chunks, and looks these up for each request."""

CHUNK_BYTES = 256 * 1024
"""What obstore gathers of an answer before it is copied on: the memory of a request in flight."""

FIRST_BYTES = 100_000
"""What is read of a file at first: enough for most headers, so that a shard costs one request."""

BEGINNING = "beginning"
"""Names the first bytes of an object among the answers of a call."""

CONNECT_S, STALL_S, REQUEST_S = 5, 15, 300
"""Seconds after which a connection that is not made, an answer that does not go on, and any request count as lost."""

_STATUS = re.compile(r"non-2xx status code: (\d{3})")
_LOST = re.compile("error sending request|error decoding response body|request or response body error")
"""What obstore says of connections that could not be made, were lost or stalled."""

_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
_CREDENTIALS_SERVICE = "169.254.169.254"
_WHO_MAY_READ = {
    "s3": "the credentials (AWS_ACCESS_KEY_ID, AWS_PROFILE is not read; AWS_SKIP_SIGNATURE=true for a public bucket)",
    "gs": "the credentials (GOOGLE_APPLICATION_CREDENTIALS; GOOGLE_SKIP_SIGNATURE=true for a public bucket)",
    "az": "the credentials (AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_KEY, ...)",
    "hf": "the token (HF_TOKEN, or `hf auth login`), and that its owner has been granted access",
}


_asking_process: int | None = None
"""The process that made the first request."""


class Beginning(NamedTuple):
    """The first bytes of an object, and which version of it they are of."""

    size_bytes: int
    tag: str
    block: bytes


class _ObjectHeader:
    """An object whose beginning was read; small reads are made large, because many of them are near each other."""

    def __init__(self, source: RemoteFiles, path: str) -> None:
        self._source, self._path, self._start = source, path, 0
        self.size_bytes, self.tag, self._block = source.beginning(path)

    def read(self, start: int, nbytes: int) -> bytes:
        stop, end = min(start + nbytes, self.size_bytes), self._start + len(self._block)
        if not self._start <= start <= stop <= end:
            is_known = self._start <= start < end  # go on where the block ends
            more = self._source.read_range(self._path, end if is_known else start, max(stop, start + FIRST_BYTES))
            self._block = self._block[start - self._start :] + more if is_known else more
            self._start = start
        return self._block[start - self._start : stop - self._start]


class RemoteFiles:
    """Objects by their URLs (see :class:`...sources.base.ByteSource`); the methods may be used from many threads.

    An object is pinned to the version whose header was read: every answer's ETag (generation, or time of the last
    change) and size are compared with that one's, so what has been read is of one version.

    The beginnings of objects, with their headers, are asked for once in a call (``cached_responses()``).
    """

    def __init__(self, retries: Retries | None = None) -> None:
        self._retries = retries or Retries()
        self._files: list[SourceFile] = []
        self._pins: dict[str, tuple[int, str]] = {}
        self._stores: dict[str, Any] = {}
        self.hub = HubFiles()
        self._lock = threading.Lock()
        self.bytes_read = self.reads = 0

    @contextmanager
    def open_file(self, path: str) -> Iterator[_ObjectHeader]:
        yield _ObjectHeader(self, path)

    def is_transient(self, error: BaseException | None) -> bool:
        return isinstance(error, RequestFailed) and error.is_transient

    def add(self, files: Sequence[SourceFile]) -> None:
        self._files += files
        for file in files:
            self._pin(file.path, file.size_bytes, file.tag)

    def hints(self, paths: Sequence[str]) -> Hints:
        # One stream of S3 gives 50 to 100 MB/s. 1 MiB is what a stream could have read while a request waits 10 ms or
        # more for its first byte.
        return Hints(
            request_bytes=HUB_REQUEST_BYTES if any(scheme_of(path) == "hf" for path in paths) else REQUEST_BYTES,
            is_remote=True,
            streams_per_host=128,
            streams_per_rank=32,
            seek_bytes=2**20,
            is_everywhere=True,
        )

    def open(self, numbers: Iterable[int]) -> None:
        """Do nothing: there is nothing to hold open, and rank 0 has just read the headers."""

    def read_into(self, number: int, start: int, buffers: Sequence[memoryview]) -> None:
        path = self._files[number].path
        pending = [buffer for buffer in buffers if len(buffer)]
        length = sum(map(len, pending))
        with self._lock:
            self.bytes_read += length
            self.reads += 1
        stop, position = start + length, start

        def read_on() -> None:
            nonlocal position
            for piece in self.ask(path, position, stop)[1]:
                _fill(pending, piece)
                position += len(piece)

        try:
            if length:
                self._retries.call(read_on, self.is_transient, jitter=True)
        except RequestFailed as error:
            raise ReadError(f"{path}: cannot read bytes {start} to {stop}: {error}") from error
        if position < stop:
            raise ReadError(f"{path}: cannot read bytes {start} to {stop}: the object ends at byte {position}.")

    def ask(self, path: str, start: int, stop: int) -> tuple[tuple[int, str], Iterator[bytes]]:
        """(size of an object, its tag), and its bytes ``[start, stop)``, or those up to its end, in pieces.

        Both this and iterating raise:
            RequestFailed: the request failed, or its answer ended too early.
            ReadError: the answer is longer than what was asked for, or compressed.
            CheckpointError: the object is not the one that this rank, or rank 0, saw first.
        """
        refuse_after_fork(path)
        with self._explaining(path):
            import obstore

            store, key = self._place(path)
            answer = obstore.get(store, key, options={"range": (start, stop)})
            _refuse_encoded(path, answer)
            meta, (begin, end) = answer.meta, answer.range
            tag = self.hub.tag(path) or meta["e_tag"] or meta["version"] or ""
            if not tag and meta["last_modified"].timestamp() > 0:
                tag = meta["last_modified"].isoformat()
            pin = self._pin(path, meta["size"], tag)
            if begin != start or end != min(stop, meta["size"]):
                raise RequestFailed(f"the server sent bytes {begin} to {end} in place of {start} to {stop}.")
            return pin, self._body(path, answer, begin, end)

    def _pin(self, path: str, size_bytes: int, tag: str) -> tuple[int, str]:
        pin = (size_bytes, tag)
        if self._pins.setdefault(path, pin) != pin:
            raise _changed(path)
        return pin

    def beginning(self, path: str) -> Beginning:
        """The first bytes of an object; raises as :meth:`ask`."""
        ask, cache = partial(self._ask_beginning, path), ResponseCache.current()
        found = ask() if cache is None else cache.get((BEGINNING, path), ask)
        self._pin(path, found.size_bytes, found.tag)  # another source may have asked for it
        return found

    def prefetch_beginnings(self, paths: Iterable[str], cache: ResponseCache) -> None:
        """Begin to ask for what :meth:`beginning` is going to give."""
        for path in paths:
            cache.prefetch((BEGINNING, path), partial(self._ask_beginning, path))

    def _ask_beginning(self, path: str) -> Beginning:
        (size_bytes, tag), pieces = self.ask(path, 0, FIRST_BYTES)
        return Beginning(size_bytes, tag, b"".join(pieces))

    def read_range(self, path: str, start: int, stop: int) -> bytes:
        """The bytes ``[start, stop)``, or those up to the object's end; raises as :meth:`ask`."""
        return b"".join(self.ask(path, start, stop)[1])

    def _body(self, path: str, answer: GetResult, begin: int, end: int) -> Iterator[bytes]:
        with self._explaining(path):
            for piece in answer.stream(min_chunk_size=CHUNK_BYTES):
                begin += len(piece)
                if begin > end:
                    raise ReadError(
                        f"{path}: the server sent more bytes than it was asked for, beyond byte {end}. It does not "
                        "keep to HTTP; read from another one."
                    )
                yield bytes(piece)
            if begin < end:
                raise RequestFailed(f"the answer ended at byte {begin}.", is_transient=True)

    @contextmanager
    def _explaining(self, path: str) -> Iterator[None]:
        """Turn the errors of obstore into ours."""
        try:
            yield
        except Exception as error:
            import obstore.exceptions as kinds

            if isinstance(error, kinds.PreconditionError):
                raise _changed(path) from error
            if not isinstance(error, (kinds.BaseError, FileNotFoundError)):
                raise
            found = explained(path, error)
            if found.status in (401, 403) and scheme_of(path) == "hf":
                found.is_transient = self.hub.forget(path)  # the address has expired
            raise found from error
        except BaseException as error:
            if not is_panic(error):
                raise
            raise explained(path, error) from error

    def read_whole(self, path: str, most_bytes: int) -> bytes:
        """A small object as it is now, whatever it was before; raises as :meth:`read_into`, or RequestFailed (404)."""

        def read() -> bytes:
            self._pins.pop(path, None)
            (size_bytes, _), pieces = self.ask(path, 0, most_bytes)
            if size_bytes > most_bytes:
                raise CheckpointError(f"{path}: at most {most_bytes} bytes are allowed; found {size_bytes}.")
            return b"".join(pieces)

        return self._retries.call(read, self.is_transient, jitter=True)

    def check_unchanged(self) -> None:
        """Do nothing: every answer was compared with the pinned version."""

    def finish(self) -> None:
        pass

    def close(self) -> None:
        self._stores.clear()

    def _place(self, path: str) -> tuple[Any, str]:
        """The store and the key to ask for."""
        if scheme_of(path) == "hf":
            found = self.hub.resolve(path)
            return self._store(found.url, found.headers), ""
        store, key = located(path)
        return self._store(store), key

    def _store(self, url: str, headers: tuple[tuple[str, str], ...] = ()) -> Any:
        with self._lock:
            if url not in self._stores:
                try:
                    self._stores[url] = open_store(url, dict(headers))
                except ValueError as error:  # such as a port of six digits
                    raise RequestFailed(f"the address is not valid: {error}. Check the host and its port.") from error
            return self._stores[url]


def refuse_after_fork(path: str) -> None:
    """Raise a ReadError in a process that was forked from one that has made requests: obstore would wait for ever."""
    global _asking_process
    if _asking_process is None:
        _asking_process = os.getpid()
    elif _asking_process != os.getpid():
        raise ReadError(
            f"{path}: this process was forked from process {_asking_process}, which has read from URLs, and the "
            "threads that do so are not there any more. Load before workers are forked and pass them what was loaded, "
            'or start them with "spawn" (DataLoader(multiprocessing_context="spawn"), not notebook_launcher).'
        )


_NEVER: RetryConfig = {"max_retries": 0, "retry_timeout": timedelta(0)}  # a source tries again itself, and counts it


def open_store(url: str, headers: dict[str, str], retry: RetryConfig = _NEVER) -> Any:
    """The store at `url`: a bucket, a container, a host; raises a ValueError if there can be none."""
    from obstore.store import AzureStore, HTTPStore, from_url

    options: ClientConfig = {
        "connect_timeout": timedelta(seconds=CONNECT_S),
        "read_timeout": timedelta(seconds=STALL_S),
        "timeout": timedelta(seconds=REQUEST_S),
    }
    scheme = scheme_of(url)
    if scheme in ("http", "https"):
        # From https no redirect leads to plain http; to other schemes, such as file, none does.
        options["allow_http"] = scheme == "http"
        if headers:
            options["default_headers"] = headers
        return HTTPStore.from_url(url, client_options=options, retry_config=retry)
    # Our options take the place of AWS_ALLOW_HTTP: who gives an endpoint with http:// allows it.
    options["allow_http"] = any(endpoint.startswith("http://") for endpoint in _endpoints(scheme))
    if scheme == "az":  # whose account obstore takes for a container
        account, container = url.removeprefix("az://").split("/")
        return AzureStore(container, account_name=account, client_options=options, retry_config=retry)
    return from_url(url, client_options=options, retry_config=retry)


def _endpoints(scheme: str) -> list[str]:
    return [os.environ[name] for name in _ENDPOINTS.get(scheme, ()) if os.environ.get(name)]


def endpoint_of(scheme: str) -> str:
    """The address of the server that the environment names for all buckets of a `scheme`; "" if it names none."""
    return next(iter(_endpoints(scheme)), "")


def _refuse_encoded(path: str, answer: GetResult) -> None:
    """Raise a ReadError if the bytes of an answer are not those of the object: its length alone would not tell."""
    encoding = str(answer.attributes.get("Content-Encoding") or "")
    # Stores that speak S3's protocol may keep "aws-chunked" from an upload; it says nothing of a download.
    if {name.strip().lower() for name in encoding.split(",")} - {"", "identity", "aws-chunked"}:
        raise ReadError(
            f"{path}: the server sends it compressed (Content-Encoding: {encoding[:40]!r}), although this was not "
            "asked for. Upload the file without this Content-Encoding, or have the server, or the proxy before it, "
            "leave files as they are."
        )


def _fill(pending: list[memoryview], piece: bytes) -> None:
    rest = memoryview(piece)
    while rest:
        count = min(len(rest), len(pending[0]))
        pending[0][:count] = rest[:count]
        advance(pending, count)
        rest = rest[count:]


def _changed(path: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: was replaced while it was being loaded: it has another ETag or size than when its header was read. "
        "The model may hold parts of two versions. Wait until whoever writes it is done, then load again."
    )


def is_panic(error: BaseException) -> bool:
    """Whether this is a panic of obstore's Rust, which is no Exception and is of no class that can be imported."""
    return type(error).__name__ == "PanicException"


def explained(path: str, error: BaseException) -> RequestFailed:
    """Shorten an error of obstore, without the signatures that addresses may hold, and say what to do about it."""
    import obstore.exceptions as kinds

    if is_panic(error):
        return RequestFailed(f"obstore cannot take in what the server answers: {error}. Ask another server.")
    text = re.sub(r"\?[^\s)]*", "?...", str(error).partition("\n\nDebug source")[0].strip()[:500]).removesuffix(".")
    found = _STATUS.search(text)
    status = int(found[1]) if found else 0
    if isinstance(error, FileNotFoundError):
        return RequestFailed("there is no such object (404). Check the bucket or host, and the prefix.", 404)
    if status == 404:  # nothing else is asked for that may be missing
        return RequestFailed("there is no such bucket or container (404). Check its name, and the endpoint.", 404)
    if _CREDENTIALS_SERVICE in text:
        return RequestFailed(f"no credentials were found. Check {_WHO_MAY_READ.get(scheme_of(path), 'them')}. {text}")
    if status in (401, 403) or isinstance(error, (kinds.PermissionDeniedError, kinds.UnauthenticatedError)):
        check = _WHO_MAY_READ.get(scheme_of(path), "whether the server wants credentials, which cannot be given here")
        return RequestFailed(f"access is denied ({status or 403}). Check {check}.", status or 403)
    if isinstance(error, kinds.NotSupportedError):
        return RequestFailed(f"the server does not give ranges of files. Download the checkpoint, or move it. {text}")
    is_transient = status >= 500 or status in PASSING_STATUS or (not status and _LOST.search(text) is not None)
    return RequestFailed(f"{text}.", status, is_transient)
