"""The parameters that are being saved: who gives which elements, and the values that this rank holds."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map
from transformers.utils import logging

from ..checkpoint.lazy import LazyTensor, Materialise
from ..checkpoint.nodes import HostTensor, Node, Stored, View
from ..destinations import kinds
from ..destinations.base import Holding, narrowed
from ..destinations.deepspeed.original_experts import with_original_experts
from ..destinations.shards import whole_of
from ..engine.compute import Evaluator
from ..engine.workers import run_in_threads
from ..errors import SaveError, UnsupportedError
from ..planning.parameter_box import Interval, ParameterBox
from ..ranks.coordinator import Coordinator, collective_device
from ..sources.local import LocalFiles
from .plan import Share, Sources, in_dtype


__all__ = ["Held", "Parameters", "Values", "cover", "opened", "state_dict_without_values"]

logger = logging.get_logger(__name__)


Held = Callable[[], Mapping[str, Holding]]
"""What this rank holds of something that a training has for parameters, by their names."""


class _Held(NamedTuple):
    """What a rank tells the others of a holding; no `box` is the whole parameter, no `digest` is not compared."""

    box: ParameterBox | None
    start: int
    stop: int
    is_whole: bool
    digest: bytes | None


class Parameters:
    """All parameters of a model, as ranks hold them between them, saved in `dtype` or as they are held (all ranks).

    A `single_writer` is rank 0, which gives what every rank holds; otherwise `threads` compare it. What is `held` in
    place of some of the parameters' values, if it is given, is saved under their names, and nothing else.
    """

    def __init__(
        self,
        model: nn.Module,
        coordinator: Coordinator,
        dtype: torch.dtype | None,
        single_writer: bool,
        threads: int,
        held: Held | None = None,
    ) -> None:
        self._coordinator = coordinator
        lazy = functools.partial(_LazyParameters, model, coordinator, dtype, self.gather, held)
        self._lazy = coordinator.run_on_all(lazy)
        self.numel = sum(prod(holding.box.shape) for holding in self._lazy.holdings.values())
        self.holdings: dict[str, Holding] = {}  # this rank's, by source
        self.sources = Sources()
        self._agree_on_shares(self._lazy.holdings, single_writer, threads)

    def lie_as(self, other: Parameters) -> bool:
        """Whether this rank gives the same elements, in the same dtypes, as of the parameters of an `other` save."""

        def layout(parameters: Parameters) -> Any:
            of_names = parameters._lazy.holdings
            held = [(name, each.box, each.dtype, each.start, each.stop) for name, each in of_names.items()]
            return held, parameters.sources.shares, parameters.sources.everywhere

        return bool(layout(self) == layout(other))

    def entries(self, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """``model.state_dict()``, or what is `given`, with lazy tensors whose values all ranks can gather together."""
        if given is None:
            return self._lazy.state_dict()
        entries = {}
        for name, value in given.items():
            view = value.view_of_node if isinstance(value, LazyTensor) else value  # rank 0 sends views
            entries[name] = entry = LazyTensor.of(view, self.gather) if isinstance(view, View) else value
            expected = self._lazy.by_name[name].numel() if name in self._lazy.by_name else 0
            if expected and isinstance(entry, torch.Tensor) and entry.numel() == 0:
                raise SaveError(
                    f"{name}: expected {expected} elements in the state dict that is to be saved; got none. "
                    "model.state_dict() does not hold the values of a ZeRO-3 model: use the state dict that "
                    "save_pretrained is given, or gather the parameters (deepspeed.zero.GatheredParameters)."
                )
        return entries

    def _agree_on_shares(self, holdings: Mapping[str, Holding], single_writer: bool, threads: int) -> None:
        compared = {} if single_writer or self._coordinator.is_alone else holdings
        digests = self._coordinator.run_on_all(functools.partial(_digests, compared, threads))
        mine = [
            _Held(None if each.box.is_whole else each.box, each.start, each.stop, each.is_whole, digests.get(name))
            for name, each in holdings.items()
        ]
        everyone = self._coordinator.all_gather(mine)
        different = [rank for rank, of_rank in enumerate(everyone) if len(of_rank) != len(holdings)]
        if different:
            raise SaveError(
                f"Rank(s) {different} have another number of parameters than this one ({len(holdings)}): the "
                "model must be the same on every rank."
            )
        differing: list[str] = []
        givers: set[int] = set()
        for (name, holding), held in zip(holdings.items(), zip(*everyone, strict=True), strict=True):
            for source, box in self._sources(name, holding, held).items():
                if not box.numel:
                    self.sources.shares[source] = ()  # nobody need hold it whole: it may be cut along any dimension
                    continue
                if box == holding.box:
                    self.holdings[source] = holding
                wanted = None if box.is_whole else box
                holders = {rank: of_rank for rank, of_rank in enumerate(held) if of_rank.box == wanted}
                same = self._agree_on_source(source, box.numel, holders)
                # What is gathered is expected to be new on rank 0.
                if not same and not holding.is_gathered:
                    differing.append(name)
                    givers.add(self.sources.shares[source][0].rank)
        if differing and self._coordinator.is_main:
            logger.warning(
                f"Ranks have different values for {', '.join(differing[:8])} ({len(differing)} parameter(s)), which "
                f"each of them holds in full. Those of rank {', '.join(map(str, sorted(givers)))} are saved."
            )

    def _sources(self, name: str, holding: Holding, held: Sequence[_Held]) -> dict[str, ParameterBox]:
        """The sources of a parameter: itself, or the boxes of it that ranks hold, which are joined."""
        whole = ParameterBox.whole(holding.box.shape)
        boxes = {mine.box or whole for mine in held}
        if boxes == {whole} or not whole.numel:
            return {name: whole}
        sources = {f"{name}@{number}": box for number, box in enumerate(sorted(box for box in boxes if box.numel))}
        blocks: list[tuple[ParameterBox, View]] = []
        for source, box in sources.items():
            view = View.whole(Stored(box.sizes, holding.dtype, source))
            blocks += [(block, narrowed(view, within)) for block, within in box.blocks()]
        self.sources.joined[name] = join(name, sorted(blocks, key=lambda of_block: of_block[0].intervals)).node
        return sources

    def _agree_on_source(self, source: str, numel: int, held: Mapping[int, _Held]) -> bool:
        """Choose who gives `source`: the first holder, and return False, if several hold all with different values."""
        first_rank, first = next(iter(held.items()))
        same = first.digest is not None and all(each.digest == first.digest for each in held.values())
        if same and len(held) == self._coordinator.world_size:
            self.sources.everywhere.add(source)
        if same or not first.is_whole:
            ranges = {rank: (each.start, each.stop) for rank, each in held.items()}
            self.sources.shares[source] = cover(source, numel, ranges)
            return True
        self.sources.shares[source] = (Share(first_rank, 0, numel),)
        return all(each.digest in (None, first.digest) for each in held.values())

    def gather(self, view: View) -> torch.Tensor:
        """The values of `view`, gathered in host memory, where no ranges give them (all ranks, in the same order)."""
        done: dict[int, Node] = {}

        def with_values(value: Any) -> Any:
            if not isinstance(value, View):
                return value
            if id(value.node) not in done:
                done[id(value.node)] = node_with_values(value.node)
            return dataclasses.replace(value, node=done[id(value.node)])

        def node_with_values(node: Node) -> Node:
            if isinstance(node, Stored) and node.name in self.sources.joined:
                node = self.sources.joined[node.name]
            if isinstance(node, Stored):
                return HostTensor(node.sizes, node.dtype, self._full(node))
            changes = {
                field.name: tree_map(with_values, getattr(node, field.name))
                for field in dataclasses.fields(node)
                if field.init
            }
            return dataclasses.replace(node, **changes)

        evaluator = Evaluator(LocalFiles(), request_bytes=1, seek_bytes=0, staging_bytes=64 * 2**20)
        return evaluator.materialise(with_values(view))

    def _full(self, source: Stored) -> torch.Tensor:
        """All values of a source in host memory, on every rank."""
        shares = self.sources.shares[source.name]

        def with_own_shares() -> torch.Tensor:
            full = torch.empty(source.numel, dtype=source.dtype, device=collective_device())
            for share in shares:
                if share.rank == self._coordinator.rank:
                    held = values(source.name, share.start)
                    full[share.start : share.stop].copy_(held[: share.stop - share.start])
            return full

        with opened(self.holdings) as values:
            if source.name in self.sources.everywhere:
                return values(source.name, 0).cpu()
            # An agreement: if a rank cannot read its share, no other rank may wait for it in the broadcasts.
            full = self._coordinator.run_on_all(with_own_shares)
        if not self._coordinator.is_alone:
            for share in shares:
                part = full[share.start : share.stop].view(torch.uint8)
                self._coordinator.wait(dist.broadcast(part, share.rank, async_op=True))
        return full.cpu()


class _LazyParameters:
    """Lazy tensors in place of a model's parameters and buffers, those of floating point in `dtype`."""

    def __init__(
        self,
        model: nn.Module,
        coordinator: Coordinator,
        dtype: torch.dtype | None,
        materialise: Materialise,
        held: Held | None = None,
    ) -> None:
        self._model, self._dtype, self._materialise = model, dtype, materialise
        self._has_buffers = held is None
        rank, world_size = coordinator.rank, coordinator.world_size
        if held is None:
            self.holdings = kinds.holdings(model, masters=dtype == torch.float32, rank=rank, world_size=world_size)
        else:
            of_names = held()
            self.holdings = {name: of_names[name] for name, _ in model.named_parameters() if name in of_names}
        # Names of one parameter have one and the same tensor: transformers must see that they are tied.
        lazy: dict[int, torch.Tensor] = {}
        params = dict(model.named_parameters())
        for name, holding in self.holdings.items():
            lazy[id(params[name])] = self._lazy(View.whole(Stored(holding.box.shape, holding.dtype, name)))
        named = model.named_parameters(remove_duplicate=False)
        self.by_name = {name: lazy[id(param)] for name, param in named if id(param) in lazy}
        self._by_id = lazy

    def _lazy(self, view: View) -> Any:
        return in_dtype(LazyTensor.of(view, self._materialise), self._dtype)

    def state_dict(self) -> dict[str, Any]:
        """``model.state_dict()`` with lazy tensors."""
        memories: dict[tuple[int, torch.dtype], HostTensor] = {}

        def view_of(buffer: torch.Tensor) -> View:
            # One node for all that share a memory: transformers puts these into one shard, and saves equal ones once.
            storage = buffer.untyped_storage()
            if storage.data_ptr() == 0 or storage.nbytes() % buffer.dtype.itemsize:  # none, or of other dtypes, too
                return View.whole(HostTensor.of(buffer))
            key = (storage.data_ptr(), buffer.dtype)
            if key not in memories:
                memories[key] = HostTensor.of(torch.empty(0, dtype=buffer.dtype, device=buffer.device).set_(storage))
            return View(memories[key], tuple(buffer.shape), buffer.stride(), int(buffer.storage_offset()))

        # With the parameters themselves: accelerate's activation checkpointing has its own part in their names in the
        # model, but not in the state dict.
        entries = self._model.state_dict(keep_vars=True)
        if not self._has_buffers:
            entries = {name: value for name, value in entries.items() if id(value) in self._by_id}
        for name, value in entries.items():
            lazy = self.by_name.get(name, self._by_id.get(id(value)))
            if lazy is not None:
                entries[name] = lazy
            elif isinstance(value, torch.Tensor):  # a buffer; every rank has its own values, and rank 0's are written
                entries[name] = self._lazy(view_of(whole_of(name, value)))
        return with_original_experts(self._model, dict(entries))


