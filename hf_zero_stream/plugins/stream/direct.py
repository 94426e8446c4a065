"""A weight stream without a gather: each rank sends what it holds to vLLM, where our plugin puts tensors together."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

import torch

from ...errors import StreamError
from ...plugin_api import (
    Coordinator,
    Parameters,
    SegmentPart,
    accelerators,
    collective_device,
    dtype_name,
    opened,
    take,
)
from .buckets import Filling
from .merging import AdaptedLayers
from .plan import BucketPlan, NamedView
from .reads import Ranges, whole
from .servers import VLLM
from .weights import WeightStream
from .wire import (
    BACKEND,
    BucketLayout,
    BucketSlot,
    Message,
    Patch,
    SentElements,
    WeightGroup,
    decoded,
    encoded,
    packed_patches,
)


MESSAGE_BYTES = 2 * 2**20
"""Bytes that a rank sends at once; two such messages are in its memory."""


class MessagePlan(NamedTuple):
    """A bucket as ranks send it.

    Attributes:
        parts: what the pieces of each message are taken from; None is what rank 0 has computed.
    """

    bucket: BucketPlan
    layout: BucketLayout
    parts: Sequence[Sequence[SegmentPart | None]]


def plan_messages(bucket: BucketPlan, worker: int) -> MessagePlan:
    """Assign the pieces of a rank-0 bucket to senders; `worker` receives it, and shares it with the others."""
    filling: dict[int, list[tuple[SentElements, SegmentPart | None]]] = defaultdict(list)
    sizes: Counter[int] = Counter()
    found: list[tuple[int, list[tuple[SentElements, SegmentPart | None]]]] = []

    def add(sender: int, piece: SentElements, part: SegmentPart | None) -> None:
        if sizes[sender] and sizes[sender] + piece.message_bytes > MESSAGE_BYTES:
            found.append((sender, filling.pop(sender)))
            sizes[sender] = 0
        filling[sender].append((piece, part))
        sizes[sender] += piece.message_bytes

    for of_round in bucket.rounds:
        for _, segment in of_round:
            for part in segment.parts:
                box = part.box
                where = segment.position, segment.nbytes, dtype_name(segment.dtype)
                add(part.rank, SentElements(*where, box.to, box.sizes, box.to_strides), part)
    for evaluation in bucket.evaluations:
        for entry in evaluation.entries:
            for start in range(0, entry.tensor.nbytes, MESSAGE_BYTES):
                nbytes = min(MESSAGE_BYTES, entry.tensor.nbytes - start)
                add(0, SentElements(entry.at + start, nbytes, "uint8", 0, (nbytes,), (1,)), None)
    found += filling.items()
    slots = [
        BucketSlot(tensor.name, dtype_name(tensor.dtype), tensor.shape, at, whole(tensor.shape))
        for tensor, _, at in bucket.entries
    ]
    messages = [Message(sender, [piece for piece, _ in pieces]) for sender, pieces in found]
    parts = [[part for _, part in pieces] for _, pieces in found]
    return MessagePlan(bucket, BucketLayout(bucket.nbytes.get(0, 0), slots, messages, worker, True), parts)


def sliced(bucket: BucketPlan, worker: int, read: Sequence[Mapping[str, Ranges]]) -> list[MessagePlan]:
    """As :func:`plan_messages`, of what each worker has `read`.

    What all read in full, or rank 0 computes, goes to one `worker`, which shares it: it is planned and sent once.
    """
    planner, tensors = bucket.planner, [entry.tensor for entry in bucket.entries]
    shared = {each.name: each for each in tensors if _is_read_by_all(each, read) or planner.is_computed(each)}
    found = [plan_messages(planner.bucket(list(shared.values())), worker)] if shared else []
    for number, by_worker in enumerate(read):
        mine = {each.name: each for each in tensors if each.name in by_worker and each.name not in shared}
        plan = plan_messages(planner.bucket([_narrowed(each, by_worker[name]) for name, each in mine.items()]), number)
        slots = [
            slot._replace(shape=mine[slot.name].shape, ranges=by_worker[slot.name])
            if slot.shape != mine[slot.name].shape
            else slot
            for slot in plan.layout.slots
        ]
        found.append(plan._replace(layout=plan.layout._replace(slots=slots, is_shared=False)))
    return found


def _is_read_by_all(tensor: NamedView, read: Sequence[Mapping[str, Ranges]]) -> bool:
    everything = whole(tensor.shape)
    return all(tensor.name in each and tuple(map(tuple, each[tensor.name])) == everything for each in read)


def _narrowed(tensor: NamedView, ranges: Ranges) -> NamedView:
    """The elements of a tensor in these ranges; all of one that is read in another shape than it is stored."""
    view = tensor.view
    if view.sizes != tensor.shape:
        return tensor
    for dim, (start, stop) in enumerate(ranges):
        view = view.narrow(dim, start, stop - start)
    return tensor._replace(view=view, shape=view.sizes)


@torch.no_grad()
def messages_of(
    plans: Sequence[MessagePlan], parameters: Parameters, adapted: AdaptedLayers | None, coordinator: Coordinator
) -> Iterator[tuple[int, torch.Tensor]]:
    """This rank's messages and the workers that get them, each made when it is asked for (all ranks)."""
    computed = [_computed(each.bucket, parameters, adapted, coordinator) for each in plans]
    return _messages(plans, parameters, computed, coordinator.rank)


