"""Counts what a save is going to write, before it writes: all that ranks hold goes into the files.

The numbers come from the plan, which is the same on all ranks, so that all raise the same error. A plan cannot know
that the model itself lacks something: a part of a weight that a rank has in place of all of it looks like a replica.
So shapes are compared with those that were loaded or, where they have changed, with those that the class gives. Where
one is smaller, so are values between ranks.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping
from itertools import chain
from math import prod
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel

from ..errors import SaveError
from ..holdings.holding import Holding
from ..holdings.introspection import LOADED_SHAPES, packed_weights, whole_shape
from ..holdings.own_names import named_modules, named_parameters, own_names, own_or_clean
from ..seams.ds_config import zero3_hidden
from .lazy_parameters import digest
from .parameters import Parameters
from .plan import SavePlan, Sources


__all__ = [
    "COPIES",
    "LeftOut",
    "anything",
    "ignored_by",
    "nothing",
    "refuse_cut",
    "refuse_empty",
    "refuse_too_few",
    "smaller_ones",
]

COPIES = (
    "A copy of what ZeRO-3 has partitioned is empty. Copy what each rank has, as param.ds_tensor; or copy, and go on "
    "with the copy, inside deepspeed.zero.GatheredParameters(list(model.parameters()))."
)
"""What errors say of copies without values, such as averages of weights."""

LeftOut = Callable[[str], bool]
"""Whether a parameter, by its own name, need not be in the files."""


def nothing(name: str) -> bool:
    """A :data:`LeftOut`: all parameters must be there."""
    return False


def anything(name: str) -> bool:
    """A :data:`LeftOut`: the save is one of a part of the model."""
    return True


def ignored_by(model: PreTrainedModel) -> LeftOut:
    """A :data:`LeftOut`: what transformers does not save of this model."""
    names = own_names(model)
    return {own_or_clean(names, name) for name in model._keys_to_ignore_on_save or ()}.__contains__


def refuse_too_few(
    plan: SavePlan, sources: Sources, names: Iterable[str], left_out: LeftOut, padding: Mapping[str, int]
) -> None:
    """Raise a SaveError if fewer elements of a parameter of `names` would be written than ranks hold between them.

    Of one that is `left_out` all are written, or none. `padding` has elements that are held and never written.
    """
    wrong = []
    for name in names:
        parts = sources.sources_of(name)
        written, held = [plan.elements.get(part, 0) for part in parts], [sources.numel(part) for part in parts]
        is_short = any(count < numel for count, numel in zip(written, held, strict=True))
        if name in padding:
            is_short = sum(written) < sum(held) - padding[name]
        if is_short and (any(written) or not left_out(name)):
            wrong.append(f"{name}: {sum(written)} of {sum(held)}")
    if wrong:
        raise SaveError(
            f"Expected that all elements of each parameter go into the files; of {len(wrong)} fewer do: "
            f"{', '.join(wrong[:8])}. Nothing was written. Save outside of streaming(), and report this, please."
        )


def packed_padding(model: nn.Module) -> dict[str, int]:
    """The bytes of each packed weight, by its own name, that are of no tensor of the checkpoint."""
    names = own_names(model)
    return {
        names[f"{prefix}.{key}" if prefix else key]: weight.padding_bytes
        for prefix, module in named_modules(model)
        for key, weight in packed_weights(module).items()
    }


class Smaller(NamedTuple):
    """A parameter that is smaller than whole.

    Whole is what it was when it was loaded or, where anything has another shape by now, what the model's class makes
    of its config. A module that is no model of transformers' has no such class.

    Attributes:
        shapes: its own, and the whole one.
        place: the elements that a rank gives, or has in full.
        values: a digest of these.
    """

    name: str
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    place: Any
    values: bytes


def smaller_ones(model: nn.Module, parameters: Parameters, among: Container[str]) -> list[Smaller]:
    """Those of the parameters `among` others that this rank holds; mostly none."""
    named = {source: (parameters.layout.names[source], each) for source, each in parameters.holdings.items()}
    held = {source: each for source, each in named.items() if each[0] in among}
    smaller = _smaller(model, {name: each.box.shape for name, each in held.values() if not each.is_gathered})
    return [Smaller(name, smaller[name], *_described(each)) for name, each in held.values() if name in smaller]


def refuse_cut(model: nn.Module, of_ranks: Iterable[Iterable[Smaller]]) -> None:
    """Raise a SaveError if ranks hold different values of a parameter that is smaller than whole.

    With the same values on all ranks it is the user's choice.
    """
    seen: dict[tuple[str, Any], set[bytes]] = defaultdict(set)
    shapes = {}
    for each in chain.from_iterable(of_ranks):
        seen[each.name, each.place].add(each.values)
        shapes[each.name] = each.shapes
    parts = dict.fromkeys(name for (name, _), values in seen.items() if len(values) > 1)
    if parts:
        described = [f"{name}: {shapes[name][0]} of {shapes[name][1]}" for name in parts]
        raise SaveError(
            f"Each rank seems to hold {len(parts)} parameter(s) in full, with other values than others, and in "
            f"smaller shapes than {type(model).__name__} has by its config: {', '.join(described[:8])}. Each has a "
            "part of them, and nothing says which; files would lack the others. Nothing was written. Save by what has "
            "cut the model, outside of streaming()."
        )


def refuse_empty(model: nn.Module) -> None:
    """Raise a SaveError if a parameter has no element and, when it was loaded or by the model's class, had some."""
    shapes = {name: tuple(whole_shape(param)) for name, param in named_parameters(model)}
    if empty := _smaller(model, {name: shape for name, shape in shapes.items() if not prod(shape)}):
        raise SaveError(
            f"Expected values of each parameter; found none of {len(empty)}: {', '.join([*empty][:8])}. Nothing was "
            f"written. {COPIES}"
        )


def _described(holding: Holding) -> tuple[Any, bytes]:
    """The elements that a rank gives, or has in full, and a digest of their values."""
    count = holding.box.numel if holding.is_whole else holding.stop - holding.start
    with holding.open() as values:
        return (holding.box, holding.first, count), digest(values[:count])


def _smaller(
    model: nn.Module, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """The parameters, of these `shapes`, that are smaller than whole, and both shapes; mostly none."""
    if not isinstance(model, PreTrainedModel):
        return {}
    loaded: Mapping[str, tuple[int, ...]] = vars(model).get(LOADED_SHAPES, {})
    if all(loaded.get(name) == shape for name, shape in shapes.items()):
        return {}
    whole = _shapes_of_class(model) or loaded
    return {
        name: (shape, whole[name])
        for name, shape in shapes.items()
        if name in whole and prod(shape) < prod(whole[name])
    }


_of_classes: WeakKeyDictionary[nn.Module, tuple[str, dict[str, tuple[int, ...]]]] = WeakKeyDictionary()
"""The config of a model, and what its class makes of it."""


def _shapes_of_class(model: PreTrainedModel) -> Mapping[str, tuple[int, ...]]:
    """The shapes of a new model of this class; nothing if its class cannot make one of the config alone."""
    config = model.config.to_json_string(use_diff=False)
    if model not in _of_classes or _of_classes[model][0] != config:
        model_class = next(each for each in type(model).__mro__ if each.__module__.split(".")[0] != "torch")
        try:
            with torch.device("meta"), zero3_hidden():
                new = model_class(copy.deepcopy(model.config))
        except (TypeError, ValueError, RuntimeError, NotImplementedError):
            found = {}
        else:
            found = {name: tuple(param.shape) for name, param in new.named_parameters(remove_duplicate=False)}
        _of_classes[model] = config, found
    return _of_classes[model][1]
