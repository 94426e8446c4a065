"""Packs the lazy weights of a model that transformers has dequantised, and takes packed weights apart for a save.

Each weight says of itself from which bytes and by which functions it comes (see :mod:`.programs`). In place of the
values we keep the bytes, and give the module a forward pass that dequantises. So the model has the modules and the
names of the dequantised one.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from ...errors import CheckpointError, UnsupportedError
from ...plugin_api import (
    LazyTensor,
    Load,
    TensorEntry,
    View,
    copy_attributes,
    entries_of,
    install_model_rows,
    is_computed,
    packed_weights,
)
from .dequantised import without_quantizer
from .modules import PackedLinear, factors_beside, grouped_product, note_packed
from .programs import NotPackable, NotQuantised
from .quantised_rows import quantised
from .quantising import QuantisingQuantizer, sources_of
from .weights import PackedWeight, SourceBytes, not_whole, pack, sources


logger = logging.get_logger(__name__)

_Candidates = list[tuple[str, nn.Module, dict[str, tuple[PackedWeight, LazyTensor]]]]


def take_packed(model: nn.Module, state_dict: dict[str, Any]) -> dict[str, tuple[TensorEntry, LazyTensor]]:
    """Take the packed weights out of a lazy `state_dict`; returns the tensors of the checkpoint that they hold.

    Each with its entry, for its dtype and shape, and its bytes as a flat lazy tensor.

    Raises an UnsupportedError if other quantised weights were dequantised: one config cannot describe both.
    """
    found: dict[str, tuple[PackedWeight, View]] = {}
    reader: Any = None
    for prefix, module in model.named_modules():
        for key, weight in packed_weights(module).items():
            lazy = state_dict.pop(f"{prefix}.{key}" if prefix else key, None)
            if isinstance(lazy, LazyTensor):
                found[f"{prefix}.{key}"], reader = (weight, lazy.view_of_node), lazy.reader
    mixed = getattr(model, "_hf_zero_stream_dequantised", ())
    if found and mixed:
        raise UnsupportedError(
            f"save_pretrained: {len(mixed)} modules of this quantised model were dequantised while it was loaded, "
            f"among them {mixed[0]}, and others stayed as they were in the file: no quantization_config describes "
            "both. Save the adapters only, or load with keep_quantized=False."
        )
    return {name: (entry, LazyTensor.of(view, reader)) for name, (entry, view) in sources(found).items()}


def pack_model(
    model: PreTrainedModel,
    dtype: torch.dtype | None,
    loading_info: Any,
    load: Load,
    method: str,
    quantiser: QuantisingQuantizer | None,
) -> None:
    """Turn the quantised weights of the lazy `model` into lazy parameters of bytes; `dtype` is that of the values.

    `method` is the ``quant_method``, for messages; `quantiser` is there if they are quantised while they are loaded.
    All its parameters become frozen, but for those that the checkpoint lacks.
    """
    _refuse_lost(model, loading_info)
    _refuse_without_scales(model)
    used = {entry.name for entry in _entries_of(*model.parameters(), *model.buffers())}
    made = {} if quantiser is None else quantiser.made
    used.update(entry.name for entry in sources_of(made))
    siblings = [entry for each in made.values() for entry in each.entries]
    source_bytes = SourceBytes([*load.entries, *siblings], used)
    once = _named_once(model)
    candidates: _Candidates = []
    refused: dict[str, str] = {}
    for name, module in model.named_modules():
        wanted = _weights_of(module)
        params = {key: module._parameters[key] for key in wanted}
        if not wanted or not all(isinstance(param, LazyTensor) and id(param) in once for param in params.values()):
            continue
        try:
            weights = {}
            for key, param in params.items():
                to_make = made.get(f"{name}.{key}")
                weight, lazy = pack(param, dtype or param.dtype, wanted[key], source_bytes, always=to_make is not None)
                weights[key] = weight, quantised(to_make.values, weight, to_make.quantisation) if to_make else lazy
        except NotQuantised:
            continue
        except NotPackable as why:
            refused[name] = str(why)
        else:
            candidates.append((name, module, weights))
    _keep_whole(candidates, refused)
    _refuse_unmade(made, {f"{name}.{key}" for name, _, weights in candidates for key in weights}, refused)
    for _, module, weights in candidates:
        _install(module, weights)
    for name, module in model.named_modules():
        for param in module._parameters.values():
            if name not in refused and any(map(_is_packed_dtype, _entries_of(param))):
                if param.dtype != torch.uint8:
                    refused[name] = f"a {type(module).__name__} has no forward pass for packed weights, or is tied"
    if load.coordinator.is_main:
        _report(candidates, refused, method, quantises=quantiser is not None)
    if not candidates:
        return
    install_model_rows()
    model._hf_zero_stream_dequantised = sorted(refused)
    # Else transformers would quantise embeddings and the like when it reverses its conversions, to save them.
    model._weight_conversions = list(without_quantizer(getattr(model, "_weight_conversions", None) or []))
    for param in model.parameters():
        if isinstance(param, LazyTensor):
            param.requires_grad_(False)


def _refuse_lost(model: PreTrainedModel, loading_info: Any) -> None:
    """Raise if weights are missing of modules whose tensors in the checkpoint transformers did not know how to use."""
    for name, text in (loading_info.conversion_errors or {}).items():
        lines = [line for line in str(text).splitlines() if not line.startswith("Error")]  # of a traceback
        reason = (lines or [text])[-1].rstrip(".")
        raise UnsupportedError(
            f"{name}: transformers cannot dequantise it from the tensors in this checkpoint, which keeping it "
            f"quantised relies on: {reason}. Load with keep_quantized=False."
        )
    unexpected = sorted(loading_info.unexpected_keys)
    for name, module in model.named_modules():
        missing = [key for key in _weights_of(module) if f"{name}.{key}" in loading_info.missing_keys]
        unused = [key for key in unexpected if key.startswith(f"{name}.")]
        if missing and unused:
            raise UnsupportedError(
                f"{name}.{missing[0]}: transformers cannot dequantise it from the tensors in this checkpoint, such as "
                f"{unused[0]}, which keeping it quantised relies on. Load with keep_quantized=False."
            )


def _refuse_without_scales(model: PreTrainedModel) -> None:
    """Raise if quantised tensors of the checkpoint would be taken for values: transformers casts them as they are."""
    for name, param in model.named_parameters():
        if not isinstance(param, LazyTensor) or is_computed(param.view_of_node):
            continue
        for entry in _entries_of(param):
            if _is_packed_dtype(entry):
                raise CheckpointError(
                    f"{name}: the checkpoint has {entry.name} in {entry.dtype}, and no scales for it. Without them "
                    "its numbers are not the values. Repair the checkpoint; keep_quantized=False loads the numbers as "
                    "they are."
                )


def _refuse_unmade(made: Mapping[str, Any], packed: Set[str], refused: Mapping[str, str]) -> None:
    """Raise if weights were to be quantised that have no place for their bytes: they have no other values."""
    if unmade := sorted(made.keys() - packed):
        why = refused.get(unmade[0].rpartition(".")[0], "it is tied to another parameter")
        raise UnsupportedError(
            f"{unmade[0]} cannot be quantised while it is loaded: {why}. Name its module in llm_int8_skip_modules."
        )


def _report(candidates: _Candidates, refused: Mapping[str, str], method: str, *, quantises: bool) -> None:
    if candidates:
        kept = [weight for _, _, weights in candidates for weight, _ in weights.values()]
        nbytes = sum(weight.row_bytes * len(weight.rows) for weight in kept)
        verb, instead = "keeps", "pass a quantization_config with dequantize=True"
        if quantises:
            verb, instead = "quantises while loading, and keeps,", "leave quantization_config out"
        logger.warning(
            f"hf_zero_stream {verb} {len(kept)} weights quantised ({method}, {nbytes / 2**30:.2f} GiB in all), "
            "partitioned and frozen, as is the rest of the model: train adapters beside them. To train the weights "
            f"themselves, {instead}."
        )
    if refused:
        name, why = next(iter(refused.items()))
        logger.warning(
            f"hf_zero_stream dequantises {len(refused)} modules of this checkpoint in {method}, which then take the "
            f"memory of their values, among them {name}: {why}."
        )


def _named_once(model: nn.Module) -> set[int]:
    """The parameters that have one name; tied ones have several."""
    found = Counter(id(param) for _, param in model.named_parameters(remove_duplicate=False))
    return {each for each, count in found.items() if count == 1}


def _entries_of(*tensors: torch.Tensor) -> Iterator[TensorEntry]:
    """The tensors of the checkpoint that lazy `tensors` come from."""
    return entries_of(tensor.view_of_node for tensor in tensors if isinstance(tensor, LazyTensor))


def _is_packed_dtype(entry: TensorEntry) -> bool:
    return entry.dtype.itemsize == 1 or not entry.dtype.is_floating_point


def _keep_whole(candidates: _Candidates, refused: dict[str, str]) -> None:
    """Leave out modules with tensors that others need too: of these the bytes could not be written back."""
    while faulty := not_whole(weight for _, _, weights in candidates for weight, _ in weights.values()):
        for candidate in list(candidates):
            name, _, weights = candidate
            rows = (row for weight, _ in weights.values() for row in weight.rows)
            shared = next((each.entry.name for row in rows for each in row if each.entry.name in faulty), None)
            if shared is not None:
                candidates.remove(candidate)
                refused[name] = f"{shared} belongs to other weights too, or to none"


def _weights_of(module: nn.Module) -> dict[str, bool]:
    """The parameters of `module` that can be packed, and whether they are stacks of the experts' matrices."""
    if type(module) is nn.Linear:
        return {"weight": False}
    if all(hasattr(module, name) for name in ("has_gate", "is_transposed", "_apply_gate")):
        names = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
        if all(isinstance(module._parameters.get(name), torch.Tensor) for name in names):
            return dict.fromkeys(names, True)
    return {}


