"""What users keep beside the parameters of a model, element for element: averages of weights (EMA), for instance.

Each tensor is a slot of its own, in which one state lies: so it is saved and read as a moment of an optimizer is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from ..errors import ConfigError, UnsupportedError
from ..holdings.holder import holdings
from ..holdings.holding import PARAMETERS, Holding, kind_of, open_flat, refuse_unknown
from ..holdings.introspection import has_partition, is_dtensor
from ..holdings.own_names import named_buffers, named_parameters, own_names, own_or_clean, parameters
from ..holdings.slots import BUFFERS, VALUES, WHOLE, Member, Slot, entry_name
from ..planning.boxes import ParameterBox
from ..planning.plan import partition_range
from ..ranks.coordinator import Coordinator
from ..seams.wrappers import unwrapped
from .count import COPIES


Kept: TypeAlias = Mapping[str, torch.Tensor] | nn.Module
"""By the names of parameters a tensor for each; or a module with these parameters, sharded in whatever way."""


class Beside(NamedTuple):
    """All that is kept beside a model.

    Attributes:
        slots: by the name of each, the slots that have it as their state.
        buffers: those of the state dicts of modules, such as how often one was averaged, by their names in files.
    """

    slots: Mapping[str, Sequence[Slot]] = {}
    buffers: Mapping[str, torch.Tensor] = {}

    @classmethod
    def of(
        cls,
        model: nn.Module,
        beside: Mapping[str, Kept],
        others: Collection[str],
        coordinator: Coordinator,
        *,
        copies: bool = False,
    ) -> Beside:
        """What is kept `beside` a model, under other names than the `others`; see :func:`slots_beside`."""
        taken = {VALUES, WHOLE, BUFFERS, *others}
        for key in beside:
            if not key.isidentifier() or key in taken:
                raise ConfigError(
                    "beside: expected a name that is an identifier, and none that the state has already, as "
                    f"{', '.join(sorted(taken))}; got {key!r}."
                )
        buffers = {
            entry_name(buffers_key(key), name): buffer.clone() if copies else buffer
            for key, kept in beside.items()
            for name, buffer in (named_buffers(kept, only_persistent=True) if isinstance(kept, nn.Module) else ())
        }
        slots = {key: slots_beside(model, key, kept, coordinator, copies=copies) for key, kept in beside.items()}
        return cls(slots, buffers)

    def held_buffers(self, coordinator: Coordinator) -> dict[str, Holding]:
        """Rank 0's values of the buffers, by their names in files."""
        return {
            name: Holding(
                ParameterBox.whole(it.shape),
                it.dtype,
                0,
                it.numel() if coordinator.is_main else 0,
                partial(open_flat, it),
            )
            for name, it in self.buffers.items()
        }


def buffers_key(key: str) -> str:
    """What stands for the name of a state, in files, with the buffers of a module that is kept as `key`."""
    return f"{key}_buffers"


