"""What is called with every server that the fuzzer makes: one that answers a request wrongly.

An object is read from a server of this process as a load reads it: its header, then its values; or whole, as a
config; or through the Hub. The input says which answer is hostile and how. Either the values come as they are, from
one version of the object, or one of our errors is raised, which names the object.
"""

from __future__ import annotations

import functools
import gzip
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any
from unittest import mock

import obstore
import obstore.exceptions
import torch
from safetensors.torch import save

from hf_zero_stream.checkpoint.formats import map_from_headers
from hf_zero_stream.checkpoint.safetensors import read_header
from hf_zero_stream.errors import HfZeroStreamError
from hf_zero_stream.plugins.remote import files as files_of_urls
from hf_zero_stream.plugins.remote.files import RemoteFiles
from hf_zero_stream.plugins.remote.urls import RequestFailed
from hf_zero_stream.sources.base import Retries


__all__ = ["OF_REMOTE", "Disagreement", "seeds", "seeds_of_store"]

CONTENT = save({"a": torch.arange(300.0), "b": torch.arange(7).to(torch.int16)})
NAME = "organisation/name"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
TAG = '"v1"'


class Disagreement(AssertionError):
    """Values or versions are not what the server gave, or an error says too little."""


# ------------------------------------------------------------------------------------------------------- answers


def _number(take: Iterator[int], right: int, size: int) -> int:
    wrong = (right, right, right + 1, right - 1, 0, -1, size, size + 1, 2**31, 2**63, 2**64, 2**70)
    return wrong[next(take, 0) % len(wrong)]


def _answer(take: Iterator[int], start: int, stop: int, size: int) -> bytes:
    """An answer to a request for ``[start, stop)``; with all choices 0 the right one."""

    def choose(*options: Any) -> Any:
        return options[next(take, 0) % len(options)]

    body = CONTENT[start:stop]
    shape = choose("right", "right", "shorter", "longer", "none", "twice", "chunked", "wrongly chunked", "gzip", "raw")
    if shape == "raw":
        return bytes(take)
    status = choose(
        *("206 Partial Content", "206 Partial Content", "200 OK", "204 No Content", "304 Not Modified", "416 Range"),
        *("301 Moved", "302 Found", "307 Temporary Redirect", "308 Permanent Redirect", "401 Who", "403 No"),
        *("404 Not Found", "408 Late", "412 Precondition Failed", "429 Busy", "500 Error", "503 Busy", "100 Continue"),
        *("206", "999 Other", "20 Short", "abc", "-206 Less"),
    )
    begin, end, whole = (_number(take, right, size) for right in (start, stop - 1, size))
    form = choose("bytes {}-{}/{}", "bytes {}-{}/{}", "bytes {}-{}/*", "bytes */{2}", "bytes={}-{}/{}", "{}-{}/{}", "")
    headers = [("Connection", choose("close", "close", "keep-alive", "upgrade"))]
    if form:
        headers.append((choose("Content-Range", "content-range"), form.format(begin, end, whole)))
    tag = choose(TAG, TAG, '"v2"', 'W/"v1"', "v1", '""', "", None, '"\u00e9"', '"' + "v" * 300 + '"')
    if tag is not None:
        headers.append(("ETag", tag))
    if shape == "gzip":
        encoding = choose("gzip", "br", "identity", "x")
        headers.append(("Content-Encoding", encoding))
        if encoding != "identity":  # of bytes that are said to be as they are, nothing tells that they are not
            body = gzip.compress(body)
    elif shape == "shorter":
        body = body[: len(body) // 2]
    elif shape == "longer":
        body += b"0123456"
    elif shape == "none":
        body = b""
    elif shape == "twice":
        body *= 2
    if "chunked" in shape:
        headers.append(("Transfer-Encoding", choose("chunked", "chunked", "gzip, chunked", "identity", "chunked, x")))
        form, end_of_chunks = "{:x}", b"\r\n0\r\n\r\n"
        if shape != "chunked":
            form = choose("{:x}", "{:X};x=y", "0x{:x}", "-{:x}", "{:x}0", "ffffffffffffffff")
            end_of_chunks = choose(end_of_chunks, b"", b"\r\n", b"\r\n0\r\nETag: x\r\n\r\n", end_of_chunks * 2)
        body = f"{form.format(len(body))}\r\n".encode() + body + end_of_chunks
    if "chunked" not in shape or choose(False, True):
        length = _number(take, len(body) if choose(True, False) else stop - start, size)
        headers.append(("Content-Length", str(length)))
    for _ in range(choose(0, 0, 1, 2, 3)):
        name = choose("Location", "Last-Modified", "ETag", "Content-Length", "Content-Range", "Content-Type", "X-\x00")
        value = choose(
            *("/x.safetensors", "file:///etc/passwd", "ftp://127.0.0.1/x", "http://127.0.0.1:1/x", "//", "HTTP:x"),
            *(
                "Thu, 01 Jan 1970 00:00:00 GMT",
                "Wed, 21 Oct 2015 07:28:00 GMT",
                TAG,
                '"v2"',
                "7",
                "multipart/byteranges",
            ),
            *("bytes 0-6/7", "\xff", "a\tb", "x" * 9000),
        )
        headers.append((name, value))
    lines = [f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in headers)]
    return "\r\n".join(lines).encode("latin-1", "replace") + b"\r\n\r\n" + body


