"""Checkpoints that bitsandbytes has quantised: NF4 and FP4, with double quantisation or without, and LLM.int8().

transformers' own quantizer puts bitsandbytes' modules into the model, which ZeRO-3 cannot partition. This one leaves
the model as it is and dequantises, on lazy tensors, as bitsandbytes does; it does not need the package.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from fractions import Fraction
from math import ceil, prod
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig
from transformers.core_model_loading import ConversionOps
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from ...errors import CheckpointError
from ...plugin_api import HostTensor, LazyTensor


STATE = "quant_state.bitsandbytes__"
_INT8_STEP = 7.874015718698502e-3  # bitsandbytes' 1 / 127


def dequantising_quantizer(fields: Mapping[str, Any], *, casts: bool) -> HfQuantizer:
    """A quantizer for a checkpoint whose ``quantization_config`` has these `fields`.

    `casts`: weights get the dtype of the model; else they keep that of their values, and somebody else casts them.
    """
    config = BitsAndBytesConfig.from_dict(dict(fields))
    config.dequantize = True
    quantizer = (_Quantizer8bit if config.load_in_8bit else _Quantizer4bit)(config, pre_quantized=True)
    quantizer.casts = casts
    return quantizer


def linear_modules(model: Any, config: BitsAndBytesConfig) -> tuple[set[str], set[str]]:
    """The linear layers of an empty `model` that `config` quantises, and those that have taken a ``Conv1D``'s place.

    As with transformers' own quantizer, a ``Conv1D`` (GPT-2's) becomes a linear layer, with a transposed weight.
    """
    left_out = HfQuantizer.get_modules_to_not_convert(model, config.llm_int8_skip_modules, model._keep_in_fp32_modules)
    modules, transposed = set(), set()
    for name, module in list(model.named_modules()):
        if not should_convert_module(name, left_out):
            continue
        if isinstance(module, Conv1D):
            inputs, outputs = module.weight.shape
            linear = nn.Linear(inputs, outputs, bias=False, device="meta", dtype=module.weight.dtype)
            linear.bias = module.bias
            model.set_submodule(name, linear)
            transposed.add(name)
        if name in transposed or type(module) is nn.Linear:
            modules.add(name)
    return modules, transposed


class _Dequantize(ConversionOps):
    """Dequantises the weights of one converter, each by the tensors beside it; others pass through."""

    def __init__(self, hf_quantizer: Any) -> None:
        self.hf_quantizer = hf_quantizer

    def convert(
        self, input_dict: Any, full_layer_name: str | None = None, model: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        lists = {key: value if isinstance(value, list) else [value] for key, value in input_dict.items()}
        weights = [key for key in lists if key.rpartition(".")[2] == "weight"]
        result: dict[str, Any] = {}
        for key in weights:
            siblings = self.hf_quantizer.siblings(key, lists)
            values = lists[key]
            if siblings:
                fields = ({name: each[number] for name, each in siblings.items()} for number in range(len(values)))
                values = [self.hf_quantizer.dequantised(key, *each) for each in zip(values, fields, strict=True)]
            # Weights that are not quantised come here, too.
            if self.hf_quantizer.casts and (siblings or not _stays_in_fp32(full_layer_name or "", model)):
                values = [value.to(self.hf_quantizer.dtype) for value in values]
            result[key] = values
        if weights == ["weight"]:
            return {full_layer_name or "weight": result["weight"][0]}
        return result


def _stays_in_fp32(name: str, model: Any) -> bool:
    lists = (getattr(model, f"_keep_in_fp32_modules{suffix}", None) or () for suffix in ("", "_strict"))
    return any(module in name for modules in lists for module in modules)


def _check_sizes(key: str, weight: Any, siblings: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Raise a CheckpointError if tensors have other sizes than `state` says: values would get others' scales."""
    numel, nested = prod(state["shape"]), "nested_offset" in state
    blocks = ceil(numel / state["blocksize"])
    expected = {"absmax": blocks, "quant_map": 16}
    if nested:
        expected |= {"nested_absmax": ceil(blocks / state["nested_blocksize"]), "nested_quant_map": 256}
    found = {name: siblings[name].numel() if name in siblings else 0 for name in expected}
    found["bytes"], expected["bytes"] = weight.numel() * weight.element_size(), ceil(numel / 2)
    for name, count in expected.items():
        if found[name] != count:
            raise CheckpointError(
                f"{key}: expected {name} to have {count} elements, of {numel} values in blocks of "
                f"{state['blocksize']}; found {found[name]}."
            )


