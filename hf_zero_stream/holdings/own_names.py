"""A parameter's own name: the one that it has without the modules that others have put around its own.

Compiling or checkpointing a block, DistributedDataParallel, FSDP and PEFT put a module around another one, and the
names of all that is below get longer. A training may be saved with such modules and go on without them. So whatever is
saved, loaded, recorded or reported by name goes by own names, and nothing else takes names apart.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn


_OF_TORCH = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""What ``torch.compile``, ``checkpoint_wrapper`` and FSDP1 call the module that they are around."""


_OF_PEFT = ("base_layer", "original_module", "token_adapter")
"""What PEFT calls the modules of a model that it has put its own around."""


class _Place(NamedTuple):
    """Where a module has a tensor, by the name that torch has for it, its own, and the one that keeps PEFT's parts.

    `is_of_adapter`: PEFT has put it there.
    """

    name: str
    own: str
    kept: str
    module: nn.Module
    key: str
    is_of_adapter: bool


@dataclass(frozen=True, eq=False)
class _Tree:
    """The modules of a model, and the places of its tensors on every path that leads there, in torch's order."""

    modules: dict[int, tuple[str, nn.Module]] = field(default_factory=dict)
    """By the id of each, with its first name."""
    parameters: list[_Place] = field(default_factory=list)
    buffers: list[_Place] = field(default_factory=list)


class _Names(NamedTuple):
    """The names of a model's tensors by those that torch has; see :func:`own_names` and :func:`adapter_names`."""

    own: dict[str, str]
    kept: dict[str, str]
    of_adapters: set[str]
    tree: _Tree


_operation: ContextVar[dict[int, tuple[nn.Module, _Names]] | None] = ContextVar(
    "hf_zero_stream_names_of_models", default=None
)
"""The names that the running operation has found, by the ids of models."""


@contextmanager
def fixed_names() -> Iterator[None]:
    """Around an operation on models whose modules stay as they are: the tree of each is walked once for its names.

    Parameters and buffers may get other values and other memory inside, and no other names.
    """
    token = _operation.set({}) if _operation.get() is None else None
    try:
        yield
    finally:
        if token is not None:
            _operation.reset(token)


def wrapped_child(module: nn.Module, *, keeps_adapters: bool = False) -> str | None:
    """Return the attribute by which `module` holds the module that it wraps; None if it wraps none.

    With `keeps_adapters`, PEFT's modules count as the model's own.
    """
    for name in _OF_TORCH:
        if name in module._modules:
            return name
    if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return "module"
    return None if keeps_adapters else _child_inside_adapter(module)


def _child_inside_adapter(module: nn.Module) -> str | None:
    peft: Any = sys.modules.get("peft")
    if peft is None:
        return None
    tuners, others = peft.tuners.tuners_utils, peft.utils.other
    kinds = {
        "base_layer": tuners.BaseTunerLayer,
        "original_module": others.ModulesToSaveWrapper,
        "token_adapter": getattr(others, "TrainableTokensWrapper", ()),  # PEFT has it from 0.15 on
        "model": tuners.BaseTuner,
        "base_model": peft.PeftModel,
    }
    return next((name for name, kind in kinds.items() if name in module._modules and isinstance(module, kind)), None)


def own_names(model: nn.Module, *, keeps_adapters: bool = False) -> dict[str, str]:
    """The own name of each parameter and buffer of `model`, by each name that torch has for it.

    With `keeps_adapters`, names have PEFT's parts: those by which PEFT and transformers save.
    """
    names = _names_of(model)
    return names.kept if keeps_adapters else names.own


def _names_of(model: nn.Module) -> _Names:
    found = _operation.get()
    if found is None:
        return _walked(model)
    if id(model) not in found:
        found[id(model)] = model, _walked(model)  # the model too, so that no other one gets its id
    return found[id(model)][1]


def _walked(model: nn.Module) -> _Names:
    tree = _Tree()
    _walk(model, "", "", "", tree, (), is_of_adapter=False)
    places = [*tree.parameters, *tree.buffers]
    tensors = {place.name: id(tensor) for place, tensor in (*_tensors(tree.parameters), *_tensors(tree.buffers))}
    own = _clear({each.name: each.own for each in places}, tensors)
    kept = _clear({each.name: each.kept for each in places}, tensors)
    return _Names(own, kept, {own[each.name] for each in places if each.is_of_adapter}, tree)


