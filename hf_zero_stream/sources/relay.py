"""Reading for ranks that cannot, or should not, read for themselves.

One rank (the *reader*) has the shards; the others ask it for byte ranges and get them over a gloo group, a chunk at a
time. Each rank asks for just the bytes of its own plan, so what crosses the network is what stays there, and neither
side ever holds more than a chunk. DeepSpeed PR #8103 (``stage3_partition_stream_chunk_size``) bounds memory in the
same way, but broadcasts every chunk to all ranks.

The reader answers in threads of its own, from before anything is planned: planning may need values, and ranks that
plan do not wait for each other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
import torch.distributed as dist

from ..checkpoint.index import Shard
from ..errors import ReadError
from .local import ShardFiles


__all__ = ["RelayServer", "RelayedFiles"]

_DONE = -1
"""Stands for the shard in a request that ends a client's session."""


class RelayedFiles(ShardFiles):
    """The shards of a checkpoint as another rank reads them.

    Args:
        shards: the checkpoint's shards, as its index has them.
        reader: the rank that reads.
        group: a gloo group with all ranks.
        chunk_bytes: largest piece that is asked for at once.
    """

    def __init__(self, shards: Sequence[Shard], reader: int, group: dist.ProcessGroup, chunk_bytes: int) -> None:
        super().__init__(shards)
        self._reader = reader
        self._group = group
        self._chunk_bytes = chunk_bytes
        self._conversation = threading.Lock()
        self._refusal: ReadError | None = None
        self._has_finished = False

    def read_into(self, shard: int, start: int, buffers: Sequence[memoryview]) -> None:
        """See :meth:`ShardFiles.read_into`; raises ReadError too if the reader could not read."""
        position = start
        with self._conversation:  # requests and answers of two threads must not mix
            if self._refusal is not None:
                raise self._refusal  # the reader would try for seconds again, once for each thread that waits here
            self.reads += 1
            for buffer in buffers:
                for begin in range(0, len(buffer), self._chunk_bytes):
                    part = buffer[begin : begin + self._chunk_bytes]
                    self._ask(shard, position, part)
                    position += len(part)
                    self.bytes_read += len(part)

    def _ask(self, shard: int, start: int, part: memoryview) -> None:
        dist.send(torch.tensor([shard, start, len(part)]), self._reader, self._group)
        status = torch.empty(1, dtype=torch.int64)
        dist.recv(status, self._reader, self._group)
        if status.item():
            self._refusal = ReadError(
                f"{self._shards[shard].path}: rank {self._reader}, which reads for this rank, cannot read bytes "
                f"{start} to {start + len(part)}; its own error says why."
            )
            raise self._refusal
        dist.recv(torch.frombuffer(part, dtype=torch.uint8), self._reader, self._group)

    def finish(self) -> None:
        """Tell the reader that nothing more will be asked for; must be called also after an error. Once is enough."""
        with self._conversation, suppress(RuntimeError):  # a reader that is not there any more need not know
            if self._has_finished:
                return
            self._has_finished = True
            dist.send(torch.tensor([_DONE, 0, 0]), self._reader, self._group)


class RelayServer:
    """Answers the requests of the ranks `clients` until each of them has finished.

    Each has a thread that listens to it alone: listening to all at once, gloo does not notice when one of them dies.
    They are answered one at a time.

    Args:
        files: gives the shards as this rank reads them.
        clients: the ranks that ask.
        group: a gloo group with all ranks.
        chunk_bytes: largest piece that is sent at once.
    """

    def __init__(
        self, files: Callable[[], ShardFiles], clients: Sequence[int], group: dist.ProcessGroup, chunk_bytes: int
    ) -> None:
        self._files = files
        self._group = group
        self._chunk = torch.empty(chunk_bytes, dtype=torch.uint8)
        self._answering = threading.Lock()
        self._failures: list[Exception] = []
        self._listeners = [
            threading.Thread(target=self._listen, args=(client,), name=f"hf_zero_stream-{client}", daemon=True)
            for client in clients
        ]
        for listener in self._listeners:
            listener.start()

    def wait(self) -> None:
        """Return once all clients have finished.

        Raises:
            ReadError: the first read that failed.
            RuntimeError: the connection to a client was lost.
        """
        for listener in self._listeners:
            listener.join()
        if self._failures:
            raise self._failures[0]

    def has_ended(self, seconds: float) -> bool:
        """Whether all clients have finished, at the latest after so many seconds."""
        deadline = time.monotonic() + seconds
        for listener in self._listeners:
            listener.join(max(0.0, deadline - time.monotonic()))
        return not any(listener.is_alive() for listener in self._listeners)

    def _listen(self, client: int) -> None:
        request = torch.empty(3, dtype=torch.int64)
        try:
            while True:
                dist.recv(request, client, self._group)
                shard, start, length = request.tolist()
                if shard == _DONE:
                    return
                with self._answering:
                    self._answer(client, shard, start, self._chunk[:length])
        except Exception as error:
            self._failures.append(error)

    def _answer(self, client: int, shard: int, start: int, part: torch.Tensor) -> None:
        """Send `client` a status, and `part` of a shard if it could be read."""
        try:
            self._files().read_into(shard, start, [memoryview(part.numpy())])
        except Exception as error:
            self._failures.append(error)
            dist.send(torch.tensor([1]), client, self._group)
            return
        dist.send(torch.tensor([0]), client, self._group)
        dist.send(part, client, self._group)