def state_dict_without_values(model: nn.Module, dtype: torch.dtype | None = None) -> dict[str, Any]:
    """``model.state_dict()`` with lazy tensors, which all ranks can save; reading their values raises."""
    return _LazyParameters(model, Coordinator.of_default_group(), dtype, _refuse_values).state_dict()


def _refuse_values(view: View) -> torch.Tensor:
    raise UnsupportedError(
        "This state dict is lazy: accelerator.get_state_dict() gives such a one inside streaming(), and a "
        "save_pretrained of a model's own is given one. Its tensors can be saved, by all ranks, with "
        "save_pretrained(..., state_dict=...), and their values are not there. For the values themselves use "
        "deepspeed.zero.GatheredParameters, or call accelerator.get_state_dict() outside streaming()."
    )


def join(name: str, boxes: Sequence[tuple[ParameterBox, View]], dim: int = 0) -> View:
    """A parameter put together of boxes: it is cut into slabs along dimension `dim`, and each slab along the next.

    `boxes` are in order of their first indices, each with its elements.
    """
    shape = boxes[0][0].shape
    if dim == len(shape):
        return boxes[0][1]
    slabs: dict[Interval, list[tuple[ParameterBox, View]]] = {}
    for box, view in boxes:
        ((begin, end),) = box.intervals[dim]
        slabs.setdefault((begin, end), []).append((box, view))
    position = 0
    for begin, end in slabs:
        if begin != position:
            break
        position = end
    if position != shape[dim]:
        raise SaveError(
            f"{name}: expected that the boxes that ranks hold of it fill its shape {shape} without overlap; along "
            f"dimension {dim} it is cut into (first index, one past the last): {', '.join(map(str, slabs))}. Save "
            "from all ranks of the job, with the same model on each."
        )
    pieces = tuple(join(name, slab, dim + 1) for slab in slabs.values())
    return pieces[0] if len(pieces) == 1 else View.joined(pieces, dim)