def _computed(
    bucket: BucketPlan, parameters: Parameters, adapted: AdaptedLayers | None, coordinator: Coordinator
) -> torch.Tensor:
    """Compute the entries of a bucket that rank 0 computes, in their place there (all ranks)."""
    if not bucket.evaluations:
        return torch.empty(0, dtype=torch.uint8)
    filling = Filling(coordinator, adapted)
    memory = torch.empty(bucket.nbytes.get(coordinator.rank, 0), dtype=torch.uint8, device=collective_device())
    with opened(parameters.holdings) as values:
        for evaluation in bucket.evaluations:
            filling.evaluate(evaluation, memory, values)
    coordinator.agree(filling.error)
    return memory


def _messages(
    plans: Sequence[MessagePlan], parameters: Parameters, computed: Sequence[torch.Tensor], rank: int
) -> Iterator[tuple[int, torch.Tensor]]:
    # One order for all: who sends or gets an earlier message waits for nobody who is at a later one.
    turns = [
        (not each.layout.is_shared, turn, number)
        for number, each in enumerate(plans)
        for turn, message in enumerate(each.layout.messages)
        if message.sender == rank
    ]
    with opened(parameters.holdings) as values:
        for _, turn, number in sorted(turns):
            layout, message = plans[number].layout, plans[number].layout.messages[turn]
            memory = message.new(collective_device())
            for piece, at, part in zip(message.pieces, message.starts(), plans[number].parts[turn], strict=False):
                done = computed[number][piece.position : piece.position + piece.nbytes]
                piece.view(memory, at).copy_(done if part is None else take(part, values))
            yield layout.worker, memory


