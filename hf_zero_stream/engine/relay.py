"""Reading for ranks that cannot, or should not, read for themselves.

One rank (the *reader*) has the shards; the others ask it for byte ranges and get them over a gloo group, a chunk at a
time. Each rank asks for just the bytes of its own plan, so what crosses the network is what stays there, and neither
side ever holds more than a chunk. DeepSpeed PR #8103 (``stage3_partition_stream_chunk_size``) bounds memory in the
same way, but broadcasts every chunk to all ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..checkpoint.index import Shard
from ..checkpoint.source import ShardFiles
from ..errors import ReadError


__all__ = ["RelayedFiles", "serve"]

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
        """Tell the reader that nothing more will be asked for; must be called also after an error."""
        with self._conversation:
            dist.send(torch.tensor([_DONE, 0, 0]), self._reader, self._group)


def serve(files: ShardFiles, clients: Sequence[int], group: dist.ProcessGroup, chunk_bytes: int) -> None:
    """Answer the requests of the ranks `clients` until each of them has finished.

    Each has a thread that listens to it alone: listening to all at once, gloo does not notice when one of them dies.
    They are answered one at a time.

    Raises:
        ReadError: the first read that failed, after all clients have finished.
        RuntimeError: the connection to a client was lost, after all others have finished.
    """
    chunk, answering = torch.empty(chunk_bytes, dtype=torch.uint8), threading.Lock()
    failures: list[Exception] = []

    def listen(client: int) -> None:
        request = torch.empty(3, dtype=torch.int64)
        try:
            while True:
                dist.recv(request, client, group)
                shard, start, length = request.tolist()
                if shard == _DONE:
                    return
                with answering:
                    _answer(files, client, group, shard, start, chunk[:length], failures)
        except Exception as error:
            failures.append(error)

    listeners = [
        threading.Thread(target=listen, args=(client,), name=f"hf_zero_stream-{client}") for client in clients
    ]
    for listener in listeners:
        listener.start()
    for listener in listeners:
        listener.join()
    if failures:
        raise failures[0]


def _answer(
    files: ShardFiles,
    client: int,
    group: dist.ProcessGroup,
    shard: int,
    start: int,
    part: torch.Tensor,
    failures: list[Exception],
) -> None:
    """Send `client` a status, and `part` of a shard if it could be read."""
    try:
        files.read_into(shard, start, [memoryview(part.numpy())])
    except Exception as error:
        failures.append(error)
        dist.send(torch.tensor([1]), client, group)
        return
    dist.send(torch.tensor([0]), client, group)
    dist.send(part, client, group)