def _install(module: nn.Module, weights: Mapping[str, tuple[PackedWeight, LazyTensor]]) -> None:
    cls: Any = type(module)
    module.__class__ = PackedLinear if cls is nn.Linear else _packed_experts(cls)
    for key, (weight, lazy) in weights.items():
        param = nn.Parameter(lazy, requires_grad=False)
        copy_attributes(module._parameters[key], param)
        module._parameters[key] = param
        note_packed(module, key, weight)


@functools.cache
def _packed_experts(cls: type[nn.Module]) -> type[nn.Module]:
    """A class of experts with a forward pass for packed weights; by its names still the model's own."""
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls.__name__, (cls,), {**names, "forward": _experts_forward})


def _experts_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Compute transformers' ``grouped_mm_experts_forward``, in its order, for the experts that tokens go to."""
    packed, beside = packed_weights(self), factors_beside(self)
    up = "gate_up_proj" if self.has_gate else "up_proj"
    count = len(packed[up].rows)
    experts, order = torch.sort(top_k_index.reshape(-1))
    ends = torch.bincount(experts, minlength=count).cumsum(0).tolist()

    def product(rows: torch.Tensor, key: str) -> torch.Tensor:
        result = grouped_product(rows, getattr(self, key), packed[key], ends, self.is_transposed)
        for factors in beside.get(key, ()):
            result = result + factors.product(rows, ends).to(result.dtype)
        return result + getattr(self, f"{key}_bias")[experts] if self.has_bias else result

    between = product(hidden_states[order // top_k_index.size(-1)], up)
    rows = product(self._apply_gate(between) if self.has_gate else self.act_fn(between), "down_proj")
    if getattr(self, "has_post_expert_norm", False):
        rows = self.post_expert_norm(rows)
    rows = rows * top_k_weights.reshape(-1)[order].unsqueeze(-1)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.numel(), device=order.device)
    return rows[back].view(*top_k_index.shape, -1).sum(dim=1).to(hidden_states.dtype)
