"""Which bytes of which bucket come from which rank: a save plan whose files are buckets in memory."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import torch

from ...plugin_api import (
    Computed,
    ExchangeRound,
    HostTensor,
    LazyTensor,
    Segment,
    Sources,
    Stored,
    View,
    exchange_rounds,
    is_computed,
    segments_of,
    sources_of,
    stored_names,
)


LEAST_ROUND_BYTES = 2**20


class NamedView(NamedTuple):
    """A tensor that is streamed: what `view` gives, read as `dtype` and `shape`."""

    name: str
    view: View
    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, tensor: Any, described: Any) -> NamedView:
        """A lazy tensor, or a buffer, that `described` gives dtype and shape."""
        view = tensor.view_of_node if isinstance(tensor, LazyTensor) else View.whole(HostTensor.of(tensor))
        return cls(name, view, described.dtype, tuple(described.shape))

    @property
    def nbytes(self) -> int:
        return self.view.numel * self.view.node.dtype.itemsize


class StreamedTensor(NamedTuple):
    """A tensor of a stream, and the ranks that get it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    owners: tuple[int, ...]


class BucketEntry(NamedTuple):
    """A tensor in the buckets of its owners, from byte `at` on."""

    tensor: NamedView
    owners: tuple[int, ...]
    at: int


@dataclass(frozen=True)
class Evaluation:
    """Entries that their owners compute from whole parameters, because no ranges give them.

    Attributes:
        starts: where each of the parameters begins in the owners' memory, and what it is.
        layers: the adapters that are merged into these parameters first, by number.
    """

    entries: tuple[BucketEntry, ...]
    starts: Mapping[str, tuple[int, Stored]]
    nbytes: int
    rounds: tuple[ExchangeRound, ...]
    layers: tuple[int, ...]


@dataclass(frozen=True)
class BucketPlan:
    """The exchange of all ranks for one bucket of each owner.

    It is planned at the bucket's first use, when all ranks come to it together: of a large model there
    are thousands of buckets, and nobody need wait for the plans of all of them before the first one is sent.

    Attributes:
        nbytes: by owner.
    """

    entries: tuple[BucketEntry, ...]
    nbytes: Mapping[int, int]
    planner: Planner

    @property
    def rounds(self) -> tuple[ExchangeRound, ...]:
        return self._exchanges[0]

    @property
    def evaluations(self) -> tuple[Evaluation, ...]:
        return self._exchanges[1]

    @cached_property
    def _exchanges(self) -> tuple[tuple[ExchangeRound, ...], tuple[Evaluation, ...]]:
        return self.planner.exchanges(self.entries)


@dataclass(frozen=True)
class MergePlan:
    """The layers that adapters change.

    Attributes:
        layer_of: the number of the layer of adapters that a parameter belongs to, by the parameter's name.
        stored: the parameters of each layer, its adapters' too.
    """

    layer_of: Mapping[str, int]
    stored: Sequence[Sequence[Stored]]


