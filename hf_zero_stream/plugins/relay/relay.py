"""Reading for ranks that cannot, or should not, read for themselves.

One rank (the *reader*) has the shards; the others ask it for the byte ranges of their plans and get them over a gloo
group. Neither side holds more than a chunk. The reader's threads start before the planning, which may need values.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress

import torch
import torch.distributed as dist

from ...errors import ReadError
from ...plugin_api import ByteSource, SourceFile


CHUNK_BYTES = 8 * 2**20
"""The largest piece that the reader sends at once."""

CLOSING_S = 10.0
"""Time that the reader waits, after an error, for its clients to say that they are done."""

_DONE = -1
"""A file's number in a request that says that the client is done."""

_REQUEST, _ANSWER = 1, 2
"""Tags of messages: two ranks may read for each other at the same time, each by a thread of its own."""


class RelayedFiles:
    """The client's end: files that rank `reader` reads; `source` is for headers and hints only.

    The `group` is destroyed at the end, unless others use it too (`shares_group`).
    """

    def __init__(
        self, source: ByteSource, reader: int, group: dist.ProcessGroup, *, shares_group: bool = False
    ) -> None:
        self.open_file, self.is_transient, self.hints = source.open_file, source.is_transient, source.hints
        self._paths: list[str] = []
        self._reader, self._shares_group = reader, shares_group
        self._group: dist.ProcessGroup | None = group
        self._request_lock = threading.Lock()
        self._refusal: ReadError | None = None
        self.bytes_read = self.reads = 0

    def add(self, files: Sequence[SourceFile]) -> None:
        self._paths += [file.path for file in files]

    def open(self, numbers: Iterable[int]) -> None:
        """Do nothing: the reader opens its files itself."""

    def check_unchanged(self) -> None:
        """Do nothing: the reader checks its files itself."""

    def read_into(self, number: int, start: int, buffers: Sequence[memoryview]) -> None:
        with self._request_lock:  # requests and answers of two threads must not mix
            self.reads += 1
            for buffer in buffers:
                for begin in range(0, len(buffer), CHUNK_BYTES):
                    part = buffer[begin : begin + CHUNK_BYTES]
                    self._ask(number, start, part)
                    start += len(part)
                    self.bytes_read += len(part)

    def _ask(self, number: int, start: int, part: memoryview) -> None:
        if self._group is None:
            raise ReadError(f"{self._paths[number]}: rank {self._reader} does not read for this rank any more.")
        if self._refusal is not None:
            raise self._refusal  # the reader would try again for seconds, once for each thread that waits here
        dist.send(torch.tensor([number, start, len(part)]), self._reader, self._group, _REQUEST)
        status = torch.empty(1, dtype=torch.int64)
        dist.recv(status, self._reader, self._group, _ANSWER)
        if status.item():
            self._refusal = ReadError(
                f"{self._paths[number]}: rank {self._reader}, which reads for this rank, cannot read bytes "
                f"{start} to {start + len(part)}; its own error says why."
            )
            raise self._refusal
        dist.recv(torch.frombuffer(part, dtype=torch.uint8), self._reader, self._group, _ANSWER)

    def finish(self) -> None:
        """Tell the reader, which waits for this, that the client is done. May be called again."""
        with self._request_lock:
            group, self._group = self._group, None
            if group is None:
                return
            with suppress(RuntimeError):  # the reader has gone, and need not know
                dist.send(torch.tensor([_DONE, 0, 0]), self._reader, group, _REQUEST)
        if not self._shares_group:
            dist.destroy_process_group(group)

    close = finish


class RelayServer:
    """The reader's end: answers clients with bytes of `source`.

    Each client has a thread of its own: a gloo receive from all at once misses the death of one. They are answered
    one at a time. For `shares_group` see :class:`RelayedFiles`.
    """

    def __init__(
        self, source: ByteSource, clients: Sequence[int], group: dist.ProcessGroup, *, shares_group: bool = False
    ) -> None:
        self._source, self._shares_group = source, shares_group
        self._group: dist.ProcessGroup | None = group
        self._chunk = torch.empty(CHUNK_BYTES, dtype=torch.uint8)
        self._answer_lock = threading.Lock()
        self._failures: list[Exception] = []
        self._listeners = [
            threading.Thread(target=self._listen, args=(client, group), name=f"hf_zero_stream-{client}", daemon=True)
            for client in clients
        ]
        for listener in self._listeners:
            listener.start()

    def finish(self) -> None:
        """Wait until all clients are done; raise the first failed read, or a RuntimeError if a connection was lost."""
        for listener in self._listeners:
            listener.join()
        if self._failures:
            raise self._failures[0]
        self.close()

    def close(self) -> None:
        """End the relay, with clients that may have failed. May be called again."""
        group, self._group = self._group, None
        if group is not None:
            deadline = time.monotonic() + CLOSING_S
            for listener in self._listeners:
                listener.join(max(0.0, deadline - time.monotonic()))
            hangs = any(listener.is_alive() for listener in self._listeners)  # a rank does: others will say so
            if not (hangs or self._shares_group):
                dist.destroy_process_group(group)

    def _listen(self, client: int, group: dist.ProcessGroup) -> None:
        request = torch.empty(3, dtype=torch.int64)
        try:
            while True:
                dist.recv(request, client, group, _REQUEST)
                number, start, length = request.tolist()
                if number == _DONE:
                    return
                with self._answer_lock:
                    self._answer(client, group, number, start, self._chunk[:length])
        except Exception as error:
            self._failures.append(error)

    def _answer(self, client: int, group: dist.ProcessGroup, number: int, start: int, part: torch.Tensor) -> None:
        """Send `client` a status, and `part` of a file if it could be read."""
        try:
            self._source.read_into(number, start, [memoryview(part.numpy())])
        except Exception as error:
            self._failures.append(error)
            dist.send(torch.tensor([1]), client, group, _ANSWER)
            return
        dist.send(torch.tensor([0]), client, group, _ANSWER)
        dist.send(part, client, group, _ANSWER)