def cover(name: str, numel: int, held: Mapping[int, tuple[int, int]]) -> tuple[Share, ...]:
    """Shares that cover a parameter of `numel` elements, chosen from what each rank holds, with no overlap."""
    shares: list[Share] = []
    position = 0
    owned = [(start, stop, rank) for rank, (start, stop) in held.items() if start < stop]
    for start, stop, rank in sorted(owned, key=lambda own: (own[0], -own[1], own[2])):
        if start > position:
            break
        if stop > position:
            shares.append(Share(rank, position, stop))
            position = stop
    if position < numel:
        raise SaveError(
            f"{name}: expected that the ranks hold all {numel} elements between them; nobody holds number {position}. "
            "Save from all ranks of the job, with the same model on each."
        )
    return tuple(shares)


def _digests(holdings: Mapping[str, Holding], threads: int) -> dict[str, bytes]:
    """A digest of each parameter of which this rank holds all its box."""
    digests: dict[str, bytes] = {}

    def work(names: Iterator[str]) -> None:
        for name in names:
            with holdings[name].open() as values:
                digests[name] = digest(values)

    run_in_threads([name for name, holding in holdings.items() if holding.is_whole], work, threads)
    return digests


Values = Callable[[str, int], torch.Tensor]
"""``values(source, start)``: the flat values of a source from element `start` on, as far as this rank holds them."""


