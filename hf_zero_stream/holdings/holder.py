"""Finds the holdings of a model in memory. No destination is asked: something else may have loaded the model."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import torch
from torch import nn

from ..checkpoint.lazy import LazyTensor
from ..errors import UnsupportedError
from ..registry import import_object, plugins
from .holding import (
    BUFFERS,
    PARAMETERS,
    Holder,
    Holding,
    persistent_buffers,
    refuse_shared_memory,
    refuse_unknown,
)
from .introspection import has_partition, is_cut, is_dtensor, is_inside_fsdp2, shards_modules
from .own_names import named_parameters, own_names


HOLDERS: list[Holder] = []
"""Holders of other kinds of memory, which are asked first: the first that knows a parameter says what is held."""


def _added() -> list[Holder]:
    return [*HOLDERS, *(import_object(place) for plugin in plugins() for place in plugin.holders)]


def holdings(model: nn.Module, *, masters: bool, rank: int, world_size: int) -> dict[str, Holding]:
    """Return this rank's holding of each parameter of `model`, by the first of its own names, in their order.

    For the arguments and errors see :class:`Holder`.
    """
    if shards_modules(model) or is_inside_fsdp2(model):
        from .fsdp import reshard

        reshard(model)  # a forward pass may have left gathered parameters, perhaps in another dtype
    named = list(named_parameters(model, by_own_names=False))
    left = dict(named)
    found: dict[str, Holding] = {}

    def hold(held: Holder, params: Mapping[str, nn.Parameter]) -> None:
        found.update(held(model, params, masters=masters, rank=rank, world_size=world_size))
        for name in [name for name in left if name in found]:
            del left[name]

    for holder in _added():
        hold(holder, left)
    refuse_unknown(left, PARAMETERS)
    if masters and "deepspeed" in sys.modules:  # its import takes seconds
        from .deepspeed.holders import held_by_optimizers

        hold(held_by_optimizers, left)
    if partitioned := {name: param for name, param in left.items() if has_partition(param)}:
        from .deepspeed.holders import held_partitions

        hold(held_partitions, partitioned)
    hold(_held_shards, {name: param for name, param in left.items() if not has_partition(param)})
    if left:
        raise UnsupportedError(f"what ranks hold: no holder says what this rank holds of {', '.join([*left][:8])}.")
    own = own_names(model)
    return {own[name]: found[name] for name, _ in named}


def _held_shards(
    model: nn.Module, params: Mapping[str, nn.Parameter], *, masters: bool, rank: int, world_size: int
) -> dict[str, Holding]:
    """A :class:`Holder` of all that is no partition."""
    from .fsdp import managed_params, shard_of  # imports torch's FSDP2

    records = managed_params(model)

    def holding(name: str, param: nn.Parameter) -> Holding:
        record = records.get(name)
        # FSDP2 may have put gathered parameters in place of its own.
        mine = record if record is not None and record.sharded_param is param else None
        found = shard_of(name, param, mine, rank, world_size).holding(param)
        return found if is_dtensor(param) or is_cut(param) else found._replace(is_whole=True)

    return {name: holding(name, param) for name, param in params.items()}


def refuse_unreadable(model: nn.Module, doing: str, instead: str) -> None:
    """Raise an UnsupportedError (``{doing}: ... {instead}``) if `model` has tensors that nobody knows how to read.

    Of parameters that may be for a holder that somebody has added, :func:`holdings` finds that out.
    """
    if not _added():
        refuse_unknown(dict(named_parameters(model, by_own_names=False)), PARAMETERS, doing, instead)
    refuse_unknown(dict(persistent_buffers(model)), BUFFERS, doing, instead)
    refuse_shared_memory(model, doing, instead)


def refuse_meta(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise an UnsupportedError if any of these has no values, in this process at least."""
    if meta := [name for name, tensor in tensors.items() if tensor.is_meta and not isinstance(tensor, LazyTensor)]:
        raise UnsupportedError(
            f"{', '.join(meta[:8])}: expected values; found {len(meta)} tensor(s) on the meta device, which has none. "
            "Give them values first: load the model without offload to the CPU or to disk by a device_map, or call "
            "to_empty() and fill them."
        )