@dataclass(frozen=True)
class Planner:
    """Plans the buckets of some tensors.

    Attributes:
        replicas: sources that every rank holds in full, of which each takes its own copy.
        spread: each tensor goes to one of the `ranks`; else all tensors to each of them.
        overfull: a bucket ends after the tensor that passes `bucket_bytes`, as chunks of vLLM's do; else before it.
    """

    sources: Sources
    replicas: Set[str]
    merging: MergePlan
    ranks: Sequence[int]
    spread: bool
    bucket_bytes: int
    overfull: bool

    def buckets(self, tensors: Sequence[NamedView]) -> Iterator[BucketPlan]:
        owners = self._assigned_owners(tensors) if self.spread else [tuple(self.ranks)] * len(tensors)
        found: list[list[BucketEntry]] = []
        reached = {rank: (0, 0) for rank in self.ranks}  # the bucket, and bytes in it
        for tensor, mine in zip(tensors, owners, strict=True):
            number, position = reached[mine[0]]
            at = position + -position % tensor.dtype.itemsize
            if position and (position if self.overfull else at + tensor.nbytes) > self.bucket_bytes:
                number, at = number + 1, 0
            reached.update({rank: (number, at + tensor.nbytes) for rank in mine})
            if number == len(found):
                found.append([])
            found[number].append(BucketEntry(tensor, mine, at))
        return map(self._planned, found)

    def bucket(self, tensors: Sequence[NamedView]) -> BucketPlan:
        """These tensors in one bucket of rank 0."""
        entries, at = [], 0
        for tensor in tensors:
            at += -at % tensor.dtype.itemsize
            entries.append(BucketEntry(tensor, (0,), at))
            at += tensor.nbytes
        return self._planned(entries)

    def _assigned_owners(self, tensors: Sequence[NamedView]) -> list[tuple[int, ...]]:
        """An owner of each: who holds most of it, of those that have not got their share of all bytes yet."""
        share = sum(tensor.nbytes for tensor in tensors) / len(self.ranks)
        dealt: Counter[int] = Counter()
        owners: list[tuple[int, ...]] = []
        for tensor in tensors:
            held: Counter[int] = Counter()
            for region in self.sources.regions(tensor.view, 0, tensor.view.numel):
                if not isinstance(region.leaf, Computed):
                    for part in self.sources.parts(region):
                        held[part.rank] += part.box.numel if part.source not in self.replicas else 0
            free = [rank for rank in self.ranks if dealt[rank] + tensor.nbytes / 2 <= share] or self.ranks
            owner = min(free, key=lambda rank: (-held[rank], dealt[rank], rank))
            dealt[owner] += tensor.nbytes
            owners.append((owner,))
        return owners

    def _planned(self, entries: Sequence[BucketEntry]) -> BucketPlan:
        nbytes: dict[int, int] = {}
        for entry in entries:
            for rank in entry.owners:
                nbytes[rank] = max(nbytes.get(rank, 0), entry.at + entry.tensor.nbytes)
        return BucketPlan(tuple(entries), nbytes, self)

    def is_computed(self, tensor: NamedView) -> bool:
        """Whether its owners compute a tensor from whole parameters, because no ranges give it."""
        view = tensor.view
        if stored_names([view]) & self.merging.layer_of.keys():
            return True
        return is_computed(view) and any(  # seldom, and regions take time
            isinstance(region.leaf, Computed) for region in self.sources.regions(view, 0, view.numel)
        )

    def exchanges(self, entries: Sequence[BucketEntry]) -> tuple[tuple[ExchangeRound, ...], tuple[Evaluation, ...]]:
        """Plan the exchange of these entries: its rounds, and what owners compute."""
        direct: list[tuple[Segment, tuple[int, ...]]] = []
        evaluated: dict[tuple[tuple[str, ...], tuple[int, ...]], list[BucketEntry]] = defaultdict(list)
        for entry in entries:
            view = entry.tensor.view
            if self.is_computed(entry.tensor):
                evaluated[tuple(sorted(stored_names([view]))), entry.owners].append(entry)
            elif view.numel:
                direct += self._segments(view, entry.at, entry.owners)
        return self._rounds(direct), tuple(map(self._evaluation, evaluated.values()))

    def _evaluation(self, entries: Sequence[BucketEntry]) -> Evaluation:
        views = [entry.tensor.view for entry in entries]
        stored = {node.name: node for node, _ in sources_of(views) if isinstance(node, Stored)}
        layers = sorted({self.merging.layer_of[name] for name in stored if name in self.merging.layer_of})
        stored.update({each.name: each for layer in layers for each in self.merging.stored[layer]})
        starts: dict[str, tuple[int, Stored]] = {}
        segments: list[tuple[Segment, tuple[int, ...]]] = []
        at = 0
        for name, each in stored.items():
            at += -at % 16
            starts[name] = at, each
            segments += self._segments(View.whole(each), at, entries[0].owners)
            at += each.numel * each.dtype.itemsize
        return Evaluation(tuple(entries), starts, at, self._rounds(segments), tuple(layers))

    @property
    def _round_bytes(self) -> int:
        """The most bytes that a rank sends or receives at once; two rounds are on their way."""
        return max(LEAST_ROUND_BYTES, self.bucket_bytes // 16)

    def _segments(self, view: View, at: int, owners: tuple[int, ...]) -> list[tuple[Segment, tuple[int, ...]]]:
        limit = max(1, self._round_bytes // len(owners) // view.node.dtype.itemsize)
        return [(segment, owners) for segment in segments_of(view, self.sources, 0, at, limit)]

    def _rounds(self, segments: Sequence[tuple[Segment, tuple[int, ...]]]) -> tuple[ExchangeRound, ...]:
        """Pack segments into rounds, also what owners hold themselves: it is copied during exchanges."""
        of_owners: dict[int, list[Segment]] = defaultdict(list)
        for segment, owners in sorted(segments, key=lambda each: (each[0].position, each[1])):
            for owner in owners:
                parts = (part._replace(rank=owner) if part.source in self.replicas else part for part in segment.parts)
                of_owners[owner].append(segment._replace(parts=tuple(parts)))
        return exchange_rounds(of_owners, self._round_bytes)


_LAYER = re.compile(r"(.*?\.\d+)\.")


def layer_of(name: str) -> str:
    """The layer that the tensor `name` belongs to; of one in no numbered layer, its module."""
    found = _LAYER.match(name)
    return found[1] if found else name.rpartition(".")[0]


def by_layers(tensors: Sequence[NamedView]) -> list[NamedView]:
    """Layer after layer: an engine holds a layer back until it is complete.

    In a layer, the widest elements go first: then all are aligned, with nothing between them.
    """
    layers: dict[str, list[NamedView]] = defaultdict(list)
    for tensor in tensors:
        layers[layer_of(tensor.name)].append(tensor)
    return list(chain.from_iterable(sorted(each, key=lambda one: -one.dtype.itemsize) for each in layers.values()))


def with_whole_layers(tensors: Sequence[NamedView], is_wanted: Callable[[str], bool]) -> list[NamedView]:
    """Select the tensors of layers in which any comes from a parameter that `is_wanted`.

    Engines put tensors of a layer together (q, k and v; experts); what is missing of such a one would be arbitrary.
    """
    wanted = {layer_of(tensor.name) for tensor in tensors if any(map(is_wanted, stored_names([tensor.view])))}
    return [tensor for tensor in tensors if layer_of(tensor.name) in wanted]
