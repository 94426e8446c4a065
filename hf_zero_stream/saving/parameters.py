"""What is being saved, as ranks hold it between them: who gives which elements, and the values that this rank holds.

Ranks may differ in what is taken for the same on all: which parameters there are, and the values of replicas. Where
nothing explains a difference, a save would lose what all ranks but one have, in silence.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from transformers.utils import logging

from ..accelerators import collective_device
from ..checkpoint.nodes import HostTensor, Node, Stored, View, sources_of
from ..destinations.base import narrowed
from ..engine.compute import MemoryEvaluator
from ..errors import SaveError, UnsupportedError
from ..holdings.holding import Holding
from ..holdings.introspection import instances_of, is_cut
from ..holdings.own_names import parameters
from ..planning.boxes import Interval, ParameterBox
from ..ranks.coordinator import Coordinator
from .lazy_parameters import Holds, LazyParameters, Selection, digests_of, stored_names
from .plan import Share, Sources


logger = logging.get_logger(__name__)


T = TypeVar("T")


class _Told(NamedTuple):
    """A holding as a rank tells the others of it; no `box` is the whole parameter, no `digest` is not compared."""

    box: ParameterBox | None
    start: int
    stop: int
    is_whole: bool
    digest: bytes | None


Digests = Mapping[str, bytes]
"""Digests of that of which a rank holds all of a box, by name."""


@dataclass(frozen=True)
class Layout:
    """How ranks hold something between them: all that a plan to save it depends on, and none of the values.

    Attributes:
        held: what this rank holds, by name.
        names: what each of this rank's sources is, or is a part of, by its name in the plan.
        same: by the name of something of which ranks hold all of a box: for each rank, the first one that has the
            same values.
        copies: buffers in host memory, and what they are copies of.
    """

    held: tuple[Any, ...]
    sources: Sources = field(default_factory=Sources)
    names: dict[str, str] = field(default_factory=dict)
    same: dict[str, tuple[int, ...]] = field(default_factory=dict)
    copies: list[tuple[HostTensor, torch.Tensor]] = field(default_factory=list)

    def copy_again(self) -> None:
        """Give :attr:`copies`, which plans refer to, the values of this moment."""
        for copy, values in self.copies:
            copy.tensor.copy_(values.detach().reshape(-1))


def _held_by(holdings: Mapping[str, Holding]) -> tuple[Any, ...]:
    return tuple(
        (name, each.box, each.dtype, each.start, each.stop, each.is_whole, each.is_gathered)
        for name, each in holdings.items()
    )


def _same(everyone: Sequence[Digests]) -> dict[str, tuple[int, ...]]:
    """:attr:`Layout.same` of these digests of all ranks."""
    found = {}
    for name in {name: None for digests in everyone for name in digests}:
        of_ranks = [digests.get(name) for digests in everyone]
        found[name] = tuple(map(of_ranks.index, of_ranks))
    return found


class Parameters:
    """All that is saved, as ranks hold it between them: parameters of a model, and what they hold for these.

    Attributes:
        holdings: this rank's, by source.
        layout: who gives which elements.
    """

    def __init__(self, coordinator: Coordinator, holdings: Mapping[str, Holding], layout: Layout) -> None:
        self._coordinator = coordinator
        self.layout = layout
        self.holdings = {source: holdings[name] for source, name in layout.names.items()}
        self.gathered: set[str] = set()
        """Parameters whose values :meth:`gather` has given: what is made of them says no more where they come from."""

    @property
    def sources(self) -> Sources:
        return self.layout.sources

    @property
    def is_swapped(self) -> bool:
        """Whether this rank holds any of it in swap files."""
        return any(holding.is_swapped for holding in self.holdings.values())

    @classmethod
    def following(
        cls,
        layout: Layout | None,
        held: Holds,
        coordinator: Coordinator,
        compares: bool,
        threads: int,
        *,
        beside: T,
    ) -> tuple[Parameters | None, list[T]]:
        """What is held now, by a known `layout`; None if any rank has none, or holds it otherwise (all ranks).

        And what each rank gives `beside` it. For `compares` and `threads` see :class:`NewParameters`.
        """
        holdings: Mapping[str, Holding] = {}
        mine: Digests | None = None
        with coordinator.reporting():
            if layout is not None:
                holdings = held()
                if _held_by(holdings) == layout.held:
                    mine = digests_of(holdings, threads) if compares else {}
        of_ranks = coordinator.all_gather((mine, beside))
        known = [digests for digests, _ in of_ranks if digests is not None]
        gathered = [each for _, each in of_ranks]
        if layout is None or len(known) < len(of_ranks) or _same(known) != layout.same:
            return None, gathered
        layout.copy_again()
        return cls(coordinator, holdings, layout), gathered

    def gather(self, view: View) -> torch.Tensor:
        """The values of `view`, gathered in host memory, where no ranges give them (all ranks, in the same order)."""
        self.gathered |= stored_names([view])
        return evaluated(view, self._full, self.sources.joined)

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
                self._coordinator.run(dist.broadcast, part, share.rank)
        return full.cpu()


class NewParameters(Parameters):
    """Parameters whose layout is not known yet (all ranks).

    If several ranks hold all of something, `threads` compare all of these values if `compares` is true, and equal ones
    are given by all of these ranks, each a share; without `shares`, or without a comparison, the first of them gives
    them. In a state of a training (`is_state`) they must be equal.

    Attributes:
        lazy: the lazy tensors of each of the `selections`.
    """

    def __init__(
        self,
        model: nn.Module,
        coordinator: Coordinator,
        selections: Sequence[Selection],
        *,
        compares: bool,
        threads: int,
        is_state: bool = False,
        shares: bool = True,
    ) -> None:
        copies: list[tuple[HostTensor, torch.Tensor]] = []
        holdings: dict[str, Holding] = {}
        with coordinator.reporting():
            self.lazy = [LazyParameters(model, coordinator, each, self.gather, copies) for each in selections]
            for each in self.lazy:
                if twice := sorted(holdings.keys() & each.holdings):
                    raise UnsupportedError(
                        f"{twice[0]}: a parameter of the model has the name that the training state has for something "
                        "else. Rename the parameter."
                    )
                holdings |= each.holdings
        self._shares = shares
        self._synchronised_by = partial(wrapper_of, model) if not is_state else lambda: "a training"
        super().__init__(coordinator, {}, Layout(_held_by(holdings), copies=copies))
        self._covered: dict[tuple[int, tuple[tuple[int, int, int], ...]], tuple[Share, ...]] = {}
        """Ranks hold parameters of one size alike, which then have the same shares: a large world has many of them."""
        with coordinator.reporting():
            digests = digests_of(holdings, threads) if compares else {}
        self._agree_on_shares(holdings, digests)
        self.holdings = {source: holdings[name] for source, name in self.layout.names.items()}

    def _agree_on_shares(self, holdings: Mapping[str, Holding], digests: Digests) -> None:
        # Of a model and its moments much is held alike: pickle writes one and the same tuple once.
        known: dict[_Told, _Told] = {}
        mine = [
            known.setdefault(held, held)
            for held in (
                _Told(None if it.box.is_whole else it.box, it.start, it.stop, it.is_whole, digests.get(name))
                for name, it in holdings.items()
            )
        ]
        everyone, names = zip(*self._coordinator.all_gather((mine, digest_of_names(holdings))), strict=True)
        refuse_differing(names, "have parameters of other names or shapes")
        self.layout.same.update(
            _same(
                [
                    {name: held.digest for name, held in zip(holdings, of_rank, strict=True) if held.digest}
                    for of_rank in everyone
                ]
            )
        )
        differing: dict[str, list[int]] = {}
        first_of: dict[tuple[Any, ...], str] = {}  # with many ranks it takes long to look at what each of them holds
        for (name, holding), held in zip(holdings.items(), zip(*everyone, strict=True), strict=True):
            alike = holding.box.shape, *map(id, held)
            if alike in first_of:
                self._take_as(first_of[alike], name)
                continue
            for source, box in self._sources(name, holding, held).items():
                if not box.numel:
                    self.sources.shares[source] = ()  # nobody need hold it whole: it may be cut along any dimension
                    continue
                if box == holding.box:
                    self.layout.names[source] = name
                wanted = None if box.is_whole else box
                holders = {rank: of_rank for rank, of_rank in enumerate(held) if of_rank.box == wanted}
                same = self._agree_on_source(source, box.numel, holders)
                if same and source == name:
                    first_of[alike] = name
                # What is gathered is expected to be new on rank 0.
                if not same and not holding.is_gathered:
                    giver = self.sources.shares[source][0].rank
                    differing[name] = [rank for rank in holders if held[rank].digest != held[giver].digest]
        if differing:
            refuse_or_say_differing(differing, self._synchronised_by(), self._coordinator)

    def _take_as(self, first: str, name: str) -> None:
        """Ranks hold what has this name as they do what has the `first` one, which is a source."""
        self.sources.shares[name] = self.sources.shares[first]
        self.layout.names[name] = name
        for each in (self.sources.replicas, self.sources.everywhere):
            if first in each:
                each.add(name)

    def _sources(self, name: str, holding: Holding, held: Sequence[_Told]) -> dict[str, ParameterBox]:
        """The sources of a parameter: itself, or the boxes of it that ranks hold, which are joined."""
        whole = ParameterBox.whole(holding.box.shape)
        boxes = {whole if box is None else box for box in {mine.box for mine in held}}
        if boxes == {whole} or not whole.numel:
            return {name: whole}
        sources = {f"{name}@{number}": box for number, box in enumerate(sorted(box for box in boxes if box.numel))}
        blocks: list[tuple[ParameterBox, View]] = []
        for source, box in sources.items():
            view = View.whole(Stored(box.sizes, holding.dtype, source))
            blocks += [(block, narrowed(view, within)) for block, within in box.blocks()]
        self.sources.joined[name] = join(name, sorted(blocks, key=lambda of_block: of_block[0].intervals)).node
        return sources

    def _agree_on_source(self, source: str, numel: int, held: Mapping[int, _Told]) -> bool:
        """Choose who gives `source`: the first holder, and return False, if several hold all with different values."""
        first_rank, first = next(iter(held.items()))
        same = self._shares and first.digest is not None and all(each.digest == first.digest for each in held.values())
        if len(held) == self._coordinator.world_size and all(each.is_whole for each in held.values()):
            self.sources.replicas.add(source)
            if same:
                self.sources.everywhere.add(source)
        if same or not first.is_whole:
            ranges = tuple([(each.start, each.stop, rank) for rank, each in held.items()])
            if (numel, ranges) not in self._covered:
                self._covered[numel, ranges] = cover(source, numel, ranges)
            self.sources.shares[source] = self._covered[numel, ranges]
            return True
        self.sources.shares[source] = (Share(first_rank, 0, numel),)
        return all(each.digest in (None, first.digest) for each in held.values())


def evaluated(view: View, whole: Callable[[Stored], torch.Tensor], joined: Mapping[str, Node]) -> torch.Tensor:
    """The values of `view` in host memory, from those that `whole` gives, flat, of what is stored in it.

    What is `joined` is put together first.
    """
    nodes = [node for node, _ in sources_of([view]) if isinstance(node, Stored)]
    parts = [View.whole(joined[node.name]) for node in nodes if node.name in joined]
    nodes += [node for node, _ in sources_of(parts) if isinstance(node, Stored)]
    # Ranks may gather them, and none computes before all are there.
    values = {node: whole(node) for node in dict.fromkeys(nodes) if node.name not in joined}
    stored = MemoryEvaluator(lambda node: values[node] if node in values else joined[node.name])
    return stored.materialise(view).contiguous()


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


def cover(name: str, numel: int, held: Iterable[tuple[int, int, int]]) -> tuple[Share, ...]:
    """Shares that cover a parameter of `numel` elements, with no overlap; `held` are starts, stops, and ranks."""
    shares: list[Share] = []
    position = 0
    for start, stop, rank in sorted(own for own in held if own[0] < own[1]):
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


def digest_of_names(holdings: Mapping[str, Holding]) -> bytes:
    """A digest of the names and shapes of parameters."""
    return hashlib.sha256(repr([(name, each.box.shape) for name, each in holdings.items()]).encode()).digest()


def refuse_differing(digests: Sequence[bytes], found: str) -> None:
    """Raise a SaveError if the digests of all ranks differ; `found` says in which case they do."""
    if different := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
        raise SaveError(f"Rank(s) {different} {found} than rank 0: the model must be the same on every rank.")


def wrapper_of(model: nn.Module) -> str:
    """The class of what has made the replicas of `model` equal, or of a model around it; "" if nothing has.

    AutoTP does not: ranks of tensor parallelism train what is not cut each for itself, and it may drift apart.
    """
    if any(map(is_cut, parameters(model))):
        return ""
    ddp = nn.parallel.DistributedDataParallel
    engine = getattr(sys.modules.get("deepspeed.runtime.engine"), "DeepSpeedEngine", ddp)
    around = (each for each in instances_of(engine, ddp) if any(module is model for module in each.modules()))
    return next((type(each).__name__ for each in around), "")


def refuse_or_say_differing(
    differing: Mapping[str, Sequence[int]], synchronised_by: str, coordinator: Coordinator
) -> None:
    """Raise an UnsupportedError on all ranks if what is `synchronised_by` something differs; else rank 0 warns.

    Args:
        differing: the ranks whose values of a parameter are not those of the first rank that holds all of it.
        synchronised_by: what keeps the values equal; "" if nothing does, as before a training.
    """
    ranks = "; ".join(f"{name} (rank {', '.join(map(str, others))})" for name, others in [*differing.items()][:8])
    if wrapper := next(filter(None, coordinator.all_gather(synchronised_by)), ""):
        raise UnsupportedError(
            f"Expected the same values of a parameter on all ranks that hold it, as {wrapper} keeps them; found "
            f"others than on the first of these ranks for {len(differing)} parameter(s): {ranks}. Do ranks hold parts "
            "of a model without saying so, or has code changed values on some of them?"
        )
    if coordinator.is_main:
        logger.warning(
            f"Ranks have different values for {len(differing)} parameter(s), each of which they hold in full: "
            f"{ranks}. Nothing keeps them equal: neither a DeepSpeed engine without AutoTP nor "
            "DistributedDataParallel. A module that was made without a common seed, for instance. Those of the first "
            "rank that holds them (rank 0) are saved."
        )
