"""The parameters that are being saved: who gives which elements, and the values that this rank holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

from ..checkpoint.lazy import LazyTensor
from ..checkpoint.nodes import HostTensor, Node, Stored, View
from ..checkpoint.source import ShardFiles
from ..coordination import Coordinator
from ..engine.compute import Evaluator
from ..errors import SaveError
from ..messages import collective_device
from ..partition.stored import Holding
from .plan import Share


__all__ = ["Opened", "Parameters", "cover", "in_dtype", "lazy_parameters", "opened"]


class Parameters:
    """All parameters of a model, as ranks hold them between them. Made by all ranks together.

    Args:
        holdings: what this rank holds, by name; names of one tied parameter have one and the same.
        coordinator: the ranks that save together.
        dtype: what those of floating point are saved in; default: as they are held.
        single_writer: rank 0 gives what every rank holds.

    Raises:
        SaveError: on all ranks, if elements of a parameter are held by nobody.
    """

    def __init__(
        self,
        holdings: Mapping[str, Holding],
        coordinator: Coordinator,
        *,
        dtype: torch.dtype | None,
        single_writer: bool,
    ) -> None:
        self._coordinator = coordinator
        self.lazy = lazy_parameters(holdings, self.gather, dtype)
        """A lazy tensor for each name; names of one parameter have one and the same."""
        self.holdings = {name: holdings[name] for name in _first_names(holdings).values()}
        """What this rank holds, by the first name of each parameter."""
        self.shares = self._agree_on_shares(single_writer)
        """Who gives which elements, by the first name of each parameter."""

    def _agree_on_shares(self, single_writer: bool) -> dict[str, tuple[Share, ...]]:
        def given(holding: Holding) -> tuple[int, int]:
            if single_writer and holding.everywhere:
                return 0, holding.shape.numel() if self._coordinator.is_main else 0
            return holding.start, holding.stop

        everyone = self._coordinator.exchange([given(holding) for holding in self.holdings.values()])
        return {
            name: cover(name, holding.shape.numel(), [of_rank[position] for of_rank in everyone])
            for position, (name, holding) in enumerate(self.holdings.items())
        }

    def gather(self, view: View) -> torch.Tensor:
        """The values of `view` in host memory, on every rank; its parameters are gathered in full for it.

        The last resort, for functions that cannot be turned into ranges. All ranks must call it in the same order.
        """
        evaluator = Evaluator(ShardFiles(()), (), request_bytes=1, seek_bytes=0, staging_bytes=64 * 2**20)
        return evaluator.materialise(self._with_values(view, {}))

    def _with_values(self, value: Any, done: dict[int, Node]) -> Any:
        """`value`, if it is a view, with every parameter that it depends on replaced by its values."""
        if not isinstance(value, View):
            return value
        node = value.node
        if id(node) not in done:
            if isinstance(node, Stored):
                done[id(node)] = HostTensor(node.numel, node.dtype, self._full(node.name))
            else:
                changes = {
                    field.name: tree_map(lambda inner: self._with_values(inner, done), getattr(node, field.name))
                    for field in dataclasses.fields(node)
                    if field.init
                }
                done[id(node)] = dataclasses.replace(node, **changes)
        return dataclasses.replace(value, node=done[id(node)])

    def _full(self, name: str) -> torch.Tensor:
        holding = self.holdings[name]
        if holding.everywhere:
            with holding.open() as values:
                return values.cpu()
        full = torch.empty(holding.shape.numel(), dtype=holding.dtype, device=collective_device())
        with holding.open() as values:
            for share in self.shares[name]:
                part = full[share.start : share.stop]
                if share.rank == self._coordinator.rank:
                    part.copy_(values[share.start - holding.start :][: len(part)])
                if not self._coordinator.is_alone:
                    self._coordinator.wait(dist.broadcast(part.view(torch.uint8), share.rank, async_op=True))
        return full.cpu()


def lazy_parameters(
    holdings: Mapping[str, Holding], materialise: Callable[[View], torch.Tensor], dtype: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """A lazy tensor for each name, cast to `dtype` if it is of floating point.

    Names of one parameter have the same lazy tensor, also if it is a cast: transformers must see that they are tied.
    """

    def lazy(name: str, holding: Holding) -> torch.Tensor:
        node = Stored(holding.shape.numel(), holding.dtype, name)
        return in_dtype(LazyTensor.of(View.whole(node, tuple(holding.shape)), materialise), dtype)

    by_parameter = {number: lazy(name, holdings[name]) for number, name in _first_names(holdings).items()}
    return {name: by_parameter[id(holding)] for name, holding in holdings.items()}


def in_dtype(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """`tensor`, cast if it is of floating point and a dtype is asked for."""
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _first_names(holdings: Mapping[str, Holding]) -> dict[int, str]:
    first_names: dict[int, str] = {}
    for name, holding in holdings.items():
        first_names.setdefault(id(holding), name)
    return first_names


def cover(name: str, numel: int, held: Sequence[tuple[int, int]]) -> tuple[Share, ...]:
    """Shares that cover a parameter of `numel` elements, chosen from what each rank holds, with no overlap."""
    shares: list[Share] = []
    position = 0
    by_start = sorted((start, -stop, rank) for rank, (start, stop) in enumerate(held) if start < stop)
    for start, minus_stop, rank in by_start:
        if start > position:
            break
        if -minus_stop > position:
            shares.append(Share(rank, position, -minus_stop))
            position = -minus_stop
    if position < numel:
        raise SaveError(
            f"{name}: expected that the ranks hold all {numel} elements between them; nobody holds number {position}. "
            "Save from all ranks of the job, with the same model on each."
        )
    return tuple(shares)


class Opened:
    """The values of the parameters that are being worked on; those that come from swap files are closed in between."""

    def __init__(self, holdings: Mapping[str, Holding]) -> None:
        self._holdings = holdings
        self._contexts: dict[str, AbstractContextManager[torch.Tensor]] = {}
        self._values: dict[str, torch.Tensor] = {}

    def values(self, name: str) -> tuple[torch.Tensor, int]:
        """The flat values of a parameter that this rank holds, and the number of the first; until the next call."""
        if name not in self._values:
            if self._holdings[name].is_swapped:
                self._close_swapped()
            context = self._holdings[name].open()
            self._values[name] = context.__enter__()
            self._contexts[name] = context
        holding = self._holdings[name]
        return self._values[name], 0 if holding.everywhere else holding.start

    def _close_swapped(self) -> None:
        """Give back the memory of values that come from swap files."""
        for name in [name for name in self._values if self._holdings[name].is_swapped]:
            del self._values[name]
            self._contexts.pop(name).__exit__(None, None, None)

    def close(self) -> None:
        """Give back everything."""
        self._values.clear()
        while self._contexts:
            _, context = self._contexts.popitem()
            context.__exit__(None, None, None)


@contextmanager
def opened(holdings: Mapping[str, Holding]) -> Iterator[Opened]:
    """Values of `holdings`, all closed at the end."""
    values = Opened(holdings)
    try:
        yield values
    finally:
        values.close()
