"""A load allocates, and then fills: the memory that this rank has for each tensor, and the view that gives its values.

All destinations meet here. Those of new models put empty parameters in the place of lazy ones: whole or shards
(:mod:`.parallel`), or such as will be partitions (:mod:`.deepspeed.partitioned`). Others find the memory, in a model
in use (:mod:`.live`). What a rank holds of a parameter is said by :func:`..holdings.fsdp.shard_of`, as for saves.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..checkpoint.lazy import LazyTensor, copy_attributes
from ..checkpoint.nodes import Node, View
from ..errors import LoadError
from ..holdings.holding import LocalShard
from ..planning.boxes import ParameterBox
from ..planning.plan import Target
from ..ranks.coordinator import Coordinator
from ..registry import import_object
from ..settings.config import StreamingConfig
from .base import Batch, Destination, Item, SourcedTensor, narrowed, source_of


if TYPE_CHECKING:
    from .exchange import Sharing


Memory = Callable[[], torch.Tensor]


def chunk_bytes(config: StreamingConfig, device: torch.device) -> int:
    """Bytes of one exchange, of all ranks together: four times the staging on a device, because each has a meeting."""
    return config.staging_on(device.type) * (1 if device.type == "cpu" else 4)


def itself(tensor: torch.Tensor) -> torch.Tensor:
    """What is made of memory that is there already a function that gives it."""
    return tensor


def item_in(shard: LocalShard, name: str, view: View, dtype: torch.dtype, memory: Memory) -> Item:
    """The item that fills `memory`, of this `shard` of parameter `name`, from a `view` of all of it, or of its box."""
    if view.sizes == shard.box.shape:
        view = view if shard.box.is_whole else narrowed(view, shard.box)
    elif shard.part is not None:  # a conversion has cut it, and perhaps has given it another shape
        shard = shard._replace(box=ParameterBox.whole(view.sizes))
    return Item(shard.target(name, dtype), view, memory)


class Targets:
    """What one load fills, tensor by tensor, and the batches in which it does.

    Args:
        sharing: takes what ranks read together; None: each reads all that it holds.
        device: where ranks compute together what they compute together.

    Attributes:
        alone: what this rank reads for itself alone.
        after: batches that come when that is filled, and what ranks read or compute together.
    """

    def __init__(
        self, coordinator: Coordinator, sharing: Sharing | None = None, device: torch.device = torch.device("cpu")
    ) -> None:
        self._coordinator, self._sharing, self._device = coordinator, sharing, device
        self.alone: list[Item] = []
        self.after: list[Batch] = []
        self._joint: list[tuple[str, Node, Callable[[torch.Tensor], None]]] = []
        self._scattered: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._comparisons: list[Batch] = []

    def add(
        self,
        name: str,
        flat: torch.Tensor,
        view: View,
        shard: LocalShard,
        param: Any = None,
        record: Any = None,
    ) -> None:
        """Fill the `flat` memory of this rank's `shard` of parameter `name`, of which `view` gives the values.

        Args:
            param: the parameter, if other ranks may read some of it for this one.
            record: FSDP2's of it, if there is one.
        """
        sharing = None if param is None or view.node.joint_batches else self._sharing
        if sharing is None or not sharing.takes(name, flat, view, shard, param, record):
            self.add_later(name, partial(itself, flat), flat.dtype, view, shard)

    def add_later(self, name: str, memory: Memory, dtype: torch.dtype, view: View, shard: LocalShard) -> None:
        """As :meth:`add`, with memory of this `dtype` that is there once the load has begun to read."""
        if view.node.joint_batches:
            self._joint.append((name, view.node, partial(_take_own_part, shard, memory)))
        else:
            self.alone.append(item_in(shard, name, view, dtype, memory))

    def add_buffers(self, buffers: Mapping[str, SourcedTensor]) -> None:
        """Fill `buffers`, which each rank has, and reads by itself."""
        for name, (buffer, view) in buffers.items():
            flat = self.flat(name, buffer)
            self.alone.append(Item(Target.whole(name, flat.dtype, flat.numel()), view, partial(itself, flat)))

    def flat(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The memory of `tensor`, flat; if its elements do not lie one after the other, memory that is copied to it.

        It is copied when all is read. Raises a LoadError then if elements that are one in memory (``expand``) were to
        get different values.
        """
        tensor = tensor.detach()
        if tensor.is_contiguous():
            return tensor.view(-1)
        values = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        self._scattered.append((name, tensor, values))
        return values.view(-1)

    def copy(self, to: torch.Tensor, values: torch.Tensor) -> None:
        """Copy `values` to another tensor when all is read."""
        self._copies.append((to, values))

    def compare(self, name: str, local: torch.Tensor, view: View, shard: LocalShard) -> None:
        """Read the other end of a tie into memory of its own, and compare it with what `local` has by then."""
        values: list[torch.Tensor] = []

        def begin() -> None:
            values.append(torch.empty(local.numel(), dtype=local.dtype, device=local.device))

        def compare() -> None:
            if not torch.equal(values.pop().view(torch.uint8), local.contiguous().view(-1).view(torch.uint8)):
                raise LoadError(
                    f"load_into: the model has {name} tied to another parameter, and the checkpoint has other values "
                    "for each. Load it anew with from_pretrained, or untie them (tie_word_embeddings=False)."
                )

        item = item_in(shard, f"{name} (tied)", view, local.dtype, lambda: values[-1])
        item = item._replace(target=replace(item.target, is_copy=True))
        self._comparisons.append(Batch([item], begin=begin, finish=compare, is_temporary=True))

    def batches(self) -> list[Batch]:
        """All batches: those that are collective are the same on all ranks."""
        found = [Batch(self.alone), *([] if self._sharing is None else self._sharing.batches())]
        if self._joint:
            found += import_object(self._joint[0][1].joint_batches)(self._joint, self._coordinator, self._device)
        found += self.after
        if self._scattered or self._copies:
            found.append(Batch([], finish=self._copy))
        return found + self._comparisons

    def _copy(self) -> None:
        for name, tensor, values in self._scattered:
            # Torch writes nothing into what is expanded; its first row is all that has memory.
            rows = tuple(slice(0, 1 if stride == 0 else None) for stride in tensor.stride())
            tensor[rows].copy_(values[rows])
            if not torch.equal(tensor.contiguous().view(-1).view(torch.uint8), values.view(-1).view(torch.uint8)):
                raise LoadError(
                    f"load_into: the model's {name} is expanded: its strides are {tensor.stride()}, and some of its "
                    "elements are one in memory. The checkpoint has different values for them. Clone it first."
                )
        for to, values in self._copies:
            to.data.copy_(values)


