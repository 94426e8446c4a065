"""A weight stream without a gather: each rank sends what it holds to vLLM, where our plugin puts tensors together."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

import torch

from ..errors import StreamError
from ..ranks import accelerators
from ..ranks.coordinator import Coordinator, collective_device
from ..saving.parameters import Parameters, opened
from ..saving.plan import Part
from ..saving.write import take
from .buckets import Filling
from .merging import AdaptedLayers
from .plan import BucketPlan
from .servers import VLLM
from .weights import WeightStream
from .wire import BACKEND, BucketLayout, Group, Message, Patch, Piece, encoded, name_of, packed_patches


MESSAGE_BYTES = 2 * 2**20
"""What a rank sends at once; two such messages are in its memory."""


class Shares(NamedTuple):
    """A bucket as ranks send it.

    Attributes:
        parts: what the pieces of each message are taken from; None is what rank 0 has computed.
    """

    layout: BucketLayout
    parts: Sequence[Sequence[Part | None]]


def shares_of(bucket: BucketPlan) -> Shares:
    """Who sends what of a bucket, which a plan gives to rank 0."""
    filling: dict[int, list[tuple[Piece, Part | None]]] = defaultdict(list)
    sizes: Counter[int] = Counter()
    found: list[tuple[int, list[tuple[Piece, Part | None]]]] = []

    def add(giver: int, piece: Piece, part: Part | None) -> None:
        if sizes[giver] and sizes[giver] + piece.message_bytes > MESSAGE_BYTES:
            found.append((giver, filling.pop(giver)))
            sizes[giver] = 0
        filling[giver].append((piece, part))
        sizes[giver] += piece.message_bytes

    for of_round in bucket.rounds:
        for _, segment in of_round:
            for part in segment.parts:
                box = part.box
                where = segment.position, segment.nbytes, name_of(segment.dtype)
                add(part.rank, Piece(*where, box.to, box.sizes, box.to_strides), part)
    for evaluation in bucket.evaluations:
        for entry in evaluation.entries:
            for start in range(0, entry.tensor.nbytes, MESSAGE_BYTES):
                nbytes = min(MESSAGE_BYTES, entry.tensor.nbytes - start)
                add(0, Piece(entry.at + start, nbytes, "uint8", 0, (nbytes,), (1,)), None)
    found += filling.items()
    entries = [(each.at, each.tensor) for each in bucket.entries]
    tensors = [(tensor.name, name_of(tensor.dtype), tensor.shape, at) for at, tensor in entries]
    messages = [Message(giver, [piece for piece, _ in pieces]) for giver, pieces in found]
    parts = [[part for _, part in pieces] for _, pieces in found]
    return Shares(BucketLayout(bucket.nbytes.get(0, 0), tensors, messages), parts)


@torch.no_grad()
def messages_of(
    shares: Shares,
    bucket: BucketPlan,
    parameters: Parameters,
    adapted: AdaptedLayers | None,
    coordinator: Coordinator,
) -> Iterator[torch.Tensor]:
    """This rank's messages, each made when it is asked for (all ranks)."""
    computed = torch.empty(0, dtype=torch.uint8)
    if bucket.evaluations:
        filling = Filling(coordinator, adapted)
        computed = torch.empty(bucket.nbytes.get(coordinator.rank, 0), dtype=torch.uint8, device=collective_device())
        with opened(parameters.holdings) as values:
            for evaluation in bucket.evaluations:
                filling.evaluate(evaluation, computed, values)
        coordinator.agree(filling.error)
    return _messages(shares, parameters, computed, coordinator.rank)


def _messages(shares: Shares, parameters: Parameters, computed: torch.Tensor, rank: int) -> Iterator[torch.Tensor]:
    with opened(parameters.holdings) as values:
        for message, parts in zip(shares.layout.messages, shares.parts, strict=True):
            if message.giver == rank:
                memory = message.new(collective_device())
                for piece, at, part in zip(message.pieces, message.starts(), parts, strict=False):
                    whole = computed[piece.position : piece.position + piece.nbytes]
                    piece.view(memory, at).copy_(whole if part is None else take(part, values))
                yield memory


