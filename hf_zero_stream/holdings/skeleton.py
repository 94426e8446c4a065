"""A copy of a model that is in use, with shapes and no memory, for transformers to load lazy tensors into.

The class of the model is not built anew: it may need arguments that its config does not hold, and its modules may have
been added, replaced or wrapped since. So a checkpoint is paired with what the model is now.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn

from ..checkpoint.lazy import LazyTensor
from ..registry import tool
from . import fsdp
from .introspection import CONVERTED, has_converted_experts, whole_shape
from .own_names import named_buffers, named_parameters, wrapped_child


_LOAD_ATTRIBUTES = ("_load_pretrained_model", "hf_quantizer", "_weight_conversions")
"""Attributes that a load has put on a model, and the next one makes anew."""


def skeleton_of(model: nn.Module) -> Any:
    """A copy of `model` on the meta device, by own names (:mod:`.own_names`), with its ties of now."""
    copied: dict[int, Any] = {}

    def tensor(old: torch.Tensor) -> torch.Tensor:
        if id(old) not in copied:
            new = torch.empty(whole_shape(old), dtype=old.dtype, device="meta")
            copied[id(old)] = nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
        return copied[id(old)]

    def module(old: nn.Module) -> nn.Module:
        if id(old) in copied:
            return copied[id(old)]
        if (origin := vars(old).get(CONVERTED)) is not None:
            new = module(origin.block)
            copied[id(old)] = new
            return new
        inside = wrapped_child(old)
        new = _empty_like(old) if inside is None else module(old._modules[inside])
        copied[id(old)] = new
        for tensors, place in ((old._parameters, new._parameters), (old._buffers, new._buffers)):
            place.update({key: None if value is None else tensor(value) for key, value in tensors.items()})
        for key, child in old._modules.items():
            if key != inside:
                new._modules[key] = None if child is None else module(child)
        return new

    found = module(model)
    if hasattr(found, "all_tied_weights_keys"):
        vars(found)["all_tied_weights_keys"] = _ties_of(found)
    return found


def _empty_like(old: nn.Module) -> nn.Module:
    """A module of the class and with the attributes of `old`, that has no tensors, no children and no hooks."""
    cls = fsdp.original_class(old)
    new = object.__new__(cls)
    vars(new).update({name: value for name, value in vars(old).items() if name not in _LOAD_ATTRIBUTES})
    kept = {"training", "_non_persistent_buffers_set", "_state_dict_hooks"}
    vars(new).update({name: value for name, value in vars(nn.Module()).items() if name not in kept})
    return new


def _ties_of(model: nn.Module) -> dict[str, str]:
    """Ties as transformers notes them: each name of a parameter that has several -> the one that is saved."""
    declared = model.all_tied_weights_keys
    sources = set(declared.values())
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    found = {}
    for tied in names.values():
        saved = next((name for name in tied if name in sources), tied[0])
        found.update({name: saved for name in tied if name != saved})
    return found


def filled_skeleton(skeleton: nn.Module, lazy: Mapping[str, Any]) -> tuple[nn.Module, set[str], set[str]]:
    """`skeleton` with `lazy` tensors in place of its own, the names of those that lack one, and no tied ones."""
    missing: set[str] = set()
    for name, _ in [*skeleton.named_parameters(), *skeleton.named_buffers()]:
        prefix, _, key = name.rpartition(".")
        owner = skeleton.get_submodule(prefix)
        if name in lazy:
            (owner._parameters if key in owner._parameters else owner._buffers)[key] = lazy[name]
        else:
            missing.add(name)
    return skeleton, missing, set()


def own_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and buffers of `model`, also by other names of tied or shared ones, by own names."""
    buffers = named_buffers(model, remove_duplicate=False)
    return {**dict(named_parameters(model, remove_duplicate=False)), **dict(buffers)}


def matching_tensors(model: nn.Module, lazy: Mapping[str, Any]) -> dict[str, Any]:
    """The `lazy` tensors whose own names and shapes `model` has."""
    shapes = {name: whole_shape(tensor) for name, tensor in own_tensors(model).items()}
    return {name: tensor for name, tensor in lazy.items() if shapes.get(name) == tensor.shape}


def lazy_module(model: nn.Module, lazy: Mapping[str, Any]) -> tuple[LazyTensorModule, set[str], set[str]]:
    """A model of the `lazy` tensors alone, by own names of `model`; and no missing and no tied names."""
    return LazyTensorModule(lazy), set(), set()


class LazyTensorModule(nn.Module):
    """Lazy tensors, by the own names of a model's parameters and buffers, or by their names in a state."""

    def __init__(self, tensors: Mapping[str, LazyTensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        return iter(self._tensors.items())

    def parameters(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        return iter(self._tensors.values())


class LazyTraining(nn.Module):
    """What a training is filled with: a lazy `model`, if there is one, and `states` by their names in the files."""

    def __init__(self, model: nn.Module | None, states: Mapping[str, LazyTensor]) -> None:
        super().__init__()
        self.model, self.states = model, states

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        of_model = () if self.model is None else self.model.named_parameters(*args, **kwargs)
        return chain(of_model, self.states.items())

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        return iter(()) if self.model is None else self.model.named_buffers(*args, **kwargs)


def convert_lazy(live: nn.Module, lazy: nn.Module, missing: set[str]) -> None:
    """Give a `lazy` model, of which some names are `missing`, the converted layers of `live`, if that has any."""
    if has_converted_experts(live):
        tool("experts", "autoep").convert_like(live, lazy, missing)