def dequantised_4bit(
    weight: Any, siblings: Mapping[str, Any], state: Mapping[str, Any], offset: LazyTensor | None = None
) -> Any:
    """The lazy values of a 4-bit weight, which `state` describes, with the tensors of its `siblings`.

    Without `offset` the ``nested_offset`` of `state` is looked up when values are computed: it may be unknown before.
    """
    block, shape, has_inner = int(state["blocksize"]), tuple(state["shape"]), "nested_offset" in state
    nested, dtype = int(state.get("nested_blocksize", 1)), getattr(torch, state["dtype"])
    to_look_up = state if offset is None else None  # what a function encloses must be alike for all experts

    def dequantise(origin: tuple[int, ...], packed: Any, absmax: Any, table: Any, *inner: Any) -> Any:
        packed = packed.contiguous().view(-1).view(torch.uint8)
        index = torch.stack([packed >> 4, packed & 15], dim=-1).view(-1)
        values = table[index.int()]
        if inner:
            first = origin[0] // block
            numbers = torch.arange(first, first + absmax.numel(), device=absmax.device)
            scales = inner[0][numbers // nested - first // nested]
            absmax = inner[1][absmax.int()] * scales
            absmax = absmax + (inner[2] if to_look_up is None else to_look_up["nested_offset"])
        return (values * absmax.repeat_interleave(block)[: values.numel()]).to(dtype)

    inputs = [weight, siblings["absmax"], siblings["quant_map"]]
    parts: list[dict[int, tuple[int, Fraction | int]]] = [
        {0: (0 if weight.shape[0] > 1 else 1, Fraction(1, 2 * weight.element_size()))},
        {0: (0, Fraction(1, block))},
        {},
    ]
    if has_inner:
        inputs += [siblings["nested_absmax"], siblings["nested_quant_map"], *([] if offset is None else [offset])]
        parts += [{0: (0, Fraction(1, block * nested))}, {}, *([] if offset is None else [{}])]
    flat = LazyTensor.of_blocks(
        dequantise,
        tuple(inputs),
        sizes=(torch.Size(shape).numel(),),
        dtype=dtype,
        blocks=(block,),
        parts=tuple(parts),
    )
    return flat.view(shape)


def dequantised_8bit(weight: Any, scales: Any) -> Any:
    """The lazy values of a weight of LLM.int8(), whose rows have `scales`."""
    return weight * scales.view(-1, 1) * _INT8_STEP


class _Quantizer4bit(HfQuantizer):
    requires_calibration = casts = False
    dtype: torch.dtype | None = None
    serialized_names = {
        "weight": [
            "weight",
            "weight.nested_absmax",
            "weight.nested_quant_map",
            "weight.quant_map",
            "weight.absmax",
            f"weight.{STATE}nf4",
            f"weight.{STATE}fp4",
        ]
    }

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        self.dtype = dtype
        return dtype

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        linear_modules(model, self.quantization_config)

    def get_load_operations(self) -> dict[str, Any]:
        return {"dequantize": _Dequantize}

    @staticmethod
    def siblings(key: str, lists: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        """Select the tensors that :meth:`dequantised` takes for the weight `key` from those of one converter."""
        return {name.removeprefix(f"{key}."): each for name, each in lists.items() if name.startswith(f"{key}.")}

    @staticmethod
    def dequantised(key: str, weight: Any, siblings: Mapping[str, Any]) -> Any:
        """Two values are in a byte, the first one in its upper half; each is an index into ``quant_map``.

        They are scaled by ``absmax``, one for each block of values. With double quantisation these are indices too.
        """
        state_key = next((name for name in siblings if name.startswith(STATE)), None)
        if state_key is None or not {"absmax", "quant_map"} <= siblings.keys():
            raise CheckpointError(f"{key}: expected absmax, quant_map and {STATE}*; found {', '.join(siblings)}.")
        state = json.loads(bytes(siblings[state_key].tolist()))
        _check_sizes(key, weight, siblings, state)
        offset = torch.tensor([state.get("nested_offset", 0.0)])
        return dequantised_4bit(weight, siblings, state, LazyTensor.whole(HostTensor.of(offset), weight.reader))


class _Quantizer8bit(_Quantizer4bit):
    serialized_names = {"weight": ["weight", "SCB", "weight_format"]}

    @staticmethod
    def siblings(key: str, lists: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        name = f"{key.removesuffix('weight')}SCB"
        return {"SCB": lists[name]} if name in lists else {}

    @staticmethod
    def dequantised(key: str, weight: Any, siblings: Mapping[str, Any]) -> Any:
        return dequantised_8bit(weight, siblings["SCB"])
