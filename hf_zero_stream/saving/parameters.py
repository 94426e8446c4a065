"""The parameters that are being saved: who gives which elements, and the values that this rank holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map
from transformers.utils import logging

from ..checkpoint.lazy import LazyTensor
from ..checkpoint.nodes import HostTensor, Node, Stored, View
from ..destinations.deepspeed.original_experts import with_original_experts
from ..destinations.holding import Holding
from ..engine.compute import Evaluator
from ..engine.workers import run_in_threads
from ..errors import SaveError
from ..ranks.coordinator import Coordinator
from ..ranks.messages import collective_device
from ..sources.local import LocalFiles
from .digest import digest
from .plan import Share, view_of


__all__ = ["Opened", "Parameters", "cover", "lazy_parameters", "lazy_state_dict", "opened"]

logger = logging.get_logger(__name__)


class Parameters:
    """All parameters of a model, as ranks hold them between them. Made by all ranks together.

    Args:
        holdings: what this rank holds, by name; names of one tied parameter have one and the same.
        coordinator: the ranks that save together.
        dtype: what those of floating point are saved in; default: as they are held.
        single_writer: rank 0 gives what every rank holds.
        threads: how many threads compare replicas.

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
        threads: int = 1,
    ) -> None:
        self._coordinator = coordinator
        self.lazy = lazy_parameters(holdings, self.gather, dtype)
        """A lazy tensor for each name; names of one parameter have one and the same."""
        self.holdings = {name: holdings[name] for name in _first_names(holdings).values()}
        """What this rank holds, by the first name of each parameter."""
        self.everywhere: set[str] = set()
        """Parameters that every rank holds in full, with the same values; none if rank 0 gives them anyway."""
        self.shares: dict[str, tuple[Share, ...]] = {}
        """Who gives which elements, by the first name of each parameter."""
        self._agree_on_shares(single_writer, threads)

    def _agree_on_shares(self, single_writer: bool, threads: int) -> None:
        compared = not single_writer and not self._coordinator.is_alone
        digests = self._coordinator.run_on_all(lambda: self._digests(threads) if compared else {})
        everyone = self._coordinator.all_gather(
            [
                (holding.start, holding.stop, holding.is_whole, digests.get(name))
                for name, holding in self.holdings.items()
            ]
        )
        different = [rank for rank, of_rank in enumerate(everyone) if len(of_rank) != len(self.holdings)]
        if different:
            raise SaveError(
                f"Rank(s) {different} have another number of parameters than this one ({len(self.holdings)}): the "
                "model must be the same on every rank."
            )
        differing: list[str] = []
        for position, (name, holding) in enumerate(self.holdings.items()):
            held = [of_rank[position] for of_rank in everyone]
            _, _, rank_0_is_whole, rank_0_digest = held[0]
            same = compared and all(is_whole and found == rank_0_digest for _, _, is_whole, found in held)
            if same:
                self.everywhere.add(name)
            numel = holding.shape.numel()
            if same or not rank_0_is_whole or not numel:
                self.shares[name] = cover(name, numel, [(start, stop) for start, stop, *_ in held])
                continue
            self.shares[name] = (Share(0, 0, numel),)
            # What is gathered is expected to be new on rank 0.
            if not holding.is_gathered and any(found not in (None, rank_0_digest) for *_, found in held):
                differing.append(name)
        if differing and self._coordinator.is_main:
            logger.warning(
                f"Ranks have different values for {', '.join(differing[:8])} ({len(differing)} parameter(s)), which "
                "each of them holds in full. Those of rank 0 are saved."
            )

    def _digests(self, threads: int) -> dict[str, bytes]:
        """What tells whether other ranks have the same values, for each parameter that this rank holds in full."""
        digests: dict[str, bytes] = {}

        def work(names: Iterator[str]) -> None:
            for name in names:
                with self.holdings[name].open() as values:
                    digests[name] = digest(values)

        run_in_threads([name for name, holding in self.holdings.items() if holding.is_whole], work, threads)
        return digests

    def gather(self, view: View) -> torch.Tensor:
        """The values of `view` in host memory, on every rank; its parameters are gathered in full for it.

        The last resort, for functions that cannot be turned into ranges. All ranks must call it in the same order.
        """
        evaluator = Evaluator(LocalFiles(), request_bytes=1, seek_bytes=0, staging_bytes=64 * 2**20)
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
        if name in self.everywhere:
            with holding.open() as values:
                return values.cpu()
        full = torch.empty(holding.shape.numel(), dtype=holding.dtype, device=collective_device())
        with holding.open() as values:
            for share in self.shares[name]:
                part = full[share.start : share.stop]
                if share.rank == self._coordinator.rank:
                    part.copy_(values[share.start - holding.first :][: len(part)])
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
        return _in_dtype(LazyTensor.of(View.whole(node, tuple(holding.shape)), materialise), dtype)

    by_parameter = {number: lazy(name, holdings[name]) for number, name in _first_names(holdings).items()}
    return {name: by_parameter[id(holding)] for name, holding in holdings.items()}


def lazy_state_dict(
    model: nn.Module,
    parameters: Mapping[str, torch.Tensor],
    materialise: Callable[[View], torch.Tensor],
    dtype: torch.dtype | None = None,
) -> dict[str, Any]:
    """``model.state_dict()`` with lazy tensors: `parameters`, and buffers in `dtype` if they are of floating point."""
    memories: dict[Any, HostTensor] = {}

    def lazy(name: str, value: Any) -> Any:
        if name in parameters or not isinstance(value, torch.Tensor):
            return parameters.get(name, value)
        # A buffer is everyone's, and rank 0's values are written.
        return _in_dtype(LazyTensor.of(view_of(value, memories), materialise), dtype)

    entries = {name: lazy(name, value) for name, value in model.state_dict().items()}
    return with_original_experts(model, entries, parameters)


def _in_dtype(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
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
        return self._values[name], self._holdings[name].first

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
