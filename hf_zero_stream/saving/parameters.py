"""The parameters that are being saved: who gives which elements, and the values that this rank holds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ..accelerators import collective_device
from ..checkpoint.lazy import LazyTensor
from ..checkpoint.nodes import HostTensor, Node, Stored, View, sources_of
from ..destinations.base import narrowed
from ..engine.compute import MemoryEvaluator
from ..errors import SaveError
from ..holdings.holding import Holding
from ..holdings.introspection import has_converted_experts
from ..planning.boxes import ParameterBox
from ..ranks.coordinator import Coordinator
from .lazy_parameters import Held, LazyParameters, digests_of, holdings_of_model
from .plan import Share, Sources
from .shares import cover, digest_of_names, join, refuse_differing, refuse_or_say_differing, wrapper_of


class _Held(NamedTuple):
    """A holding as a rank tells the others of it; no `box` is the whole parameter, no `digest` is not compared."""

    box: ParameterBox | None
    start: int
    stop: int
    is_whole: bool
    digest: bytes | None


Digests = Mapping[str, bytes]
"""Digests of the parameters of which a rank holds all of a box, by name."""


@dataclass(frozen=True)
class Layout:
    """How ranks hold something between them: all that a plan to save it depends on, and none of the values.

    Attributes:
        held: what this rank holds, by name.
        names: the parameter that each of this rank's sources is, or is a part of.
        same: by the name of a parameter of which ranks hold all of a box: for each rank, the first one that has the
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
    """All parameters of a model, as ranks hold them between them, or something else that they hold for parameters.

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
        wanted: Sequence[tuple[Layout, Callable[[], Mapping[str, Holding]]]],
        coordinator: Coordinator,
        compares: bool,
        threads: int,
    ) -> list[Parameters | None]:
        """For each of `wanted`, a layout and what is held now: None if any rank holds it otherwise (all ranks).

        For `compares` and `threads` see :class:`NewParameters`.
        """

        def digests(layout: Layout, holdings: Mapping[str, Holding]) -> Digests | None:
            if _held_by(holdings) != layout.held:
                return None
            return digests_of([holdings], threads) if compares else {}

        with coordinator.reporting():
            held = [(layout, holdings()) for layout, holdings in wanted]
            mine = [digests(*each) for each in held]
        found: list[Parameters | None] = []
        for (layout, holdings), of_ranks in zip(held, zip(*coordinator.all_gather(mine), strict=True), strict=True):
            known = [each for each in of_ranks if each is not None]
            follows = len(known) == len(of_ranks) and _same(known) == layout.same
            if follows:
                layout.copy_again()
            found.append(cls(coordinator, holdings, layout) if follows else None)
        return found

    def gather(self, view: View) -> torch.Tensor:
        """The values of `view`, gathered in host memory, where no ranges give them (all ranks, in the same order)."""
        self.gathered |= _names_in([view])
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
    """Parameters whose layout is not known yet, saved in `dtype` or as they are held (all ranks).

    If `held` is given, it is saved under the names of the parameters, and nothing else is. What is `beside` it has the
    same layout: :attr:`beside` is that, with other values. If several ranks hold all of a parameter, `threads` compare
    all of these values if `compares` is true, and equal ones are given by all of these ranks, each a share; without
    `shares`, or without a comparison, the first of them gives them. In a state of a training (`is_state`) they must be
    equal.
    """

    def __init__(
        self,
        model: nn.Module,
        coordinator: Coordinator,
        dtype: torch.dtype | None,
        *,
        compares: bool,
        threads: int,
        held: Held | None = None,
        beside: Sequence[Held] = (),
        is_state: bool = False,
        shares: bool = True,
    ) -> None:
        with coordinator.reporting():
            self._lazy = LazyParameters(model, coordinator, dtype, self.gather, held)
            others = [holdings_of_model(model, coordinator, dtype, other) for other in beside]
        holdings = self._lazy.holdings
        self._model, self._names = model, holdings.keys()
        self._is_held = held is not None
        self._offered: set[str] = set()
        self.numel = sum(prod(holding.box.shape) for holding in holdings.values())
        self._shares = shares
        self._synchronised_by = partial(wrapper_of, model) if not is_state else lambda: "a training"
        super().__init__(coordinator, {}, Layout(_held_by(holdings), copies=self._lazy.copies))
        self._covered: dict[tuple[int, tuple[tuple[int, int, int], ...]], tuple[Share, ...]] = {}
        """Ranks hold parameters of one size alike, which then have the same shares: a large world has many of them."""
        with coordinator.reporting():
            digests = digests_of([holdings, *others], threads) if compares else {}
        self._agree_on_shares(holdings, digests)
        self.holdings = {source: holdings[name] for source, name in self.layout.names.items()}
        self.beside = [Parameters(coordinator, other, self.layout) for other in others]

    def entries(self, given: Mapping[str, Any] | None = None, *, buffers: Collection[str] = ()) -> dict[str, Any]:
        """``model.state_dict()``, or what is `given`, with lazy tensors whose values all ranks can gather together.

        Beside what is held in place of values there are `buffers`, by the names of the state dict.
        """
        if given is None:
            return self._offering(self._lazy.state_dict(buffers=buffers))
        entries: dict[str, Any] = {}
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
        return self._offering(entries)

    def own_entries(self, *, buffers: Collection[str] = ()) -> dict[str, Any]:
        """Give :meth:`entries` by own names; of the names of a tied parameter, the first one only."""
        entries = self._lazy.state_dict(keeps_adapters=False, buffers=buffers)
        tied = self._lazy.by_name.keys() - self._names
        return self._offering({name: entry for name, entry in entries.items() if name not in tied})

    @property
    def own_names(self) -> set[str]:
        """The names by which a load looks for what is held; those of converted experts are made anew."""
        return set() if has_converted_experts(self._model) or not self._is_held else {*self._names}

    def _offering(self, entries: dict[str, Any]) -> dict[str, Any]:
        self._offered |= _names_in(entry.view_of_node for entry in entries.values() if isinstance(entry, LazyTensor))
        return entries

    @property
    def expected(self) -> set[str]:
        """The own names of what must be saved: all that is held in place of values, else what entries have had."""
        return ({*self._names} if self._is_held else self._offered) - self.gathered

    def _agree_on_shares(self, holdings: Mapping[str, Holding], digests: Digests) -> None:
        mine = [
            _Held(None if each.box.is_whole else each.box, each.start, each.stop, each.is_whole, digests.get(name))
            for name, each in holdings.items()
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
        for (name, holding), held in zip(holdings.items(), zip(*everyone, strict=True), strict=True):
            for source, box in self._sources(name, holding, held).items():
                if not box.numel:
                    self.sources.shares[source] = ()  # nobody need hold it whole: it may be cut along any dimension
                    continue
                if box == holding.box:
                    self.layout.names[source] = name
                wanted = None if box.is_whole else box
                holders = {rank: of_rank for rank, of_rank in enumerate(held) if of_rank.box == wanted}
                same = self._agree_on_source(source, box.numel, holders)
                # What is gathered is expected to be new on rank 0.
                if not same and not holding.is_gathered:
                    giver = self.sources.shares[source][0].rank
                    differing[name] = [rank for rank in holders if held[rank].digest != held[giver].digest]
        if differing:
            refuse_or_say_differing(differing, self._synchronised_by(), self._coordinator)

    def _sources(self, name: str, holding: Holding, held: Sequence[_Held]) -> dict[str, ParameterBox]:
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

    def _agree_on_source(self, source: str, numel: int, held: Mapping[int, _Held]) -> bool:
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


def _names_in(views: Iterable[View]) -> set[str]:
    """The own names of the parameters that `views` come from."""
    return {node.name for node, _ in sources_of(views) if isinstance(node, Stored)}


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
