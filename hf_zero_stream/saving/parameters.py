"""The parameters that are being saved: who gives which elements, and the values that this rank holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
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
from ..engine.compute import Evaluator
from ..engine.workers import run_in_threads
from ..errors import SaveError, UnsupportedError
from ..planning.parameter_box import Interval, ParameterBox
from ..ranks.coordinator import Coordinator, collective_device
from ..sources.local import LocalFiles
from .digest import digest
from .plan import Share, Sources, in_dtype, view_of


__all__ = ["Opened", "Parameters", "cover", "state_dict_without_values"]

logger = logging.get_logger(__name__)


class _Held(NamedTuple):
    """What a rank tells the others of a holding; `box` is None if it is the whole parameter."""

    box: ParameterBox | None
    start: int
    stop: int
    is_whole: bool
    digest: bytes | None


_NOT_HELD = _Held(None, 0, 0, False, None)


class Parameters:
    """All parameters of a model, as ranks hold them between them. Made by all ranks together.

    Args:
        dtype: what those of floating point are saved in; default: as they are held.
        single_writer: rank 0 gives what every rank holds.
        threads: how many threads compare replicas.

    Attributes:
        lazy: a lazy tensor for each name; names of one parameter have one and the same.
        numel: elements of all parameters, each counted once.
        holdings: what this rank holds, by source.
    """

    def __init__(
        self,
        model: nn.Module,
        coordinator: Coordinator,
        *,
        dtype: torch.dtype | None,
        single_writer: bool,
        threads: int,
    ) -> None:
        self._model, self._dtype, self._coordinator = model, dtype, coordinator
        holdings = coordinator.run_on_all(lambda: _holdings(model, coordinator, dtype))
        self.lazy = _lazy_parameters(holdings, self.gather, dtype)
        by_parameter = {name: holdings[name] for name in _first_names(holdings).values()}
        self.numel = sum(self.lazy[name].numel() for name in by_parameter)
        self.holdings: dict[str, Holding] = {}
        self.sources = Sources()
        self._agree_on_shares(by_parameter, single_writer, threads)

    def state_dict(self) -> dict[str, Any]:
        """``model.state_dict()`` with lazy tensors, whose values can be gathered by all ranks together."""
        return _lazy_state_dict(self._model, self.lazy, self.gather, self._dtype)

    def _agree_on_shares(self, holdings: Mapping[str, Holding], single_writer: bool, threads: int) -> None:
        compared = not single_writer and not self._coordinator.is_alone
        digests = self._coordinator.run_on_all(lambda: _digests(holdings, threads) if compared else {})

        def described(name: str, holding: Holding) -> _Held:
            box = None if holding.box.is_whole else holding.box
            return _Held(box, holding.start, holding.stop, holding.is_whole, digests.get(name))

        everyone = self._coordinator.all_gather([described(name, holding) for name, holding in holdings.items()])
        different = [rank for rank, of_rank in enumerate(everyone) if len(of_rank) != len(holdings)]
        if different:
            raise SaveError(
                f"Rank(s) {different} have another number of parameters than this one ({len(holdings)}): the "
                "model must be the same on every rank."
            )
        differing: list[str] = []
        givers: set[int] = set()
        for position, (name, holding) in enumerate(holdings.items()):
            held = [of_rank[position] for of_rank in everyone]
            for source, box in self._sources(name, holding, held).items():
                if box == holding.box:
                    self.holdings[source] = holding
                wanted = None if box.is_whole else box
                of_box = [mine if mine.box == wanted else _NOT_HELD for mine in held]
                same = self._agree_on_source(source, box.numel, of_box, compared)
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

    def _agree_on_source(self, source: str, numel: int, held: Sequence[_Held], compared: bool) -> bool:
        """Choose who gives `source`: the first rank, and return False, if ranks hold all with different values."""
        holders = [rank for rank, mine in enumerate(held) if mine is not _NOT_HELD]
        first = held[holders[0]]
        same = compared and all(held[rank].is_whole and held[rank].digest == first.digest for rank in holders)
        if same and len(holders) == len(held):
            self.sources.everywhere.add(source)
        if same or not first.is_whole or not numel:
            self.sources.shares[source] = cover(source, numel, [(mine.start, mine.stop) for mine in held])
            return True
        self.sources.shares[source] = (Share(holders[0], 0, numel),)
        return all(held[rank].digest in (None, first.digest) for rank in holders)

    def gather(self, view: View) -> torch.Tensor:
        """The values of `view` in host memory; all ranks must call this in the same order, as it gathers parameters.

        The last resort, for functions that cannot be turned into ranges.
        """
        evaluator = Evaluator(LocalFiles(), request_bytes=1, seek_bytes=0, staging_bytes=64 * 2**20)
        return evaluator.materialise(self._with_values(view, {}))

    def _with_values(self, value: Any, done: dict[int, Node]) -> Any:
        """`value`, if it is a view, with every parameter that it depends on replaced by its values."""
        if not isinstance(value, View):
            return value
        node = value.node
        if id(node) not in done:
            if isinstance(node, Stored) and node.name in self.sources.joined:
                joined = self.sources.joined[node.name]
                done[id(node)] = self._with_values(View(joined, (), ()), done).node
            elif isinstance(node, Stored):
                done[id(node)] = HostTensor(node.sizes, node.dtype, self._full(node))
            else:
                changes = {
                    field.name: tree_map(lambda inner: self._with_values(inner, done), getattr(node, field.name))
                    for field in dataclasses.fields(node)
                    if field.init
                }
                done[id(node)] = dataclasses.replace(node, **changes)
        return dataclasses.replace(value, node=done[id(node)])

    def _full(self, source: Stored) -> torch.Tensor:
        """All values of a source in host memory, on every rank."""
        shares = self.sources.shares[source.name]

        def with_own_shares() -> torch.Tensor:
            full = torch.empty(source.numel, dtype=source.dtype, device=collective_device())
            for share in shares:
                if share.rank == self._coordinator.rank:
                    values, first = opened.values(source.name)
                    full[share.start : share.stop].copy_(values[share.start - first : share.stop - first])
            return full

        with Opened(self.holdings) as opened:
            if source.name in self.sources.everywhere:
                return opened.values(source.name)[0].cpu()
            # An agreement: if a rank cannot read its share, no other rank may wait for it in the broadcasts.
            full = self._coordinator.run_on_all(with_own_shares)
        if not self._coordinator.is_alone:
            for share in shares:
                part = full[share.start : share.stop].view(torch.uint8)
                self._coordinator.wait(dist.broadcast(part, share.rank, async_op=True))
        return full.cpu()


def _digests(holdings: Mapping[str, Holding], threads: int) -> dict[str, bytes]:
    """A digest of each parameter of which this rank holds all its box."""
    digests: dict[str, bytes] = {}

    def work(names: Iterator[str]) -> None:
        for name in names:
            with holdings[name].open() as values:
                digests[name] = digest(values)

    run_in_threads([name for name, holding in holdings.items() if holding.is_whole], work, threads)
    return digests


def state_dict_without_values(model: nn.Module, dtype: torch.dtype | None = None) -> dict[str, Any]:
    """``model.state_dict()`` with lazy tensors, which all ranks can save; reading their values raises."""
    holdings = _holdings(model, Coordinator.of_default_group(), dtype)
    return _lazy_state_dict(model, _lazy_parameters(holdings, _refuse_values, dtype), _refuse_values, dtype)


def _refuse_values(view: View) -> torch.Tensor:
    raise UnsupportedError(
        "This state dict is lazy: accelerator.get_state_dict() gives such a one inside streaming(), and a "
        "save_pretrained of a model's own is given one. Its tensors can be saved, by all ranks, with "
        "save_pretrained(..., state_dict=...), and their values are not there. For the values themselves use "
        "deepspeed.zero.GatheredParameters, or call accelerator.get_state_dict() outside streaming()."
    )


def _holdings(model: nn.Module, coordinator: Coordinator, dtype: torch.dtype | None) -> dict[str, Holding]:
    rank, world_size = coordinator.rank, coordinator.world_size
    return kinds.holdings(model, masters=dtype == torch.float32, rank=rank, world_size=world_size)


def _lazy_parameters(
    holdings: Mapping[str, Holding], materialise: Materialise, dtype: torch.dtype | None
) -> dict[str, torch.Tensor]:
    """A lazy tensor for each name, the same for names of one parameter: transformers must see that they are tied."""

    def lazy(name: str, holding: Holding) -> torch.Tensor:
        return in_dtype(LazyTensor.whole(Stored(holding.box.shape, holding.dtype, name), materialise), dtype)

    by_parameter = {number: lazy(name, holdings[name]) for number, name in _first_names(holdings).items()}
    return {name: by_parameter[id(holding)] for name, holding in holdings.items()}


def _lazy_state_dict(
    model: nn.Module, parameters: Mapping[str, torch.Tensor], materialise: Materialise, dtype: torch.dtype | None
) -> dict[str, Any]:
    """``model.state_dict()`` with lazy tensors, those of floating point in `dtype`."""
    memories: dict[Any, HostTensor] = {}

    def lazy(name: str, value: Any) -> Any:
        if name in parameters or not isinstance(value, torch.Tensor):
            return parameters.get(name, value)
        # Every rank has its own values of a buffer; those of rank 0 are written.
        return in_dtype(LazyTensor.of(view_of(value, memories), materialise), dtype)

    return with_original_experts(model, {name: lazy(name, value) for name, value in model.state_dict().items()})


def _first_names(holdings: Mapping[str, Holding]) -> dict[int, str]:
    first_names: dict[int, str] = {}
    for name, holding in holdings.items():
        first_names.setdefault(id(holding), name)
    return first_names


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


def cover(name: str, numel: int, held: Sequence[tuple[int, int]]) -> tuple[Share, ...]:
    """Shares that cover a parameter of `numel` elements, chosen from what each rank holds, with no overlap."""
    shares: list[Share] = []
    position = 0
    owned = [(start, stop, rank) for rank, (start, stop) in enumerate(held) if start < stop]
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


class Opened:
    """The values of the parameters that are being worked on; of those in swap files, one at a time."""

    def __init__(self, holdings: Mapping[str, Holding]) -> None:
        self._holdings = holdings
        self._in_memory, self._from_file = ExitStack(), ExitStack()
        self._values: dict[str, torch.Tensor] = {}

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *error: object) -> None:
        self._values.clear()
        with self._in_memory:
            self._from_file.close()

    def values(self, source: str) -> tuple[torch.Tensor, int]:
        """The flat values of a source that this rank holds, and the number of the first; until the next call."""
        holding = self._holdings[source]
        if source not in self._values:
            if holding.is_swapped:
                for name in [name for name in self._values if self._holdings[name].is_swapped]:
                    del self._values[name]
                self._from_file.close()
            contexts = self._from_file if holding.is_swapped else self._in_memory
            self._values[source] = contexts.enter_context(holding.open())
        return self._values[source], holding.first
