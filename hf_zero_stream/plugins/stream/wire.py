"""The protocol between ranks of a training and workers of an engine, where each rank sends its own bytes.

The workers' end runs in the engine's environment, where torch is, and perhaps nothing else that this package needs.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from datetime import timedelta
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ...plugin_api import dtype_name, dtype_named


BACKEND = "hf_zero_stream"
"""The name of vLLM's backend for weight transfer."""

JOIN_TIMEOUT = timedelta(minutes=5)
UPDATE_TIMEOUT = timedelta(minutes=30)
ALIGNMENT = 16  # bytes; where a piece begins in a message, so that it can be viewed in any dtype


class SentElements(NamedTuple):
    """Elements of a message, and where they go: into the `nbytes` of a bucket from byte `position` on.

    Of the elements of `sizes`, ``[i, j]`` is number ``to + i * strides[0] + j * strides[1]`` of these, in `dtype`.
    """

    position: int
    nbytes: int
    dtype: str
    to: int
    sizes: Sequence[int]
    strides: Sequence[int]

    def view(self, message: torch.Tensor, at: int) -> torch.Tensor:
        """The elements in a `message`, where the piece begins at byte `at`."""
        return message[at : at + self.message_bytes].view(dtype_named(self.dtype)).view(list(self.sizes))

    @property
    def message_bytes(self) -> int:
        return prod(self.sizes) * dtype_named(self.dtype).itemsize


class Message(NamedTuple):
    """The bytes that the rank `sender` sends to a worker at once: pieces, each from a multiple of 16 bytes on."""

    sender: int
    pieces: Sequence[SentElements]

    def new(self, device: torch.device) -> torch.Tensor:
        """Memory for it."""
        return torch.empty(self.nbytes, dtype=torch.uint8, device=device)

    @property
    def nbytes(self) -> int:
        return self.starts()[-1]

    def starts(self) -> list[int]:
        """The byte at which each piece begins, and the end."""
        starts, at = [], 0
        for piece in self.pieces:
            at += -at % ALIGNMENT
            starts.append(at)
            at += piece.message_bytes
        return [*starts, at]

    def unpack(self, message: torch.Tensor, bucket: torch.Tensor) -> None:
        """Put the elements of a `message` into a `bucket`."""
        for piece, at in zip(self.pieces, self.starts(), strict=False):
            memory = bucket[piece.position : piece.position + piece.nbytes].view(dtype_named(piece.dtype))
            memory[piece.to :].as_strided(list(piece.sizes), list(piece.strides)).copy_(piece.view(message, at))


class BucketSlot(NamedTuple):
    """The elements of a tensor in a bucket, from byte `at` on: those in `ranges`, in row-major order.

    Attributes:
        shape: of the whole tensor.
        ranges: first and last index, plus one, along each dimension.
    """

    name: str
    dtype: str
    shape: Sequence[int]
    at: int
    ranges: Sequence[Sequence[int]]

    def whole(self, bucket: torch.Tensor) -> torch.Tensor:
        """A tensor of the whole shape, with what the bucket has of it; all else in it is arbitrary."""
        dtype, sizes = dtype_named(self.dtype), [stop - start for start, stop in self.ranges]
        held = bucket[self.at : self.at + prod(sizes) * dtype.itemsize].view(dtype).view(sizes)
        if sizes == list(self.shape):
            return held
        tensor = torch.empty(list(self.shape), dtype=dtype, device=bucket.device)
        tensor[tuple(slice(*each) for each in self.ranges)] = held
        return tensor


class BucketLayout(NamedTuple):
    """A bucket of `nbytes`: its tensors, and the messages that fill it, in their order.

    Attributes:
        worker: who gets the messages.
        is_shared: that worker gives the bucket to all others; else it is for itself.
    """

    nbytes: int
    slots: Sequence[BucketSlot]
    messages: Sequence[Message]
    worker: int
    is_shared: bool

    @classmethod
    def of(cls, nbytes: int, slots: Any, messages: Any, worker: int, is_shared: bool) -> BucketLayout:
        """From what :func:`decoded` gives."""
        given = [Message(sender, [SentElements(*piece) for piece in pieces]) for sender, pieces in messages]
        return cls(nbytes, [BucketSlot(*slot) for slot in slots], given, worker, is_shared)


