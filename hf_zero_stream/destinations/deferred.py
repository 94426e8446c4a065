"""Parameters that stay lazy when ``from_pretrained`` returns, and parameters that turn real where they are."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..checkpoint.lazy import LazyTensor, copy_attributes
from ..checkpoint.nodes import View, WritableParameter
from ..holdings.holding import LocalShard
from ..planning.plan import Target
from ..ranks.coordinator import Coordinator
from .base import (
    Batch,
    Destination,
    Item,
    SourcedTensor,
    WholeReader,
    allocating,
    flat_items,
    host_buffer,
    item_of,
    replace_lazy,
)
from .exchange import replica_batches
from .initialise import run_with_touched_parameters


class Deferred(Destination):
    """Fills buffers only. Parameters that the checkpoint has stay lazy; those that it lacks are whole on every rank.

    Args:
        reader: reads the values of a lazy parameter that is used before it is filled.
        complete: called with the model that the user gets.
        until: when they will be filled, for the report.
        packing_unsupported_reason: why weights may not be packed; "" if they may.
    """

    leaves_lazy = True

    def __init__(
        self, reader: WholeReader, complete: Callable[[nn.Module], None], until: str, packing_unsupported_reason: str
    ) -> None:
        self.into, self.until = f"lazy tensors, which are read when {until}", until
        self.packing_unsupported_reason = packing_unsupported_reason
        self.takes_packed = not packing_unsupported_reason
        self._reader = reader
        self._complete = complete

    def batches(
        self, model: nn.Module, missing: set[str], tied: set[str], *, only_planned: bool = False
    ) -> list[Batch]:
        def parameter(name: str, old: torch.Tensor) -> nn.Parameter | None:
            if not isinstance(old, LazyTensor):
                return None
            view = old.view_of_node
            if view.node.joint_batches:
                lazy = LazyTensor.of(view, self._reader)
            else:
                lazy = LazyTensor.whole(WritableParameter.of(view), self._reader)
            return nn.Parameter(lazy, requires_grad=old.requires_grad)

        _, buffers, _ = replace_lazy(model, missing, tied, parameter=parameter, buffer=host_buffer)
        return [Batch(flat_items(buffers))]

    def initialise(self, initialise: Callable[[], None], module: nn.Module) -> None:
        run_with_touched_parameters(initialise, module, lambda value: isinstance(value, LazyTensor), _fetched)

    def complete(self, model: nn.Module) -> None:
        self._complete(model)


@contextmanager
def _fetched(params: Sequence[Any]) -> Iterator[None]:
    """Give lazy `params` values, inside; afterwards those that were changed keep them."""
    originals = [nn.Parameter(param.detach(), requires_grad=param.requires_grad) for param in params]
    values = [param.materialise() for param in params]
    for param, value, original in zip(params, values, originals, strict=True):
        copy_attributes(param, original)
        param.become(value.clone())
    changed = True
    try:
        yield
        changed = False
    finally:
        for param, value, original in zip(params, values, originals, strict=True):
            if changed or torch.equal(param, value):
                torch.utils.swap_tensors(param, original)


class InPlace(Destination):
    """The lazy parameters that `reader` reads. Each becomes a real one of all its values, on its device.

    They stay the same objects, to which optimizers may refer.

    Args:
        replicated: names of parameters that are the same on all ranks, which read them for each other.
        chunk_bytes: size of one exchange of these.
        shard_of: the local shard that a parameter which is not `replicated` is, for the digest; None: not known, or
            whole.
    """

    into = "a model that is used before it is sharded"

    exchange_settings: Sequence[str] = ("staging_bytes",)

    leaves_lazy = True  # those of other readers

    def __init__(
        self,
        reader: WholeReader,
        coordinator: Coordinator,
        device: torch.device,
        replicated: Collection[str] = (),
        chunk_bytes: int = 0,
        shard_of: Callable[[str, torch.Tensor], LocalShard | None] = lambda name, param: None,
    ) -> None:
        self.device = device
        self._replicated = replicated
        self._chunk_bytes = chunk_bytes
        self._shard_of = shard_of
        self._reader = reader
        self._coordinator = coordinator
        self._values: list[tuple[LazyTensor, torch.Tensor | None]] = []
        self._memory: dict[WritableParameter, torch.Tensor] = {}

    def batches(
        self, model: nn.Module, missing: set[str], tied: set[str], *, only_planned: bool = False
    ) -> list[Batch]:
        filled: dict[str, SourcedTensor] = {}
        for name, param in model.named_parameters():
            if not isinstance(param, LazyTensor) or param.reader is not self._reader:
                continue
            node, view = param.node, param.view_of_node
            if isinstance(node, WritableParameter):
                self._values.append((param, None))
                if node.memory is not None or node in self._memory:
                    continue
                view = View.whole(node.unwritten)
            with allocating(name, param.nbytes, param.device, self._coordinator.rank):
                values = torch.empty(view.sizes, dtype=param.dtype, device=param.device)
            if isinstance(node, WritableParameter):
                self._memory[node] = values.view(-1)
            else:
                self._values.append((param, values))
            filled[name] = (values.view(-1), view)
        shared = {name: filled.pop(name) for name in list(filled) if name in self._replicated}
        exchanged = replica_batches(shared, self._coordinator, self._chunk_bytes) if shared else []
        return [Batch([self._item(model, name, *sourced) for name, sourced in filled.items()]), *exchanged]

    def _item(self, model: nn.Module, name: str, flat: torch.Tensor, view: View) -> Item:
        shard = self._shard_of(name, model.get_parameter(name))
        if shard is None or shard.box.numel != flat.numel():
            return item_of(Target.whole(name, flat.dtype, flat.numel()), view, flat)
        return item_of(shard.target(name, flat.dtype), view, flat)

    def complete(self, model: nn.Module) -> None:
        for node, memory in self._memory.items():
            node.memory = memory
        for param, values in self._values:
            param.become(param.in_memory() if values is None else values)
        self._values, self._memory = [], {}