class DirectVLLM(VLLM):
    """vLLM's server with the plugin of :mod:`.vllm_engine`: all ranks are in a group with its workers.

    With `deltas`, an update after the first one has only what has changed since, found by the stream's `deltas`.
    """

    packs = False

    def __init__(self, *args: Any, deltas: bool) -> None:
        super().__init__(*args)
        self._deltas = deltas
        self._changes = False
        self._shares: list[Shares] = []
        self._of_plan: Any = None
        self._plans = 0
        self._number = 0
        """Of the bucket that comes next in this pass."""

    def meet(self, coordinator: Coordinator, address: str | None, port: int | None) -> None:
        self._calls.asks = coordinator.is_main
        accepted: Future[Any] | None = None

        def announced() -> dict[str, Any]:
            nonlocal accepted
            config = self._calls.get("server_info?config_format=json")["vllm_config"].get("weight_transfer_config")
            if config is None or config.get("backend") != BACKEND:
                raise StreamError(
                    f"{self._calls.url}: expected a vLLM server with the plugin of hf_zero_stream; its backend for "
                    f"weight transfer is {config and config.get('backend')!r}. Install hf_zero_stream beside vLLM "
                    "(pip install --no-deps hf_zero_stream), and start the server with VLLM_SERVER_DEV_MODE=1 and "
                    f"""--weight-transfer-config '{{"backend": "{BACKEND}"}}'."""
                )
            info = {
                **self._own_place(address, port),
                "rank_offset": coordinator.world_size,
                "world_size": self._calls.get("get_world_size")["world_size"] + coordinator.world_size,
                "backend": "nccl" if accelerators.is_accelerator(self._device) else "gloo",
            }
            accepted = self._calls.posting("init_weight_transfer_engine", {"init_info": info})
            return info

        info = coordinator.broadcast(announced)
        with coordinator.reporting():
            joining = self._calls.background(lambda: Group(info, coordinator.rank, self._device))
            self._group = self._calls.wait(joining, accepted)
            if accepted is not None:
                self._calls.wait(accepted)

    def passing(self, stream: WeightStream, coordinator: Coordinator) -> Generator[Any]:
        self._number = 0
        self._changes = self._deltas and stream.can_compare(coordinator)
        return (
            stream.deltas(coordinator) if self._changes else stream.passing(coordinator, partial(self._given, stream))
        )

    def _given(
        self,
        stream: WeightStream,
        bucket: BucketPlan,
        parameters: Parameters,
        adapted: AdaptedLayers | None,
        coordinator: Coordinator,
    ) -> Iterator[torch.Tensor]:
        if stream.buckets is not self._of_plan:
            self._of_plan, self._shares = stream.buckets, [shares_of(each) for each in stream.buckets]
            self._plans += 1
            if coordinator.is_main:
                self._group.store.set(self._plan, encoded([each.layout for each in self._shares]))
        return messages_of(self._shares[self._number], bucket, parameters, adapted, coordinator)

    @property
    def _plan(self) -> str:
        """Under which the workers find the plan in the group's store."""
        return f"plan {self._plans}"

    def _update_info(self, stream: WeightStream) -> dict[str, Any]:
        return {"plan": self._plan, "changes": self._changes}

    def give(self, item: Any, coordinator: Coordinator) -> None:
        with coordinator.reporting():
            worker = self._number % self._group.workers
            self._number += 1
            for message in self._packed(item, coordinator.is_main) if self._changes else item:
                self._send_in_background(partial(self._group.send, message, worker))
            self._wait_for_bytes()

    def _packed(self, patches: Sequence[Patch], is_main: bool) -> Iterable[torch.Tensor]:
        """Patches as three messages: the sizes of the others, what they are, and their indices and values."""
        if not is_main:
            return
        device = self._group.device
        described, data = packed_patches(patches)
        header, data = torch.frombuffer(bytearray(described), dtype=torch.uint8).to(device), data.to(device)
        yield torch.tensor([len(header), len(data)], dtype=torch.int64, device=device)
        yield header
        if len(data):
            yield data