def _clear(names: dict[str, str], tensors: dict[str, int]) -> dict[str, str]:
    """These `names`, with torch's own in place of one that two of the `tensors` have."""
    first: dict[str, int] = {}
    unclear = {other for name, other in names.items() if first.setdefault(other, tensors[name]) != tensors[name]}
    return {name: name if other in unclear else other for name, other in names.items()} if unclear else names


def _walk(
    module: nn.Module, name: str, own: str, kept: str, tree: _Tree, around: tuple[int, ...], *, is_of_adapter: bool
) -> None:
    """Add `module` to the `tree`, and all below it.

    `around`: the modules that it is inside of, by their ids, of which PEFT may put one into another again.
    """
    tree.modules.setdefault(id(module), (name[:-1], module))
    children = module._modules
    child_inside = wrapped_child(module) if children else None
    child_kept = wrapped_child(module, keeps_adapters=True) if children else None
    for tensors, places in ((module._parameters, tree.parameters), (module._buffers, tree.buffers)):
        for key, tensor in tensors.items():
            if tensor is not None:
                is_added = is_of_adapter or child_inside is not None
                places.append(_Place(name + key, own + key, kept + key, module, key, is_added))
    for key, child in children.items():
        if child is not None and id(child) not in around:
            inner = own if key == child_inside else f"{own}{key}."
            inner_kept = kept if key == child_kept else f"{kept}{key}."
            is_added = is_of_adapter or (child_inside is not None and key != child_inside)
            _walk(child, f"{name}{key}.", inner, inner_kept, tree, (*around, id(module)), is_of_adapter=is_added)


def _tensors(places: Iterable[_Place], *, remove_duplicate: bool = False) -> Iterator[tuple[_Place, Any]]:
    """What lies in these places now."""
    seen: set[int] = set()
    for place in places:
        tensor: Any = place.module._parameters.get(place.key)
        if tensor is None:
            tensor = place.module._buffers.get(place.key)
        if tensor is None or id(tensor) in seen:
            continue
        if remove_duplicate:
            seen.add(id(tensor))
        yield place, tensor


def named_modules(model: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    """As ``model.named_modules()``, by torch's names; inside an operation the tree is not walked again."""
    return model.named_modules() if _operation.get() is None else _names_of(model).tree.modules.values()


def modules(model: nn.Module) -> Iterator[nn.Module]:
    """As ``model.modules()``; see :func:`named_modules`."""
    return (module for _, module in named_modules(model))


def parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """As ``model.parameters()``; see :func:`named_modules`."""
    if _operation.get() is None:
        return model.parameters()
    return (param for _, param in _tensors(_names_of(model).tree.parameters, remove_duplicate=True))


def named_parameters(
    model: nn.Module, *, remove_duplicate: bool = True, by_own_names: bool = True
) -> Iterator[tuple[str, nn.Parameter]]:
    """As ``model.named_parameters()``, by own names; or by torch's, if not `by_own_names`."""
    names = _names_of(model)
    for place, param in _tensors(names.tree.parameters, remove_duplicate=remove_duplicate):
        yield names.own[place.name] if by_own_names else place.name, param


def named_buffers(
    model: nn.Module, *, remove_duplicate: bool = True, by_own_names: bool = True, only_persistent: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """As ``model.named_buffers()``, or those of its state dict alone; for the names see :func:`named_parameters`."""
    names = _names_of(model)
    places = names.tree.buffers
    if only_persistent:
        places = [it for it in places if it.key not in it.module._non_persistent_buffers_set]
    for place, buffer in _tensors(places, remove_duplicate=remove_duplicate):
        yield names.own[place.name] if by_own_names else place.name, buffer


def adapter_names(model: nn.Module) -> set[str]:
    """The own names of what PEFT has put into `model`, beside what was there."""
    return _names_of(model).of_adapters


def without_adapters(name: str) -> str:
    """`name`, in a file that was saved from a model with PEFT's modules in it, without their parts."""
    return ".".join(part for part in name.split(".") if part not in _OF_PEFT)


def own_or_clean(names: dict[str, str], name: str) -> str:
    """The own name of what was saved as `name`, from the :func:`own_names` of the model that goes on with it.

    The model may have lost what was around its modules since.
    """
    return names.get(name) or ".".join(part for part in name.split(".") if part not in _OF_TORCH)
