"""Adapters merged into weights that leave the training, by PEFT's own functions; the training model keeps its own."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ...errors import UnsupportedError
from ...plugin_api import Layout, Stored, fsdp, named_parameters
from .plan import MergePlan


def has_adapters(model: nn.Module) -> bool:
    """Whether PEFT has put adapters on `model`."""
    return next(_outermost_layers(model), None) is not None


def merges_values(model: nn.Module) -> bool:
    """Whether `model` has adapters that can be merged: not into weights that other libraries have quantised."""
    return has_adapters(model) and _quantised(_outermost_layers(model)) is None


def base_of(model: Any) -> Any:
    """The transformers model that a model of PEFT is around; raises if an adapter is beside it, and not in it."""
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel):
        return model
    if model.active_peft_config.is_prompt_learning:
        raise UnsupportedError(
            f"weight_stream: expected adapters of layers; {model.active_peft_config.peft_type.value} of PEFT trains "
            "what is put before the input, which no weights of the model hold. Give engines the adapter that "
            "model.save_pretrained saves."
        )
    return model.get_base_model()


def active_adapter(model: Any) -> str:
    """Return the only active adapter of a model of PEFT: several have the same names in their files."""
    if len(model.active_adapters) != 1:
        raise UnsupportedError(
            f'weight_stream: only="trainable" expects one active adapter; got {", ".join(model.active_adapters)}. '
            "Call set_adapter() with one of them first, on all ranks; or stream the model with all of them merged."
        )
    return str(model.active_adapters[0])


def trained_copies(model: nn.Module) -> dict[str, str]:
    """Map each parameter of modules trained in full beside adapters to its copy in use; both by name."""
    peft = sys.modules.get("peft")
    if peft is None:
        return {}
    names = {id(param): name for name, param in named_parameters(model, remove_duplicate=False)}
    found = {}
    for module in model.modules():
        wraps = isinstance(module, peft.utils.other.ModulesToSaveWrapper)
        if wraps and module.active_adapters and not module.disable_adapters:
            copies = dict(module.modules_to_save[module.active_adapters[0]].named_parameters())
            for key, param in module.original_module.named_parameters():
                found[names[id(param)]] = names[id(copies[key])]
    return found


def state_of_adapters(model: nn.Module) -> list[str]:
    """List what merging depends on beside values. (transformers' models have a method named ``active_adapters``.)"""
    names = ("active_adapters", "disable_adapters", "merged_adapters", "scaling")
    found = [getattr(module, name, None) for module in model.modules() for name in names]
    return [str(value) for value in found if value is not None and not callable(value)]


class AdaptedLayers:
    """The layers of a model that have adapters to be merged.

    Attributes:
        params: the parameters in each layer, by own name: its base's and its adapters'.
    """

    def __init__(self, model: nn.Module) -> None:
        names = {id(param): name for name, param in named_parameters(model)}
        layers = list(_outermost_layers(model))
        self._layers = [layer for layer in layers if not layer.disable_adapters]  # PEFT's merge() does not ask
        self.params = [
            {names[id(param)]: param for param in layer.parameters() if id(param) in names} for layer in self._layers
        ]
        if (found := _quantised(self._layers)) is not None:
            raise UnsupportedError(
                f"The weights that have adapters in this model are quantised ({found.dtype}): nothing can be merged "
                'into them. Stream adapters by themselves, with only="trainable", or load the model dequantised.'
            )
        for layer in layers:
            if layer.merged:
                raise UnsupportedError(
                    "The adapters of this model are merged into its weights now: call unmerge_adapter() on all ranks "
                    "first. A weight stream merges them on its own, in what it sends."
                )

    def merged(self, number: int, values: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """The values of a layer's parameters with its active adapters merged into the base's.

        `values` gives those of the training, in memory that may be changed.
        """
        params = self.params[number]
        replacements = {id(param): nn.Parameter(values(name), requires_grad=False) for name, param in params.items()}
        layer = _with_parameters(self._layers[number], replacements)
        for each in reversed(list(_chain(layer))):
            each.merge()
        found = {name: replacements[id(param)].data for name, param in params.items()}
        # LNTuning puts its own layer in the base's place, and leaves the parameters as they are.
        names = {id(param): name for name, param in params.items()}
        in_use = dict(layer.get_base_layer().named_parameters())
        of_base = self._layers[number].get_base_layer().named_parameters()
        return found | {names[id(param)]: in_use[key].data for key, param in of_base}


def merge_plan_of(adapted: AdaptedLayers | None, layout: Layout) -> MergePlan:
    """Describe the adapted layers for a plan."""
    if adapted is None:
        return MergePlan({}, [])
    stored = {name: Stored(box.shape, dtype, name) for name, box, dtype, *_ in layout.held}
    of_layers = [[stored[name] for name in params] for params in adapted.params]
    numbers = {each.name: number for number, of_layer in enumerate(of_layers) for each in of_layer}
    return MergePlan(numbers, of_layers)


def _outermost_layers(model: nn.Module) -> Iterator[Any]:
    """PEFT's layers that are inside no other one."""
    peft = sys.modules.get("peft")
    if peft is None:
        return
    if isinstance(model, peft.tuners.tuners_utils.BaseTunerLayer):
        yield model
        return
    for child in model.children():
        yield from _outermost_layers(child)


def _quantised(layers: Iterable[Any]) -> torch.Tensor | None:
    """Return a quantised tensor inside one of PEFT's `layers`; None if there is none."""
    bases = (layer.get_base_layer() for layer in layers)
    tensors = (tensor for base in bases for tensor in (*base.parameters(), *base.buffers()))
    return next((each for each in tensors if not each.is_floating_point() or each.dtype.itemsize < 2), None)


def _chain(layer: Any) -> Iterator[Any]:
    """A layer of PEFT's, and those that it is around: there is one for each parameter of fused experts."""
    kind: Any = sys.modules["peft"].tuners.tuners_utils.BaseTunerLayer
    while isinstance(layer, kind):
        yield layer
        layer = layer.base_layer


def _with_parameters(module: nn.Module, replacements: Mapping[int, nn.Parameter]) -> Any:
    """A copy of a module with other parameters, and without hooks of the training."""
    new = object.__new__(fsdp.original_class(module))
    vars(new).update({key: copy.copy(value) for key, value in vars(module).items() if isinstance(value, (list, dict))})
    vars(new).update({key: value for key, value in vars(module).items() if key not in vars(new)})
    vars(new).update({key: value for key, value in vars(nn.Module()).items() if key != "training"})
    new._parameters.update(
        {key: None if param is None else replacements[id(param)] for key, param in module._parameters.items()}
    )
    new._buffers.update(module._buffers)
    new._modules.update(
        {
            key: None if child is None else _with_parameters(child, replacements)
            for key, child in module._modules.items()
        }
    )
    return new
