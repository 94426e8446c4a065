"""A worker's end of a weight stream without a gather: whole tensors out of what each rank of the training sends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from .reads import Reads
from .wire import ALIGNMENT, BucketLayout, Message, Patch, WeightGroup, decoded, encoded, unpacked_patches


class Receiver:
    """Worker number `worker` of an engine, in the group of which its server was told by `info`.

    At the first update the workers get all tensors, each bucket in turns, and share them. By what their loaders read
    of these, ranks know which slices each of them needs: of later updates it gets these alone, and nothing is shared.

    Args:
        keeps_slices: whether a worker's part of the model is the same at each update.
    """

    def __init__(
        self, info: Mapping[str, Any], worker: int, device: torch.device, *, keeps_slices: bool = True
    ) -> None:
        self._group = WeightGroup(info, info["rank_offset"] + worker, device)
        self._plan = ""
        self._layouts: dict[str, list[BucketLayout]] = {}
        self._looks = keeps_slices and self._group.workers > 1
        self._reads: Reads | None = None

    def tensors(self, plan: str, buckets: int, *, sliced: bool) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """All tensors, bucket after bucket, of a `plan` that the group's store has in pieces, a bucket each.

        What is `sliced` has the elements that the loaders have read at the first update, and others that are
        arbitrary. A bucket is new memory, because loaders keep views of it until a layer is complete.

        Raises:
            RuntimeError: later, in the loader that reads others.
        """
        self._reads = Reads() if self._looks else None
        if plan != self._plan:
            self._plan, self._layouts = plan, {}
        for number in range(buckets):
            key = f"{plan} {number} {self._group.number}" if sliced else f"{plan} {number}"
            if key not in self._layouts:
                self._layouts[key] = [BucketLayout.of(*each) for each in decoded(self._group.store.get(key))]
            for layout in self._layouts[key]:
                yield self._given(layout)

    def _given(self, layout: BucketLayout) -> list[tuple[str, torch.Tensor]]:
        bucket = torch.empty(layout.nbytes, dtype=torch.uint8, device=self._group.device)
        if layout.worker == self._group.number:
            self._fill(bucket, layout.messages)
        if layout.is_shared:
            self._group.broadcast_from_worker(bucket, layout.worker)
        found = [(slot.name, slot.whole(bucket)) for slot in layout.slots]
        if self._reads is None:
            return found
        there = [slot.ranges for slot in layout.slots]
        return self._reads.watched(found, there)

    def _fill(self, bucket: torch.Tensor, messages: Sequence[Message]) -> None:
        """Receive `messages` into it."""
        largest = max((message.nbytes for message in messages), default=0)
        halves = torch.empty(2, largest + -largest % ALIGNMENT, dtype=torch.uint8, device=self._group.device)
        places = [halves[number % 2, : message.nbytes] for number, message in enumerate(messages)]
        works = map(self._group.begin_receive, places, (message.sender for message in messages))
        work: Any = next(works, None)
        for message, place in zip(messages, places, strict=True):
            following = next(works, None)  # on its way while this one is put into its place
            work.wait()
            message.unpack(place, bucket)
            work = following

    def loading(self) -> AbstractContextManager[Any]:
        """Loaders run inside of it."""
        return self._reads or nullcontext()

    def finish(self) -> None:
        """All is loaded. Leave word of what has been read, for the ranks of the training."""
        reads = None if self._reads is None else self._reads.end()
        self._reads = None
        self._group.store.set(f"{self._plan} read by {self._group.number}", encoded(reads))

    def changes(self, buckets: int) -> Iterator[list[Patch]]:
        """Receive the patches, bucket after bucket."""
        for number in range(buckets):
            worker = number % self._group.workers
            sizes = self._received(torch.empty(2, dtype=torch.int64, device=self._group.device), worker).tolist()
            header, data = (
                self._received(torch.empty(size, dtype=torch.uint8, device=self._group.device), worker)
                for size in sizes
            )
            yield unpacked_patches(header.cpu().numpy().tobytes(), data)

    def _received(self, memory: torch.Tensor, worker: int) -> torch.Tensor:
        if memory.numel():
            if worker == self._group.number:
                self._group.receive(memory, 0)
            self._group.broadcast_from_worker(memory, worker)
        return memory