@contextmanager
def opened(holdings: Mapping[str, Holding]) -> Iterator[Values]:
    """Inside, the values of the sources that are asked for stay open; of those in swap files, only the last."""
    found: dict[str, torch.Tensor] = {}

    def values(source: str, start: int) -> torch.Tensor:
        holding = holdings[source]
        if source not in found:
            contexts = in_memory
            if holding.is_swapped:
                contexts = from_file
                contexts.close()
            found[source] = contexts.enter_context(holding.open())
            contexts.callback(found.pop, source)  # before the context ends
        return found[source][start - holding.first :]

    with ExitStack() as in_memory, ExitStack() as from_file:
        yield values


_ROW = 128  # numbers in a row
_BLOCK = 2**16  # numbers that are summed at once on a CPU: they stay in its cache from one step to the next


def digest(values: torch.Tensor) -> bytes:
    """The same 8 bytes for the same bytes, in much less time than writing them takes, on CPU and GPU.

    The bytes are taken as 64-bit numbers, in rows. Each row becomes a sum with odd, random weights for the lower and
    the upper half of each number, modulo 2**64 (multilinear hashing: Lemire and Kaser, "Strongly universal string
    hashing is fast", 2014). Only these sums are hashed. Rows that change places, signs that flip or single values that
    differ give other sums, but for one chance in billions.
    """
    data = values.detach().contiguous().view(-1).view(torch.uint8)
    tail = data.numel() % (8 * _ROW)
    numbers = data[: data.numel() - tail]
    if numbers.storage_offset() % 8 or numbers.data_ptr() % 8:
        numbers = numbers.clone()
    lower, upper = _weights(str(numbers.device))
    block = _BLOCK if values.device.type == "cpu" else 2**6 * _BLOCK
    blocks = numbers.view(torch.int64).view(numbers.numel() // 8 // _ROW, _ROW).split(block // _ROW)
    sums = torch.cat([(rows * lower).addcmul_(rows >> 32, upper).sum(1) for rows in blocks])
    state = hashlib.blake2b(f"{values.dtype} {values.numel()}".encode(), digest_size=8)
    for part in (sums, data[data.numel() - tail :]):
        state.update(part.cpu().numpy().tobytes())
    return state.digest()


@functools.cache
def _weights(device: str) -> torch.Tensor:
    """The weights of the lower and of the upper halves; the same on all ranks and devices."""
    generator = torch.Generator().manual_seed(2014)
    bounds = torch.iinfo(torch.int64)
    drawn = torch.randint(bounds.min, bounds.max, (2, _ROW), generator=generator, dtype=torch.int64) | 1
    return drawn.to(device)