def slots_beside(
    model: nn.Module, key: str, kept: Kept, coordinator: Coordinator, *, copies: bool = False
) -> list[Slot]:
    """A slot for each tensor that is `kept` of a parameter of `model`, with the tensor as its state `key`.

    In a mapping, a tensor has what this rank holds of the parameter, element for element, or all of the parameter.

    Args:
        copies: the slots have copies of the values, in host memory.

    Raises:
        ConfigError: `kept` has something else, or nothing.
        UnsupportedError: the memory of a tensor is not all that there is of it.
    """
    what, names, params = key, own_names(model), dict(named_parameters(model))
    ranks = {"rank": coordinator.rank, "world_size": coordinator.world_size}
    mine = holdings(model, masters=False, **ranks)
    if not isinstance(kept, Mapping | nn.Module):
        raise ConfigError(
            f"{what}: expected a mapping of parameters' names to tensors, or a module; got {type(kept).__name__}. Of "
            "diffusers' EMAModel, made of a model's parameters(), give dict(zip(names, ema.shadow_params)), with the "
            "names of named_parameters()."
        )
    if isinstance(kept, nn.Module):
        inside = _inside(kept)
        given, held = dict(named_parameters(inside)), holdings(inside, masters=False, **ranks)
    else:
        given, held = {own_or_clean(names, name): tensor for name, tensor in kept.items()}, {}
    if unknown := sorted(given.keys() - params.keys()):
        raise ConfigError(
            f"{what}: expected tensors by names of parameters of the {type(model).__name__}; it has no "
            f"{', '.join(unknown[:8])} ({len(unknown)} in all). What else you keep goes into data=."
        )
    if not given:
        raise ConfigError(f"{what}: expected a tensor for at least one parameter; got none.")
    refuse_unknown(given, PARAMETERS, what)
    slots = []
    for name in [name for name in params if name in given]:  # in the same order on all ranks
        memory = _memory(given[name])
        part = held.get(name) or _part(f"{what}: {name}", given[name], params[name], mine[name], coordinator)
        if part.box.shape != mine[name].box.shape:
            raise ConfigError(
                f"{what}: {name}: expected shape {mine[name].box.shape}; found {part.box.shape}.{_why(memory)}"
            )
        if not memory.is_contiguous():
            raise UnsupportedError(f"{what}: {name}: expected a tensor in row-major order; call contiguous() on it.")
        memory = memory.to("cpu", copy=True) if copies else memory
        members = [Member(name, part.box, 0, part.start, part.stop, part.is_whole)]
        slots.append(Slot(0, memory, {key: memory}, members))
    return slots


def _inside(kept: nn.Module) -> nn.Module:
    """The module of `kept` that has the names of the model's parameters."""
    found: nn.Module = unwrapped(kept.module if isinstance(kept, AveragedModel) else kept)
    return found


def _memory(tensor: Any) -> torch.Tensor:
    kind = kind_of(tensor, PARAMETERS)
    return (tensor if kind is None else kind.memory(tensor)).detach()


def _part(what: str, tensor: Any, param: Any, mine: Holding, coordinator: Coordinator) -> Holding:
    """What of the parameter `param`, of which this rank holds `mine`, a `tensor` has."""
    memory, whole = _memory(tensor), ParameterBox.whole(mine.box.shape)
    own = _memory(param)
    count = int(getattr(own, "ds_numel", own.numel()))  # of a partition its padding too
    if is_dtensor(tensor) and not (is_dtensor(param) and tensor._spec.placements == param._spec.placements):
        raise ConfigError(f"{what}: expected a plain tensor, or one that is sharded as the parameter is.")
    if memory.shape == whole.shape and not has_partition(tensor):
        _, start, stop = partition_range(whole.numel, coordinator.rank, coordinator.world_size)
        return mine._replace(box=whole, start=start, stop=stop, is_whole=True)
    if memory.numel() == count:
        return mine._replace(is_whole=mine.is_whole and count == mine.box.numel)
    raise ConfigError(
        f"{what}: expected {count} elements, as the parameter has on this rank, or all of it, in shape "
        f"{whole.shape}; found a tensor of shape {tuple(memory.shape)}.{_why(memory)}"
    )


def _why(memory: torch.Tensor) -> str:
    """Why there may be no values in a copy of a parameter."""
    return "" if memory.numel() else f" {COPIES}"


def refuse_empty_copy(original: Callable[..., Any], self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """torch's ``AveragedModel.__init__``, which Lightning calls too: it copies `model`, and would average nothing."""
    if any(map(has_partition, parameters(model))):
        from ..holdings.deepspeed.partitions import partitioned_names

        if names := partitioned_names(model):
            raise UnsupportedError(
                f"{type(self).__name__}({type(model).__name__}): expected parameters with values; found {len(names)} "
                f"without: {', '.join(names[:8])}. {COPIES}"
            )
    return original(self, model, *args, **kwargs)