class DirectVLLM(VLLM):
    """vLLM's server with the plugin of :mod:`.vllm_engine`: all ranks are in a group with its workers.

    At the first update all workers get all tensors, and say what their loaders have read of them: of later ones each
    gets its slices. With `deltas`, these have only what has changed since, found by the stream's `deltas`.
    """

    packs = False

    def __init__(self, *args: Any, deltas: bool) -> None:
        super().__init__(*args)
        self._deltas = deltas
        self._changes = False
        self._of_plan: Any = None
        self._plans = 0
        self._read: list[dict[str, Ranges]] | None = None
        """The ranges that each worker has read, at the first update by the stream's plan."""
        self._message_plans: list[list[MessagePlan]] = []
        """For each bucket: the messages that all workers need, and those of one worker."""
        self._number = 0
        """The number of the bucket that comes next in this pass."""

    def meet(self, coordinator: Coordinator, address: str | None, port: int | None) -> None:
        self._client.asks = coordinator.is_main
        accepted: Future[Any] | None = None

        def announced() -> dict[str, Any]:
            nonlocal accepted
            config = self._client.get("server_info?config_format=json")["vllm_config"].get("weight_transfer_config")
            if config is None or config.get("backend") != BACKEND:
                raise StreamError(
                    f"{self._client.url}: expected a vLLM server with the plugin of hf_zero_stream; its backend for "
                    f"weight transfer is {config and config.get('backend')!r}. Install hf_zero_stream beside vLLM "
                    "(pip install --no-deps FOLDER, of a clone), and start the server with VLLM_SERVER_DEV_MODE=1 and "
                    f"""--weight-transfer-config '{{"backend": "{BACKEND}"}}'."""
                )
            info = {
                **self._own_place(address, port),
                "rank_offset": coordinator.world_size,
                "world_size": self._client.get("get_world_size")["world_size"] + coordinator.world_size,
                "backend": "nccl" if accelerators.is_accelerator(self._device) else "gloo",
            }
            accepted = self._client.begin_post("init_weight_transfer_engine", {"init_info": info})
            return info

        info = coordinator.broadcast(announced)
        with coordinator.reporting():
            joining = self._client.background(lambda: WeightGroup(info, coordinator.rank, self._device))
            self._group = self._client.wait(joining, accepted)
            if accepted is not None:
                self._client.wait(accepted)

    def passing(self, stream: WeightStream, coordinator: Coordinator) -> Generator[Any]:
        self._number = 0
        self._changes = self._deltas and stream.can_compare(coordinator)
        return (
            stream.deltas(coordinator)
            if self._changes
            else stream.passing(coordinator, partial(self._bucket_messages, stream))
        )

    def _bucket_messages(
        self,
        stream: WeightStream,
        bucket: BucketPlan,
        parameters: Parameters,
        adapted: AdaptedLayers | None,
        coordinator: Coordinator,
    ) -> Iterator[tuple[int, torch.Tensor]]:
        if self._number == 0:
            self._plan_again(stream, coordinator)
        if self._number == len(self._message_plans):
            self._message_plans.append(self._plan_messages(bucket))
            if coordinator.is_main:
                self._tell_workers(self._message_plans[-1])
        return messages_of(self._message_plans[self._number], parameters, adapted, coordinator)

    def _plan_again(self, stream: WeightStream, coordinator: Coordinator) -> None:
        """Begin a new plan, if the stream has one, or if it is known since its first pass what the workers read."""
        found = None
        is_new = stream.buckets is not self._of_plan
        if not is_new and self._read is None and self._group.workers > 1:
            found = coordinator.broadcast(self._read_by_workers)
        if is_new or found is not None:
            self._of_plan, self._read, self._message_plans = stream.buckets, found, []
            self._plans += 1

    def _read_by_workers(self) -> list[dict[str, Ranges]] | None:
        """Return the ranges each worker has read of the last plan's tensors; None if the next update may differ."""
        keys = [f"{self._plan} read by {worker}" for worker in range(self._group.workers)]
        found = [decoded(self._group.store.get(key)) for key in keys]
        return None if None in found else found

    def _plan_messages(self, bucket: BucketPlan) -> list[MessagePlan]:
        worker = self._number % self._group.workers
        return [plan_messages(bucket, worker)] if self._read is None else sliced(bucket, worker, self._read)

    def _tell_workers(self, plans: Sequence[MessagePlan]) -> None:
        """Leave the layouts of a bucket in the group's store."""
        key, layouts = f"{self._plan} {self._number}", [each.layout for each in plans]
        if self._read is None:
            self._group.store.set(key, encoded(layouts))
        for worker in range(self._group.workers if self._read is not None else 0):
            mine = [each for each in layouts if each.is_shared or each.worker == worker]
            self._group.store.set(f"{key} {worker}", encoded(mine))

    @property
    def _plan(self) -> str:
        return f"plan {self._plans}"

    def _update_info(self, stream: WeightStream) -> dict[str, Any]:
        sliced = self._read is not None
        return {"plan": self._plan, "buckets": stream.bucket_count, "sliced": sliced, "changes": self._changes}

    def give(self, item: Any, coordinator: Coordinator) -> None:
        with coordinator.reporting():
            worker = self._number % self._group.workers
            self._number += 1
            messages = ((worker, each) for each in self._packed(item, coordinator.is_main)) if self._changes else item
            for to, message in messages:
                self._send_in_background(partial(self._group.send, message, to))
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