def _answer_of_hub(take: Iterator[int], address: str, size: int) -> bytes:
    """An answer of the Hub to the question where a file is."""

    def choose(*options: Any) -> Any:
        return options[next(take, 0) % len(options)]

    status = choose("302 Found", "200 OK", "307 Moved", "404 No", "401 Who", "403 No", "429 Busy", "500 Error", "abc")
    location = choose(
        *(f"{address}/store/x", f"{address}/store/x", "/store/x", "file:///etc/passwd", "HTTP://127.0.0.1:1/x", ""),
        *(
            "http://",
            "http://user:secret@127.0.0.1:1/x",
            "https://",
            "http://[::1",
            "//127.0.0.1:1/x",
            "\xff",
            "data:,x",
        ),
        *(f"{address}/store/x?a=b", f"{address}/{NAME}/resolve/main/x.safetensors", "http://127.0.0.1:99999/x"),
        *(address.upper() + "/x", "http:x", "ftp://127.0.0.1/x", "http:///x"),
    )
    headers = {
        "Location": location,
        "X-Repo-Commit": choose(COMMIT, COMMIT, "", "..", "a/b", "\xff", "main", " " + COMMIT, "x" * 300),
        "X-Linked-Etag": choose(TAG, TAG, '"v2"', "", "W/", '"'),
        "X-Linked-Size": str(_number(take, size, size)),
        "X-Error-Code": choose("", "EntryNotFound", "RepoNotFound", "GatedRepo", "RevisionNotFound", "x"),
        "Content-Length": choose("0", "0", str(size), "-1", "x"),
        "Connection": "close",
    }
    present = [(name, value) for name, value in headers.items() if choose(True, True, True, False)]
    lines = [f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in present)]
    return "\r\n".join(lines).encode("latin-1", "replace") + b"\r\n\r\n"


