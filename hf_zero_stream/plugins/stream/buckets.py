"""A bucket, and how it is filled: ranks exchange what its plan says, and owners compute what no ranges give."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import PeerError
from ...plugin_api import (
    Coordinator,
    ExchangeRound,
    HugePages,
    Parameters,
    Segment,
    Stored,
    Values,
    begin_exchange,
    collective_device,
    evaluated,
    opened,
)
from .merging import AdaptedLayers
from .plan import BucketPlan, Evaluation


POPULATED_BYTES = 4 * 2**20
"""How much of a bucket gets its memory at once."""


@dataclass(frozen=True)
class Bucket:
    """Some tensors in one piece of memory, which nobody else uses; of another rank's it is empty.

    Attributes:
        packed: the bytes of all tensors, one after the other. A tensor begins at a multiple of its elements' size: if
            all have one dtype, there is nothing between them.
        tensors: (name, tensor) of each, views of `packed`.
    """

    packed: torch.Tensor
    tensors: Sequence[tuple[str, torch.Tensor]]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


class Filling:
    """Rounds of one bucket (all ranks), and the first error that this rank has met in them."""

    def __init__(self, coordinator: Coordinator, adapted: AdaptedLayers | None) -> None:
        self._coordinator, self._adapted = coordinator, adapted
        self.error: BaseException | None = None

    def exchange(self, rounds: Sequence[ExchangeRound], memory: torch.Tensor, values: Values) -> None:
        """Fill `memory`, which is new, from the `values` that ranks hold."""
        pages = HugePages([memory])

        def populate() -> None:
            for at in range(0, len(memory), POPULATED_BYTES):
                pages.populate(memory, at, min(POPULATED_BYTES, len(memory) - at))

        # Ahead of the exchange; what it reaches first, the kernel populates then.
        threading.Thread(target=populate, name="hf_zero_stream-pages", daemon=True).start()

        def place(segment: Segment) -> torch.Tensor:
            return memory[segment.position : segment.position + segment.nbytes].view(segment.dtype)

        end: Callable[[], Any] | None = None
        for of_round in (*rounds, None):
            begun = end
            # The next one is on its way while what has arrived is put into its place.
            end = None if of_round is None else begin_exchange(of_round, values, self._coordinator, place)
            try:
                if begun is not None:
                    begun()
            except PeerError:
                raise  # no exchange will come to an end any more
            except BaseException as caught:  # the others still wait, in the next rounds, for what this rank holds
                self.error = self.error or caught

    def evaluate(self, evaluation: Evaluation, packed: torch.Tensor, values: Values) -> None:
        """Compute the entries of `evaluation` in `packed`, where this rank owns them."""
        owns = self._coordinator.rank in evaluation.entries[0].owners
        memory = torch.empty(evaluation.nbytes if owns else 0, dtype=torch.uint8, device=packed.device)
        self.exchange(evaluation.rounds, memory, values)
        try:
            if owns and self.error is None:
                self._compute(evaluation, memory, packed)
        except BaseException as caught:
            self.error = self.error or caught

    def _compute(self, evaluation: Evaluation, memory: torch.Tensor, packed: torch.Tensor) -> None:
        def held(name: str) -> torch.Tensor:
            at, stored = evaluation.starts[name]
            return memory[at : at + stored.numel * stored.dtype.itemsize].view(stored.dtype).view(stored.sizes)

        merged: dict[str, torch.Tensor] = {}
        for number in evaluation.layers:
            assert self._adapted is not None
            merged.update(self._adapted.merged(number, held))

        def whole(stored: Stored) -> torch.Tensor:
            found = merged.get(stored.name)
            return (held(stored.name) if found is None else found).cpu().contiguous().view(-1)

        for entry in evaluation.entries:
            view = entry.tensor.view
            computed = evaluated(view, whole, {}).view(-1)
            packed[entry.at : entry.at + entry.tensor.nbytes].view(view.node.dtype).copy_(computed)


@torch.no_grad()
def filled(
    plan: BucketPlan, parameters: Parameters, adapted: AdaptedLayers | None, coordinator: Coordinator
) -> Bucket:
    """This rank's bucket, in new memory (all ranks)."""
    packed = torch.empty(plan.nbytes.get(coordinator.rank, 0), dtype=torch.uint8, device=collective_device())
    filling = Filling(coordinator, adapted)
    with opened(parameters.holdings) as values:
        filling.exchange(plan.rounds, packed, values)
        for evaluation in plan.evaluations:
            filling.evaluate(evaluation, packed, values)
    coordinator.agree(filling.error)
    tensors = [
        (tensor.name, packed[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        for tensor, owners, at in plan.entries
        if coordinator.rank in owners
    ]
    return Bucket(packed, tensors)
