"""A web server that gives ranges of the files in a folder, as slowly and as wrongly as a test asks for."""

import gzip
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote


PIECE_BYTES = 256 * 1024


@dataclass
class Behaviour:
    """What the server does; a test may change it while it runs.

    `fault` is called with the path and the number of the request, from 0 on, and names what goes wrong ("" if nothing
    does): a status ("503"), or one of the methods `fault_...` of the handler.
    """

    latency_s: float = 0.0
    bytes_per_second: float = 0.0
    fault: Callable[[str, int], str] = lambda path, number: ""
    tag: Callable[[str], str] = lambda path: "v1"
    """The ETag of a path; "" if the server is to send none. There is never a Last-Modified."""
    requests: list[tuple[str, int, int]] = field(default_factory=list)
    """(path, start, stop) of each range that was asked for."""
    most_at_once: int = 0
    """How many requests waited for `latency_s` at the same time."""
    address: str = ""
    hostile: Callable[..., None] | None = None
    """What sends the answer where `fault` says ``"hostile"``; called as a method ``fault_...`` of the handler."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    _free_at: float = 0.0
    _waiting: int = 0

    def delay(self) -> None:
        with self.lock:
            self._waiting += 1
            self.most_at_once = max(self.most_at_once, self._waiting)
        time.sleep(self.latency_s)
        with self.lock:
            self._waiting -= 1

    def note(self, path: str, start: int, stop: int) -> int:
        with self.lock:
            self.requests.append((path, start, stop))
            return len(self.requests) - 1

    def pace(self, nbytes: int) -> None:
        """Wait until the link, which all connections share, has taken so many bytes."""
        if self.bytes_per_second:
            with self.lock:
                self._free_at = max(self._free_at, time.monotonic() - 0.1) + nbytes / self.bytes_per_second
                wait = self._free_at - time.monotonic()
            if wait > 0:
                time.sleep(wait)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 65536
    disable_nagle_algorithm = True

    def __init__(self, folder: Path, prefix: str, how: Behaviour, *args: Any) -> None:
        self.folder, self.prefix, self.how = folder, prefix, how
        super().__init__(*args)

    def log_message(self, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET(with_body=False)

    def do_GET(self, with_body: bool = True) -> None:
        self.how.delay()
        # Run:ai's streamer asks for whole URLs, as a client of a proxy would; servers have to take both forms.
        path = re.sub(r"^http://[^/]*", "", unquote(self.path.partition("?")[0])).removeprefix(self.prefix)
        file = self.folder / path.lstrip("/")
        size = file.stat().st_size if file.is_file() else 0
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        start, stop = (int(asked[1]), min(int(asked[2]) + 1, size)) if asked else (0, size)
        fault = self.how.fault(path, self.how.note(path, start, stop))
        with suppress(OSError):  # the client left
            if fault.isdigit():
                self.answer(int(fault), {"Content-Length": "4"})
                self.wfile.write(b"busy")
            elif not file.is_file():
                self.answer(404, {"Content-Length": "0"})
            elif fault:
                getattr(self, f"fault_{fault}")(file, start, stop, size)
            else:
                self.range(file, start, stop, size, with_body=with_body)

    def answer(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.flush()

    def range(
        self, file: Path, start: int, stop: int, size: int, *, with_body: bool = True, **changed: str | int
    ) -> None:
        headers = {
            **({"ETag": f'"{tag}"'} if (tag := self.how.tag(self.path)) else {}),
            "Content-Range": f"bytes {start}-{stop - 1}/{size}",
            "Content-Length": str(stop - start),
        }
        headers |= {name.replace("_", "-"): str(value) for name, value in changed.items()}
        self.answer(206, headers)
        if with_body:
            self.send(file, start, stop)

    def send(self, file: Path, start: int, stop: int) -> None:
        with open(file, "rb") as opened:
            while start < stop:
                count = min(stop - start, PIECE_BYTES)
                self.how.pace(count)
                start += os.sendfile(self.connection.fileno(), opened.fileno(), start, count)

    def fault_no_ranges(self, file: Path, start: int, stop: int, size: int) -> None:
        self.answer(200, {"Content-Length": str(size)})
        self.send(file, 0, size)

    def fault_wrong_range(self, file: Path, start: int, stop: int, size: int) -> None:
        self.range(file, start + 1, min(stop + 1, size), size)

    def fault_less(self, file: Path, start: int, stop: int, size: int) -> None:
        self.range(file, start, stop - 1, size)

    def fault_short(self, file: Path, start: int, stop: int, size: int) -> None:
        self.range(file, start, stop, size, with_body=False)
        self.send(file, start, start + (stop - start) // 2)
        self.close_connection = True

    def fault_long(self, file: Path, start: int, stop: int, size: int) -> None:
        self.range(file, start, stop, size, with_body=False, Content_Length=stop - start + 7)
        self.send(file, start, stop)
        self.wfile.write(b"7 bytes")

    def fault_compressed(self, file: Path, start: int, stop: int, size: int) -> None:
        """The length is right: something before the server has cut or filled what it compressed."""
        self.range(file, start, stop, size, with_body=False, Content_Encoding="gzip")
        body = gzip.compress(file.read_bytes()[start:stop])[: stop - start]
        self.wfile.write(body.ljust(stop - start, b"\0"))

    def fault_aws_chunked(self, file: Path, start: int, stop: int, size: int) -> None:
        self.range(file, start, stop, size, Content_Encoding="aws-chunked")

    def fault_other_size(self, file: Path, start: int, stop: int, size: int) -> None:
        self.range(file, start, stop, size, Content_Range=f"bytes {start}-{stop - 1}/{size + 1}")

    def fault_no_numbers(self, file: Path, start: int, stop: int, size: int) -> None:
        self.range(file, start, stop, size, Content_Range="bytes all of them")

    def fault_reset(self, file: Path, start: int, stop: int, size: int) -> None:
        self.range(file, start, stop, size, with_body=False)
        self.send(file, start, start + (stop - start) // 2)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.shutdown(socket.SHUT_RD)
        self.close_connection = True

    def fault_stall(self, file: Path, start: int, stop: int, size: int) -> None:
        self.range(file, start, stop, size, with_body=False)
        time.sleep(60)

    def fault_to_file(self, file: Path, start: int, stop: int, size: int) -> None:
        self.answer(302, {"Location": f"file://{file}", "Content-Length": "0"})

    def fault_in_circles(self, file: Path, start: int, stop: int, size: int) -> None:
        self.answer(302, {"Location": self.path, "Content-Length": "0"})

    def fault_hostile(self, file: Path, start: int, stop: int, size: int) -> None:
        assert self.how.hostile is not None
        self.how.hostile(self, file, start, stop, size)

    def fault_garbage(self, file: Path, start: int, stop: int, size: int) -> None:
        self.wfile.write(b"\x00\xff no HTTP at all\r\n\r\n")
        self.close_connection = True


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256


@contextmanager
def http_files(folder: Path, how: Behaviour | None = None, prefix: str = "") -> Iterator[Behaviour]:
    """A server on the loopback; its `address` has no slash at the end. Paths begin with `prefix`, such as a bucket."""
    how = how or Behaviour()
    server = _Server(("127.0.0.1", 0), partial(Handler, folder, prefix, how))
    how.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield how
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
