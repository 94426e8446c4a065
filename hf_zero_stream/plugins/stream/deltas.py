"""Finds the elements that have changed since the last pass of a stream. Each rank compares only what it holds.

After a step with a learning rate of 1e-6, about 99 % of the elements in bf16 are what they were.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain

import torch
import torch.distributed as dist

from ...plugin_api import (
    Coordinator,
    Holding,
    HostTensor,
    Segment,
    SegmentPart,
    Values,
    collective_device,
    is_accelerator,
    opened,
    pinned_parts,
    synchronise,
    take,
)
from .buckets import Filling
from .merging import AdaptedLayers
from .plan import BucketEntry, BucketPlan
from .wire import Patch


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Dtypes in which values are compared, by their bytes: a NaN is equal to itself, and 0.0 is not -0.0."""


class SentSnapshot:
    """A copy, in host memory, of the values that this rank has sent in a pass over the `buckets` of a plan."""

    def __init__(self, buckets: Sequence[BucketPlan], holdings: Mapping[str, Holding], rank: int) -> None:
        self.buckets = buckets
        rounds = [*chain.from_iterable(bucket.rounds for bucket in buckets)]
        rounds += chain.from_iterable(each.rounds for bucket in buckets for each in bucket.evaluations)
        parts = chain.from_iterable(segment.parts for of_round in rounds for _, segment in of_round)
        sent = {part.source for part in parts if part.rank == rank}
        buffers = [each for each in sent if isinstance(each, HostTensor)]
        self._buffers = {each: replace(each, tensor=each.tensor.clone()) for each in buffers}
        self._first = {each: holdings[each].first for each in sent if isinstance(each, str)}
        self._values = self._memory(holdings)
        self.update(holdings)

    def _memory(self, holdings: Mapping[str, Holding]) -> dict[str, torch.Tensor]:
        """Memory for what this rank has sent of each parameter: pinned, if an accelerator compares with it."""
        made, on_device = {}, {}
        with torch.no_grad(), opened(holdings) as values:
            for name, first in self._first.items():
                value = values(name, first)
                if is_accelerator(value.device):
                    on_device[name] = value.to("meta")
                else:
                    made[name] = torch.empty_like(value)
        for (name, like), part in zip(
            on_device.items(), pinned_parts([each.nbytes for each in on_device.values()]), strict=True
        ):
            made[name] = part.view(like.dtype).view(like.shape)
        return made

    def update(self, holdings: Mapping[str, Holding]) -> None:
        """Keep what has been sent in another pass by the same plan."""
        devices = set()
        with torch.no_grad(), opened(holdings) as values:
            for name, kept in self._values.items():
                value = values(name, self._first[name])
                kept.copy_(value, non_blocking=True)
                devices.add(value.device)
        synchronise(devices)
        for buffer, kept_buffer in self._buffers.items():
            kept_buffer.tensor.copy_(buffer.tensor)

    def values(self, source: str, start: int) -> torch.Tensor:
        """As :data:`Values`."""
        return self._values[source][start - self._first[source] :]

    def take(self, part: SegmentPart) -> torch.Tensor:
        """Return the values sent of `part`, in the shape of its box."""
        if isinstance(part.source, HostTensor):
            part = part._replace(source=self._buffers[part.source])
        return take(part, self.values)


Changes = dict[tuple[int, int], list[tuple[torch.Tensor, torch.Tensor]]]
"""Indices and values, by the owner and the number of the entry among the owner's."""


@torch.no_grad()
def patches(
    plan: BucketPlan,
    holdings: Mapping[str, Holding],
    sent: SentSnapshot,
    adapted: AdaptedLayers | None,
    coordinator: Coordinator,
) -> list[Patch]:
    """Return the patches of this rank's tensors in a bucket since the `sent` snapshot (all ranks)."""
    owned = {
        owner: [entry for entry in plan.entries if owner in entry.owners] for owner in range(coordinator.world_size)
    }
    own_entries = owned[coordinator.rank]
    computed = {entry.tensor.name for evaluation in plan.evaluations for entry in evaluation.entries}
    filling, changes = Filling(coordinator, adapted), Changes()
    with opened(holdings) as values:
        try:
            changes = _changes(plan, owned, values, sent, coordinator.rank)
        except BaseException as caught:
            filling.error = caught
        if plan.evaluations:
            nbytes = plan.nbytes.get(coordinator.rank, 0)
            of_pass, now = torch.empty(2, nbytes, dtype=torch.uint8, device=collective_device())
            for evaluation in plan.evaluations:
                filling.evaluate(evaluation, of_pass, sent.values)
                filling.evaluate(evaluation, now, values)
            for number, entry in enumerate(own_entries):
                if entry.tensor.name in computed and filling.error is None:
                    old, new = (_of(packed, entry) for packed in (of_pass, now))
                    if len(where := (old != new).nonzero().view(-1)):
                        changes[coordinator.rank, number] = [(where, new[where].view(entry.tensor.dtype))]
    coordinator.agree(filling.error)
    return _exchanged(owned, changes, coordinator)


def _of(packed: torch.Tensor, entry: BucketEntry) -> torch.Tensor:
    """The bits of an entry, one integer for each element."""
    return packed[entry.at : entry.at + entry.tensor.nbytes].view(_BITS[entry.tensor.dtype.itemsize])


