"""Compares placed values with the files: a second pass that shares no plan with the first.

Every element that this rank placed is looked up in the files again (:class:`Lookup`), cast as the load casts it,
and compared bit for bit. What was placed also gets a digest (:mod:`...checkpoint.digests`); a model's is the
sum of its parameters', each times an odd number from its name.

Elements are looked up one by one, as a second opinion on planned reads: each element's place is followed through the
nodes by index arithmetic, so that a fault in a load's boxes, reads or copies would be seen. Most elements stay
together in runs, which are kept as ranges.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import TypeAlias

import torch

from ...errors import LoadError
from ...plugin_api import (
    BLOCK,
    WORD,
    ByteSource,
    Cat,
    Computed,
    Copy,
    FileTensor,
    HostTensor,
    Item,
    Node,
    OpenCheckpoint,
    Pointwise,
    Target,
    TensorEntry,
    Verification,
    View,
    bits_of,
    digest_of_values,
    materialise_reason,
    row_major_strides,
    run_in_threads,
)


CHUNK = 4 * BLOCK
"""Elements that are compared at once."""

SAMPLES, SAMPLE = 4, 4096
"""Number of chunks of each parameter that `"sample"` compares on each rank, and elements of a chunk."""

_ADVICE = "The values are wrong; load again, and if it happens again, report it with the model's config."


class Verifier:
    """Compares the values that one rank placed with its files, as far as `StreamingConfig.verify` says."""

    def __init__(self, checkpoint: OpenCheckpoint) -> None:
        self.parts: dict[str, int] = {}
        """The digest of this rank's part of each parameter, so far."""
        self._checkpoint = checkpoint
        self._how = checkpoint.config.verify
        self._rank = checkpoint.coordinator.rank
        self._lookup = Lookup(checkpoint.source, checkpoint.materialise)
        self._lock = threading.Lock()
        self._left_out: set[str] = set()
        self._elements = self._bytes_read = self._digest = 0
        self._seconds = 0.0

    @property
    def result(self) -> Verification:
        return Verification(
            how=self._how,
            parameters=len(self.parts),
            left_out=len(self._left_out),
            elements=self._elements,
            bytes_read=self._bytes_read,
            seconds=self._seconds,
            digest=f"{self._digest:016x}" if self._how == "full" else "",
        )

    def verify(self, items: Sequence[Item], memory: Sequence[torch.Tensor]) -> None:
        """Compare the `memory` of `items` with the files."""
        began, read_before = time.perf_counter(), self._checkpoint.source.bytes_read

        def comparisons() -> Iterator[Callable[[], None]]:
            for (target, view, _), placed in zip(items, memory, strict=True):
                if self._how == "sample" and materialise_reason(view.node):
                    self._left_out.add(target.name)  # would read its sources whole
                    continue
                self.parts.setdefault(target.name, 0)
                for start, stop in self._ranges(target):
                    part = placed[start - target.start : stop - target.start]
                    yield partial(self._compare, target, view, part, start, stop)

        def work(shared: Iterator[Callable[[], None]]) -> None:
            for compare in shared:
                self._checkpoint.coordinator.check()
                compare()

        run_in_threads(comparisons(), work, self._checkpoint.threads())
        self._bytes_read += self._checkpoint.source.bytes_read - read_before
        self._seconds += time.perf_counter() - began

    def verify_whole(self, tensors: Mapping[str, torch.Tensor], parts: Sequence[Mapping[str, int]]) -> None:
        """Compare whole flat tensors, which other ranks read and sent in part, with every rank's :attr:`parts`."""
        began = time.perf_counter()
        for name, tensor in tensors.items():
            expected = sum(part.get(name, 0) for part in parts) % WORD
            found = digest_of_values(tensor, 0)
            if found != expected:
                raise LoadError(
                    f"verify: {name} on rank {self._rank}, elements 0 to {tensor.numel()}: the digest of what ranks "
                    f"read from the files is {expected:016x}, of what arrived {found:016x}. {_ADVICE}"
                )
        self._seconds += time.perf_counter() - began

    def _ranges(self, target: Target) -> Iterator[tuple[int, int]]:
        if self._how == "full" or target.stop - target.start <= SAMPLES * SAMPLE:
            begin = target.start
            while begin < target.stop:
                end = min(target.stop, (begin // CHUNK + 1) * CHUNK)
                yield begin, end
                begin = end
            return
        room = target.stop - target.start - SAMPLE
        seed = _hash_of_name(target.name)
        for offset in sorted({0, room, seed % room, seed // room % room}):
            yield target.start + offset, target.start + offset + SAMPLE

    def _compare(self, target: Target, view: View, placed: torch.Tensor, start: int, stop: int) -> None:
        """Compare the values `placed` for the elements ``[start, stop)`` of a target's `view` with the files."""
        expected = self._lookup.values(view, range(start, stop)).to(placed.device).to(target.dtype)
        bits, right = bits_of(placed), bits_of(expected)
        if not torch.equal(bits, right):
            wrong = (bits != right).nonzero().view(-1) * len(placed) // len(bits)
            first, last = start + int(wrong[0]), start + int(wrong[-1]) + 1
            raise LoadError(
                f"verify: {target.name} on rank {self._rank}: {len(wrong)} of the elements {first} to {last} are not "
                f"what the files hold: element {first} is {placed[first - start].item()!r}, expected "
                f"{expected[first - start].item()!r}. {_ADVICE}"
            )
        digest = _digest_of(target, placed, start, stop) if self._how == "full" else 0
        with self._lock:
            self._elements += stop - start
            self.parts[target.name] = (self.parts[target.name] + digest) % WORD
            # A buffer, which every rank has whole, counts once.
            counts = self._rank == 0 or target.box or target.stop - target.start < view.numel
            if counts and not target.is_copy:
                self._digest = (self._digest + (_hash_of_name(target.name) | 1) * digest) % WORD


def _digest_of(target: Target, values: torch.Tensor, start: int, stop: int) -> int:
    """The digest of the elements ``[start, stop)`` of a target's view, by their indices in the whole parameter."""
    if target.box is None:
        return digest_of_values(values, start)
    runs = list(target.box.runs(start, stop))
    parts = values.split([count for _, count in runs])
    return sum(digest_of_values(part, first) for part, (first, _) in zip(parts, runs, strict=True)) % WORD


def _hash_of_name(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


Positions: TypeAlias = range | torch.Tensor
"""Positions in a flat buffer: consecutive, or int64 in any order."""

SEEK_BYTES = 512
"""A hole of at most this many bytes between two elements of a file is read through."""


class Lookup:
    """Looks up elements in the shards of a checkpoint; safe to use from several threads.

    `compute` gives the values of a view of a function's result (:class:`...engine.compute.Evaluator`): functions are
    evaluated as in a load, from inputs that are read again.
    """

    def __init__(self, source: ByteSource, compute: Callable[[View], torch.Tensor]) -> None:
        self._source = source
        self._compute = compute
        self._computing = threading.Lock()

    def values(self, view: View, at: Positions) -> torch.Tensor:
        """The elements `at` of `view`, which count in row-major order; 1-d, of its dtype, in host memory."""
        return self._of_node(view.node, _positions(view, at))

    def _of_node(self, node: Node, at: Positions) -> torch.Tensor:
        if not len(at):
            return torch.empty(0, dtype=node.dtype)
        match node:
            case FileTensor(entry=entry):
                return self._read(entry, at)
            case HostTensor(tensor=tensor):
                return tensor[at.start : at.stop] if isinstance(at, range) else tensor[at]
            case Copy(source=source):
                return self.values(source, at).to(node.dtype)
            case Cat():
                return self._of_cat(node, at)
            case Pointwise():
                return node.result(lambda arg: self.values(arg, at) if arg.sizes else self.values(arg, range(1))[0])
            case Computed():
                return self._of_function(node, at)
            case _:
                raise TypeError(f"a {type(node).__name__} has no values in files")

    def _of_cat(self, node: Cat, at: Positions) -> torch.Tensor:
        inner, total = prod(node.sizes[node.dim + 1 :]), node.sizes[node.dim]
        if isinstance(at, range) and prod(node.sizes[: node.dim]) == 1:  # the pieces lie one behind the other
            parts = []
            for piece, first in zip(node.pieces, node.starts, strict=False):
                begin = max(at.start, first * inner)
                end = min(at.stop, first * inner + piece.numel)
                if begin < end:
                    parts.append(self.values(piece, range(begin - first * inner, end - first * inner)))
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        at = _as_tensor(at)
        outer, along, inside = at // (total * inner), at // inner % total, at % inner
        number = torch.searchsorted(torch.tensor(node.starts), along, right=True) - 1
        values = torch.empty(len(at), dtype=node.dtype)
        for which in number.unique().tolist():
            chosen = number == which
            size, row = node.pieces[which].sizes[node.dim], along[chosen] - node.starts[which]
            values[chosen] = self.values(node.pieces[which], (outer[chosen] * size + row) * inner + inside[chosen])
        return values

    def _of_function(self, node: Node, at: Positions) -> torch.Tensor:
        begin, end = (at.start, at.stop) if isinstance(at, range) else (int(at.min()), int(at.max()) + 1)
        with self._computing:
            values = self._compute(View(node, (end - begin,), (1,), begin))
        return values if isinstance(at, range) else values[at - begin]

    def _read(self, entry: TensorEntry, at: Positions) -> torch.Tensor:
        if isinstance(at, range):
            return self._read_run(entry, at.start, at.stop)
        ordered, order = at.sort()
        jumps = ((ordered.diff() - 1) * entry.dtype.itemsize > SEEK_BYTES).nonzero().view(-1) + 1
        values = torch.empty(len(at), dtype=entry.dtype)
        for run, places in zip(ordered.tensor_split(jumps), order.tensor_split(jumps), strict=True):
            first = int(run[0])
            values[places] = self._read_run(entry, first, int(run[-1]) + 1)[run - first]
        return values

    def _read_run(self, entry: TensorEntry, start: int, stop: int) -> torch.Tensor:
        itemsize = entry.dtype.itemsize
        data = torch.empty((stop - start) * itemsize, dtype=torch.uint8)
        self._source.read_into(entry.shard, entry.start + start * itemsize, [memoryview(data.numpy())])
        return data.view(entry.dtype)


def _positions(view: View, at: Positions) -> Positions:
    """The positions in the node's buffer of the elements `at` of `view`, which count in row-major order."""
    held = [(size, stride) for size, stride in zip(view.sizes, view.strides, strict=True) if size != 1]
    sizes = tuple(size for size, _ in held)
    if tuple(stride for _, stride in held) == row_major_strides(sizes):
        if isinstance(at, range):
            return range(at.start + view.offset, at.stop + view.offset)
        return at + view.offset
    index = _as_tensor(at)
    places = torch.full_like(index, view.offset)
    for size, stride in reversed(held):
        places += index % size * stride
        index = index // size
    return places


def _as_tensor(at: Positions) -> torch.Tensor:
    return torch.arange(at.start, at.stop) if isinstance(at, range) else at