def _take_own_part(shard: LocalShard, memory: Memory, row: torch.Tensor) -> None:
    """Copy this rank's elements of `row`, all of a flat parameter's, into the memory of its shard."""
    (((first, _),),) = shard.box.intervals
    target = shard.target("", row.dtype)
    memory()[: target.stop - target.start].copy_(row[first + target.start : first + target.stop])


def allocate(
    model: nn.Module,
    missing: set[str],
    tied: set[str],
    *,
    parameter: Callable[[str, torch.Tensor], nn.Parameter | None],
    buffer: Callable[[torch.Tensor], torch.Tensor | None],
) -> tuple[dict[str, SourcedTensor], dict[str, SourcedTensor], list[str]]:
    """Replace the parameters and buffers of `model`, except `tied` names; a `missing` one has no source.

    `parameter` makes the new parameter of this name, `buffer` the new buffer; None leaves the old one.
    Returns the new parameters and the new buffers that have a source, and the parameters with a new dtype.
    """
    parameters: dict[str, SourcedTensor] = {}
    buffers: dict[str, SourcedTensor] = {}
    recast: list[str] = []
    replaced: dict[int, nn.Parameter] = {}
    for prefix, module in model.named_modules():
        for key, param in list(module._parameters.items()):
            name = f"{prefix}.{key}" if prefix else key
            if param is None or name in tied:
                continue
            if id(param) in replaced:
                setattr(module, key, replaced[id(param)])
                continue
            new = parameter(name, param)
            if new is None:
                continue
            replaced[id(param)] = new
            setattr(module, key, new)  # as transformers does: a recurrent layer keeps its weights in a list, too
            copy_attributes(param, new)
            if isinstance(param, LazyTensor) and param.dtype != new.dtype:
                recast.append(name)
            view = None if name in missing else source_of(param)
            if view is not None:
                parameters[name] = (new, view)
        for key, old in module._buffers.items():
            name = f"{prefix}.{key}" if prefix else key
            real = None if old is None else buffer(old)
            if old is None or real is None:
                continue
            module._buffers[key] = real
            if isinstance(old, LazyTensor) or old.is_meta:
                copy_attributes(old, real)
                view = source_of(old)
                if view is not None:
                    buffers[name] = (real, view)
    return parameters, buffers, recast


class NewModel(Destination):
    """The memory of a new model; of what is not said otherwise, all of it on the host, read by each rank."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    def batches(self, model: nn.Module, missing: set[str], tied: set[str]) -> list[Batch]:
        parameters, buffers, self.recast = allocate(
            model, missing, tied, parameter=self._parameter, buffer=self._buffer
        )
        targets = self._new_targets()
        for name, (param, view) in parameters.items():
            self._fill(targets, name, param, view)
        targets.add_buffers(buffers)
        self._fill_rest(targets, model)
        return targets.batches()

    @abstractmethod
    def _parameter(self, name: str, old: torch.Tensor) -> nn.Parameter | None:
        """The parameter in the place of `old`; None: it stays."""

    def _buffer(self, old: torch.Tensor) -> torch.Tensor | None:
        """Memory for a lazy buffer; transformers itself makes it for other buffers."""
        return torch.empty(old.shape, dtype=old.dtype) if isinstance(old, LazyTensor) else None

    def _new_targets(self) -> Targets:
        return Targets(self._coordinator)

    def _fill(self, targets: Targets, name: str, param: Any, view: View) -> None:
        """Have a new parameter filled; here it stays as it is."""
        return

    def _fill_rest(self, targets: Targets, model: nn.Module) -> None:
        """Add what is known once all parameters of `model` are new."""
        return


def buffer_on(device: torch.device, old: torch.Tensor) -> torch.Tensor:
    """A buffer like `old` on `device`."""
    if isinstance(old, LazyTensor) or old.is_meta:
        return torch.empty(old.shape, dtype=old.dtype, device=device)
    return old.to(device)


def requires_grad(old: torch.Tensor) -> bool:
    """Whether the parameter in the place of `old` requires gradients.

    transformers gives a parameter that the checkpoint lacks a gradient, even if the model has frozen it.
    """
    return old.requires_grad if isinstance(old, LazyTensor) else old.is_floating_point()