def _changes(
    plan: BucketPlan, owned: Mapping[int, Sequence[BucketEntry]], values: Values, sent: SentSnapshot, rank: int
) -> Changes:
    """Find the changes in this rank's parts of the segments of a bucket."""
    starts = {owner: [entry.at for entry in entries] for owner, entries in owned.items()}
    changes: Changes = defaultdict(list)
    last: tuple[Segment, SegmentPart] | None = None
    for of_round in plan.rounds:
        for owner, segment in of_round:
            number = bisect_right(starts[owner], segment.position) - 1
            for part in segment.parts:
                if part.rank == rank:
                    if last != (segment, part):  # if all ranks are owners, the same comes once for each
                        last, found = (segment, part), _changed(part, values, sent)
                    if found is not None:
                        first = (segment.position - starts[owner][number]) // segment.dtype.itemsize
                        changes[owner, number].append((found[0] + first, found[1]))
    return changes


def _changed(part: SegmentPart, values: Values, sent: SentSnapshot) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Which elements of its segment `part` has changed, and their values."""
    new = take(part, values)
    bits = _BITS[new.dtype.itemsize]
    old = sent.take(part).to(new.device, non_blocking=True)
    where = (new.view(bits) != old.view(bits)).reshape(-1).nonzero().view(-1)
    if not len(where):
        return None
    changed = new.reshape(-1)[where]
    if part.box.is_run:
        return where + part.box.to, changed
    to = torch.full_like(where, part.box.to)
    for indices, stride in zip(torch.unravel_index(where, part.box.sizes), part.box.to_strides, strict=True):
        to += indices * stride
    return to, changed


def _exchanged(owned: Mapping[int, Sequence[BucketEntry]], changes: Changes, coordinator: Coordinator) -> list[Patch]:
    """Send each owner what has changed of its entries; returns this rank's (all ranks)."""
    device, own_entries = collective_device(), owned[coordinator.rank]
    counts = [
        [sum(len(values) for _, values in changes.get((owner, number), ())) for number in range(len(entries))]
        for owner, entries in owned.items()
    ]
    leaving = torch.tensor([count for of_owner in counts for count in of_owner], dtype=torch.int64, device=device)
    arriving = torch.empty(coordinator.world_size * len(own_entries), dtype=torch.int64, device=device)
    _all_to_all(
        coordinator, arriving, leaving, [len(own_entries)] * coordinator.world_size, list(map(len, owned.values()))
    )
    counts_here = arriving.view(coordinator.world_size, len(own_entries)).tolist()

    pieces = [torch.empty(0, dtype=torch.uint8, device=device)]
    for owner, entries in owned.items():
        for number, entry in enumerate(entries):
            found = changes.get((owner, number), ())
            pieces += [_bytes(indices.to(_index_dtype(entry)), device) for indices, _ in found]
            pieces += [_bytes(values, device) for _, values in found]
    sizes = [
        sum(count * _nbytes(entry) for count, entry in zip(of_owner, owned[owner], strict=True))
        for owner, of_owner in enumerate(counts)
    ]
    sizes_here = [
        sum(count * _nbytes(entry) for count, entry in zip(of, own_entries, strict=True)) for of in counts_here
    ]
    received = torch.empty(sum(sizes_here), dtype=torch.uint8, device=device)
    _all_to_all(coordinator, received, torch.cat(pieces), sizes_here, sizes)

    parts: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in own_entries]
    at = 0
    for of_rank in counts_here:
        for number, (count, entry) in enumerate(zip(of_rank, own_entries, strict=True)):
            if count:
                split = at + count * _index_dtype(entry).itemsize
                end = at + count * _nbytes(entry)
                # They begin anywhere among the bytes, and a view in another dtype wants them aligned.
                indices = received[at:split].clone().view(_index_dtype(entry))
                parts[number].append((indices, received[split:end].clone().view(entry.tensor.dtype)))
                at = end
    return list(_sorted(own_entries, parts))


def _sorted(
    entries: Sequence[BucketEntry], parts: Sequence[Sequence[tuple[torch.Tensor, torch.Tensor]]]
) -> Iterator[Patch]:
    for entry, found in zip(entries, parts, strict=True):
        if found:
            indices, values = (torch.cat(each) for each in zip(*found, strict=True))
            if (indices[1:] < indices[:-1]).any():
                order = indices.argsort()
                indices, values = indices[order], values[order]
            yield Patch(entry.tensor.name, entry.tensor.shape, indices, values)


def _all_to_all(
    coordinator: Coordinator, received: torch.Tensor, sent: torch.Tensor, arriving: list[int], leaving: list[int]
) -> None:
    if coordinator.is_alone:
        received.copy_(sent)
    else:
        coordinator.run(dist.all_to_all_single, received, sent, arriving, leaving)


def _index_dtype(entry: BucketEntry) -> torch.dtype:
    return torch.int32 if entry.tensor.view.numel < 2**31 else torch.int64


def _nbytes(entry: BucketEntry) -> int:
    """Return the bytes of one element and its index."""
    return _index_dtype(entry).itemsize + entry.tensor.dtype.itemsize


def _bytes(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    return values.to(device).contiguous().view(-1).view(torch.uint8)
