"""A parameter's own name: the one that it has without the modules that others have put around its own.

Compiling or checkpointing a block, DistributedDataParallel, FSDP and PEFT put a module around another one, and the
names of all that is below get longer. A training may be saved with such modules and go on without them. So whatever is
saved, loaded, recorded or reported by name goes by own names, and nothing else takes names apart.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import nn


_OF_TORCH = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""What ``torch.compile``, ``checkpoint_wrapper`` and FSDP1 call the module that they are around."""


_OF_PEFT = ("base_layer", "original_module", "token_adapter")
"""What PEFT calls the modules of a model that it has put its own around."""


class _NamedTensor(NamedTuple):
    """A tensor by the name that torch has for it, its own, and the one that keeps PEFT's parts.

    `is_of_adapter`: PEFT has put it there.
    """

    name: str
    own: str
    kept: str
    tensor: torch.Tensor
    is_of_adapter: bool


class _Names(NamedTuple):
    """The names of a model's tensors by those that torch has; see :func:`own_names` and :func:`adapter_names`."""

    own: dict[str, str]
    kept: dict[str, str]
    of_adapters: set[str]


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
    found = list(_walk(model, "", "", "", ()))
    own = _clear({each.name: each.own for each in found}, found)
    kept = _clear({each.name: each.kept for each in found}, found)
    return _Names(own, kept, {own[each.name] for each in found if each.is_of_adapter})


def _clear(names: dict[str, str], found: list[_NamedTensor]) -> dict[str, str]:
    """These `names`, with torch's own in place of one that two tensors have."""
    tensors: dict[str, int] = {}
    unclear = {
        names[each.name] for each in found if tensors.setdefault(names[each.name], id(each.tensor)) != id(each.tensor)
    }
    return {name: name if other in unclear else other for name, other in names.items()}


def _walk(module: nn.Module, name: str, own: str, kept: str, around: tuple[int, ...]) -> Iterator[_NamedTensor]:
    """`around`: the modules that this one is inside of, by their ids, of which PEFT may put one into another again."""
    child_inside, child_kept = wrapped_child(module), wrapped_child(module, keeps_adapters=True)
    is_of_adapter = child_inside is not None
    for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
        if tensor is not None:
            yield _NamedTensor(f"{name}{key}", f"{own}{key}", f"{kept}{key}", tensor, is_of_adapter)
    for key, child in module._modules.items():
        if child is None or id(child) in around:
            continue
        inner = own if key == child_inside else f"{own}{key}."
        inner_kept = kept if key == child_kept else f"{kept}{key}."
        for each in _walk(child, f"{name}{key}.", inner, inner_kept, (*around, id(module))):
            yield each._replace(is_of_adapter=each.is_of_adapter or (is_of_adapter and key != child_inside))


def named_parameters(model: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
    """As ``model.named_parameters()``, by own names."""
    names = own_names(model)
    for name, param in model.named_parameters(remove_duplicate=remove_duplicate):
        yield names.get(name, name), param


def named_buffers(model: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    """As ``model.named_buffers()``, by own names."""
    names = own_names(model)
    for name, buffer in model.named_buffers(remove_duplicate=remove_duplicate):
        yield names.get(name, name), buffer


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