class _Server:
    """Answers one request of each connection; `answer` gives the bytes."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.address = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.answer: Callable[[str, str, int, int], bytes] = lambda method, path, start, stop: b""
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            with connection, suppress(OSError):
                connection.settimeout(5)
                request = b""
                while b"\r\n\r\n" not in request and (more := connection.recv(65536)):
                    request += more
                if asked := re.match(rb"(\w+) (\S+) ", request):
                    span = re.search(rb"(?i)\r\nrange: bytes=(\d+)-(\d+)", request)
                    start, stop = (int(span[1]), int(span[2]) + 1) if span else (0, len(CONTENT))
                    answer = self.answer(asked[1].decode(), asked[2].decode(), start, min(stop, len(CONTENT)))
                    connection.sendall(answer)
                    connection.shutdown(socket.SHUT_WR)


@functools.cache
def _server() -> _Server:
    return _Server()


_STORES: dict[str, Any] = {}
"""Clients are costly to make."""


# -------------------------------------------------------------------------------------------------------- reading


def read_from_server(choices: bytes) -> str:
    """Read an object from a server that answers one request as `choices` say; "same" or "refused".

    Raises:
        Disagreement: what was read is not what the object holds, or is of two versions; or the error names no object.
    """
    take = iter(choices)
    way, hostile, first_bytes = (next(take, 0) for _ in range(3))
    through_hub, is_small = way % 3 == 2, way % 3 == 1
    server, tags, lock = _server(), list[str](), threading.Lock()
    asked = 0

    def answer(method: str, path: str, start: int, stop: int) -> bytes:
        nonlocal asked
        with lock:
            number, asked = asked, asked + 1
            choice = take if number == hostile % 4 else iter(b"")
            if method == "HEAD":
                return _answer_of_hub(choice, server.address, len(CONTENT))
            found = _answer(choice, start, stop, len(CONTENT))
            given = re.findall(rb"\r\nETag: ([^\r]*)\r\n", found.partition(b"\r\n\r\n")[0] + b"\r\n")
            if found.startswith(b"HTTP/1.1 206"):  # else no byte of it counts
                tags.append(given[0].decode("latin-1") if given else "")  # the first of several counts
            return found

    server.answer = answer
    url = f"hf://{NAME}/x.safetensors" if through_hub else f"{server.address}/x.safetensors"
    template = f"{server.address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    files = RemoteFiles(Retries(0))
    files._stores = _STORES
    with (
        mock.patch("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template),
        mock.patch.object(files_of_urls, "FIRST_BYTES", 100_000 if first_bytes % 2 else 64),
        mock.patch.object(files_of_urls, "STALL_S", 2),
        mock.patch.object(time, "sleep", lambda seconds: None),
    ):
        try:
            if is_small:
                found = files.read_whole(url, 10_000)
            else:
                found = _read_as_a_load(files, files.hub.pinned(url))
        except HfZeroStreamError as error:
            if "x.safetensors" not in str(error):
                raise Disagreement(f"the error names no object: {error}") from error
            return "refused"
        except (RequestFailed, FileNotFoundError) as error:
            if "secret" in str(error):
                raise Disagreement(f"the error quotes a password: {error}") from error
            return "refused"
    if len(_STORES) > 100:
        _STORES.clear()
    _compare(found, is_whole=is_small)
    if not through_hub and len(set(tags)) > 1:
        raise Disagreement(f"bytes of several versions: {tags}")
    return "same"


def _compare(found: bytes, is_whole: bool) -> None:
    """A server may say that a small file is shorter or longer than it is: nothing tells that it lies."""
    if found != CONTENT and not (is_whole and (CONTENT.startswith(found) or found.startswith(CONTENT))):
        raise Disagreement("other bytes than the object's")


def _read_as_a_load(files: RemoteFiles, url: str) -> bytes:
    """The object, from its header and the values of its tensors."""
    header = read_header(files, url)
    index = map_from_headers([url], [header])
    files.add(index.shards)
    found = len(header.text).to_bytes(8, "little") + header.text
    for entry in sorted(index.entries.values(), key=lambda entry: entry.start):
        values = bytearray(entry.stop - entry.start)
        files.read_into(entry.shard, entry.start, [memoryview(values)])
        found += values
    return found


# ------------------------------------------------------------------------------------------------- without HTTP


class _Answer:
    """What obstore gives for an answer: `meta`, `range`, and a body in pieces, which may end with an error."""

    def __init__(self, take: Iterator[int], start: int, stop: int) -> None:
        def choose(*options: Any) -> Any:
            return options[next(take, 0) % len(options)]

        size = len(CONTENT)
        error, text = choose(None, None, None, *_ERRORS), choose(*_TEXTS)
        if error is not None:
            raise error(text)
        begin, end = _number(take, start, size), _number(take, stop, size)
        moments = (datetime(2015, 10, 21, tzinfo=UTC), datetime(1970, 1, 1, tzinfo=UTC), datetime(1, 1, 2, tzinfo=UTC))
        self.meta = {
            "size": _number(take, size, size),
            "e_tag": choose(TAG, TAG, '"v2"', "", None, "v1", "\x00", "v" * 300),
            "version": choose(None, "1", "2", ""),
            "last_modified": choose(*moments, datetime(9999, 12, 31, tzinfo=UTC)),
        }
        self.range = (begin, end)
        self.attributes: dict[str, str] = {}
        body = CONTENT[max(0, begin) : max(0, end)]
        body = choose(body, body, body[:-1], body + b"x", b"", body * 2, body[: len(body) // 2])
        step = choose(len(body), 1, 7, 1000) or 1
        self._pieces = [body[at : at + step] for at in range(0, len(body), step)]
        self._pieces.insert(choose(0, 1, 2), b"")
        self._error = choose(None, None, *_ERRORS), choose(*_TEXTS)

    def stream(self, min_chunk_size: int) -> Iterator[bytes]:
        yield from self._pieces
        error, text = self._error
        if error is not None:
            raise error(text)


_NAMES = (
    "Generic NotFound PermissionDenied Unauthenticated NotSupported Precondition NotModified InvalidPath Join Base"
)
_ERRORS = [*(getattr(obstore.exceptions, f"{name}Error") for name in _NAMES.split()), FileNotFoundError]
_TEXTS = (
    "Generic HTTP error",
    "error sending request for url (http://h/x?X-Amz-Signature=secret)",
    "Server returned non-2xx status code: 503 Busy: ",
    "Server returned non-2xx status code: 404",
    "Server returned non-2xx status code: 999: \x1b[2J",
    "error decoding response body?secret",
    "http://169.254.169.254/latest?secret=1 timed out",
    "\n\nDebug source:\nsecret",
    "x" * 100_000,
    "",
)


def read_from_store(choices: bytes) -> str:
    """As :func:`read_from_server`, of what obstore says of the answers: one of them, or all, are as `choices` say."""
    take = iter(choices)
    way, hostile, first_bytes = (next(take, 0) for _ in range(3))
    asked, given = 0, list[Any]()

    def get(store: Any, key: str, options: dict[str, tuple[int, int]]) -> _Answer:
        nonlocal asked
        number, asked = asked, asked + 1
        start, stop = options["range"]
        is_hostile = hostile % 5 in (4, number)
        answer = _Answer(take if is_hostile else iter(b""), start, min(stop, len(CONTENT)))
        given.append((answer.meta["size"], answer.meta["e_tag"] or answer.meta["version"]))
        return answer

    url, files = "https://host/x.safetensors", RemoteFiles(Retries(0 if way & 2 else 3))
    files._stores = {"https://host": None}
    with (
        mock.patch.object(obstore, "get", get),
        mock.patch.object(files_of_urls, "FIRST_BYTES", 100_000 if first_bytes % 2 else 64),
        mock.patch.object(time, "sleep", lambda seconds: None),
    ):
        try:
            found = files.read_whole(url, 10_000) if way % 2 else _read_as_a_load(files, url)
        except (HfZeroStreamError, RequestFailed) as error:
            if "secret" in str(error) or len(str(error)) > 2000:
                raise Disagreement(f"the error quotes too much: {str(error)[:2000]}") from error
            if isinstance(error, HfZeroStreamError) and "x.safetensors" not in str(error):
                raise Disagreement(f"the error names no object: {error}") from error
            return "refused"
    _compare(found, is_whole=way % 2 == 1)
    if len(set(given)) > 1 and not way % 2:
        raise Disagreement(f"bytes of several versions: {given}")
    return "same"


OF_REMOTE: dict[str, Callable[[bytes], str]] = {"server": read_from_server, "store": read_from_store}
"""As :data:`.targets.TARGETS`."""


def seeds_of_store() -> dict[str, bytes]:
    """A name -> choices: of both ways to read, each answer right, and wrong in each field."""
    found = {"right": bytes(1), "small": bytes([1])}
    for way, hostile in ((0, 0), (0, 1), (0, 4), (1, 0), (2, 2)):
        for field in range(13):
            choices = bytearray(13)
            choices[field] = 4
            found[f"{way}-{hostile}-{field}"] = bytes([way, hostile, hostile % 2]) + bytes(choices)
    return found


def seeds() -> dict[str, bytes]:
    """A name -> choices: of each way to read, each request answered rightly, and wrongly in each field."""
    found = {}
    for way, name in enumerate(("load", "small", "hub")):
        found[name] = bytes([way])
        for hostile in range(3 if name != "small" else 1):
            for field in range(9):
                for value in (2, 3, 5):
                    choices = bytearray(9)
                    choices[field] = value
                    found[f"{name}-{hostile}-{field}-{value}"] = bytes([way, hostile, hostile % 2]) + bytes(choices)
    # A range that is compressed, and cut to the length of the range.
    found["load-compressed"] = bytes([0, 2, 1, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0])
    # What the Hub redirects to.
    for name, location in (
        ("scheme-in-capitals", 4),
        ("no-host", 6),
        ("user-name", 7),
        ("half-a-bracket", 9),
        ("port", 15),
    ):
        found[f"hub-{name}"] = bytes([2, 0, 0, 0, location])
    return found
