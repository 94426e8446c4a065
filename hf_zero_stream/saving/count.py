"""Counts what a save is going to write, before it writes: all that ranks hold goes into the files.

The numbers come from the plan, which is the same on all ranks, so that all raise the same error. A plan cannot know
that the model itself lacks something: a part of a weight that a rank has in place of all of it looks like a replica.
So if ranks differ in what each seems to hold in full, shapes are compared with those that the class gives.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn
from transformers import PreTrainedModel

from ..destinations.skeleton import whole_shape
from ..errors import SaveError
from ..holdings.marks import PACKED
from ..holdings.own_names import named_parameters, own_names, own_or_clean
from ..seams.ds_config import zero3_hidden
from .plan import SavePlan, Sources


__all__ = ["LeftOut", "anything", "ignored_by", "nothing", "refuse_cut", "refuse_too_few"]

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
    """Of each packed weight, by its own name, the bytes that are of no tensor of the checkpoint."""
    names = own_names(model)
    return {
        names[f"{prefix}.{key}" if prefix else key]: weight.padding_bytes
        for prefix, module in model.named_modules()
        for key, weight in vars(module).get(PACKED, {}).items()
    }


def refuse_cut(model: nn.Module, differing: Iterable[str]) -> None:
    """Raise a SaveError if the parameters `differing`, of which ranks have different values, are smaller than whole.

    Whole is what the model's class makes of its config. A module that is no model of transformers' has no such class.
    """
    wanted = set(differing)
    if not wanted or not isinstance(model, PreTrainedModel):
        return
    expected = _shapes_of_class(model)
    found = {name: whole_shape(param) for name, param in named_parameters(model) if name in wanted}
    parts = [
        f"{name}: {tuple(shape)} of {tuple(expected[name])}"
        for name, shape in found.items()
        if name in expected and shape.numel() < expected[name].numel()
    ]
    if parts:
        raise SaveError(
            f"Each rank seems to hold {len(parts)} parameter(s) in full, with other values than others, and in "
            f"smaller shapes than {type(model).__name__} has by its config: {', '.join(parts[:8])}. Each has a part "
            "of them, and nothing says which; files would lack the others. Nothing was written. Save by what has cut "
            "the model, outside of streaming()."
        )


def _shapes_of_class(model: PreTrainedModel) -> Mapping[str, torch.Size]:
    """The shapes of a new model of this class; nothing if its class cannot make one of the config alone."""
    model_class = next(each for each in type(model).__mro__ if each.__module__.split(".")[0] != "torch")
    try:
        with torch.device("meta"), zero3_hidden():
            new = model_class(copy.deepcopy(model.config))
    except (TypeError, ValueError, RuntimeError, NotImplementedError):
        return {}
    return {name: param.shape for name, param in new.named_parameters(remove_duplicate=False)}