def encoded(value: Any) -> bytes:
    return zlib.compress(json.dumps(value, separators=(",", ":")).encode())


def decoded(data: bytes) -> Any:
    return json.loads(zlib.decompress(data))


class Patch(NamedTuple):
    """The elements of a tensor that have changed.

    Attributes:
        shape: of the whole tensor.
        indices: where they are in it, flat, in row-major and ascending order; int32, or int64 of a larger tensor.
        values: what they are now, in the tensor's dtype.
    """

    name: str
    shape: tuple[int, ...]
    indices: torch.Tensor
    values: torch.Tensor


def packed_patches(patches: Sequence[Patch]) -> tuple[bytes, torch.Tensor]:
    """Encode the description of patches, and the bytes of their indices and values, one patch after the other."""
    header = [
        (name, shape, dtype_name(indices.dtype), dtype_name(values.dtype), len(values))
        for name, shape, indices, values in patches
    ]
    pieces = [each.contiguous().view(torch.uint8) for patch in patches for each in (patch.indices, patch.values)]
    return json.dumps(header).encode(), torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8)


def unpacked_patches(header: bytes, data: torch.Tensor) -> list[Patch]:
    patches, at = [], 0
    for name, shape, *dtypes, count in json.loads(header):
        parts = []
        for dtype in map(dtype_named, dtypes):
            end = at + count * dtype.itemsize
            parts.append(data[at:end].clone().view(dtype))  # they begin anywhere among the bytes
            at = end
        patches.append(Patch(name, tuple(shape), *parts))
    return patches


class WeightGroup:
    """Ranks of a training, from 0 on, and after them workers of an engine, in a group of their own.

    Attributes:
        number: of a worker, from 0 on.
        store: where rank 0 leaves plans for the workers, and they leave word for the ranks.
        device: where what is sent must lie.
    """

    def __init__(self, info: Mapping[str, Any], rank: int, device: torch.device) -> None:
        size, self.first_worker = info["world_size"], info["rank_offset"]
        self.workers = size - self.first_worker
        self.number = rank - self.first_worker
        self.device = torch.device("cpu") if info["backend"] == "gloo" else device
        self.store: Any = dist.TCPStore(
            info["master_address"], info["master_port"], size, rank == 0, timeout=JOIN_TIMEOUT, wait_for_workers=False
        )
        self._group = _group("all", self.store, rank, size, info["backend"])
        self._of_workers = None
        if rank >= self.first_worker and self.workers > 1:
            self._of_workers = _group("workers", self.store, self.number, self.workers, info["backend"])

    def send(self, tensor: torch.Tensor, worker: int) -> None:
        self._group.send([tensor], self.first_worker + worker, 0).wait()

    def begin_receive(self, tensor: torch.Tensor, sender: int) -> Any:
        """The work, to be waited for."""
        return self._group.recv([tensor], sender, 0)

    def receive(self, tensor: torch.Tensor, sender: int) -> None:
        self.begin_receive(tensor, sender).wait()

    def broadcast_from_worker(self, tensor: torch.Tensor, worker: int) -> None:
        """Give all workers the `tensor` of the worker of this number."""
        if self._of_workers is not None:
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor = worker, 0
            self._of_workers.broadcast([tensor], options).wait()

    def destroy(self) -> None:
        for group in (self._group, self._of_workers):
            if group is not None:
                group.abort()


def _group(name: str, store: Any, rank: int, size: int, backend: str) -> Any:
    store = dist.PrefixStore(name, store)
    if backend == "gloo":
        return dist.ProcessGroupGloo(store, rank, size, UPDATE_TIMEOUT)
    return dist.ProcessGroupNCCL(store, rank, size, dist.ProcessGroupNCCL.Options())
