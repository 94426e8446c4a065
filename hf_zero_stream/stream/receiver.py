"""A worker's end of a weight stream without a gather: whole tensors out of what each rank of the training sends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from .wire import BucketLayout, Group, Patch, decoded, unpacked_patches


class Receiver:
    """Worker number `worker` of an engine, in the group of which its server was told by `info`."""

    def __init__(self, info: Mapping[str, Any], worker: int, device: torch.device) -> None:
        self._worker = worker
        self._group = Group(info, info["rank_offset"] + worker, device)
        self._plan = ""
        self._layouts: Sequence[BucketLayout] = ()

    def tensors(self, plan: str) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """All tensors, bucket after bucket, by the `plan` that the group's store has under this key.

        A bucket is new memory, because loaders keep views of it until a layer is complete.
        """
        for number, layout in enumerate(self._known(plan)):
            bucket = torch.empty(layout.nbytes, dtype=torch.uint8, device=self._group.device)
            worker = number % self._group.workers  # receives it for all
            if worker == self._worker:
                for message in layout.messages:
                    received = message.new(self._group.device)
                    self._group.receive(received, message.giver)
                    message.unpack(received, bucket)
            self._group.share(bucket, worker)
            yield layout.tensors_in(bucket)

    def changes(self, plan: str) -> Iterator[list[Patch]]:
        """What has changed, bucket after bucket of a plan."""
        for number in range(len(self._known(plan))):
            worker = number % self._group.workers
            sizes = self._received(torch.empty(2, dtype=torch.int64, device=self._group.device), worker).tolist()
            header, data = (
                self._received(torch.empty(size, dtype=torch.uint8, device=self._group.device), worker)
                for size in sizes
            )
            yield unpacked_patches(header.cpu().numpy().tobytes(), data)

    def _known(self, plan: str) -> Sequence[BucketLayout]:
        if plan != self._plan:
            self._plan, self._layouts = plan, decoded(self._group.store.get(plan))
        return self._layouts

    def _received(self, memory: torch.Tensor, worker: int) -> torch.Tensor:
        if memory.numel():
            if worker == self._worker:
                self._group.receive(memory, 0)
            self._group.share(memory, worker)
        return memory
