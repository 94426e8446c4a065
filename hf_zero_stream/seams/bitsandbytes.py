"""Checkpoints that bitsandbytes has quantised: NF4 and FP4, with double quantisation or without, and LLM.int8().

transformers' own quantizer puts bitsandbytes' modules into the model, which ZeRO-3 cannot partition. This one leaves
the model as it is and dequantises, on lazy tensors, as bitsandbytes does; it does not need the package.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig
from transformers.core_model_loading import ConversionOps
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from ..checkpoint.lazy import LazyTensor
from ..errors import CheckpointError


__all__ = ["STATE", "dequantised_4bit", "dequantised_8bit", "dequantising_quantizer", "linear_modules"]

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

    def convert(self, input_dict: Any, full_layer_name: str | None = None, **kwargs: Any) -> dict[str, Any]:
        lists = {key: value if isinstance(value, list) else [value] for key, value in input_dict.items()}
        weights = [key for key in lists if key.rpartition(".")[2] == "weight"]
        result: dict[str, Any] = {}
        for key in weights:
            beside = self._beside(key, lists)
            values = [
                self._cast(self._dequantised(key, value, {name: each[number] for name, each in beside.items()}))
                if beside
                else value
                for number, value in enumerate(lists[key])
            ]
            result[key] = values
        if weights == ["weight"]:
            return {full_layer_name or "weight": result["weight"][0]}
        return result

    def _cast(self, values: Any) -> Any:
        return values.to(self.hf_quantizer.dtype) if self.hf_quantizer.casts else values

    @staticmethod
    def _beside(key: str, lists: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        raise NotImplementedError

    @staticmethod
    def _dequantised(key: str, weight: Any, beside: Mapping[str, Any]) -> Any:
        raise NotImplementedError


class _Dequantize4bit(_Dequantize):
    @staticmethod
    def _beside(key: str, lists: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        return {name.removeprefix(f"{key}."): each for name, each in lists.items() if name.startswith(f"{key}.")}

    @staticmethod
    def _dequantised(key: str, weight: Any, beside: Mapping[str, Any]) -> Any:
        """Two values are in a byte, the first one in its upper half; each is an index into ``quant_map``.

        They are scaled by ``absmax``, one for each block of values. With double quantisation these are indices too.
        """
        state_key = next((name for name in beside if name.startswith(STATE)), None)
        if state_key is None or not {"absmax", "quant_map"} <= beside.keys():
            raise CheckpointError(f"{key}: expected absmax, quant_map and {STATE}*; found {', '.join(beside)}.")
        return dequantised_4bit(weight, beside, state_key, json.loads(bytes(beside[state_key].tolist())))


def dequantised_4bit(weight: Any, beside: Mapping[str, Any], state_key: str, state: Mapping[str, Any]) -> Any:
    """The lazy values of a 4-bit weight; `state` is what the tensor `state_key` beside it describes.

    Its ``nested_offset`` is looked up when values are computed: it may not be known before.
    """
    block, shape, has_inner = int(state["blocksize"]), tuple(state["shape"]), "nested_offset" in state
    nested, dtype = int(state.get("nested_blocksize", 1)), getattr(torch, state["dtype"])

    def dequantise(origin: tuple[int, ...], packed: Any, absmax: Any, table: Any, _: Any, *inner: Any) -> Any:
        packed = packed.contiguous().view(-1).view(torch.uint8)
        index = torch.stack([packed >> 4, packed & 15], dim=-1).view(-1)
        values = table[index.int()]
        if inner:
            first = origin[0] // block
            numbers = torch.arange(first, first + absmax.numel(), device=absmax.device)
            scales = inner[0][numbers // nested - first // nested]
            absmax = inner[1][absmax.int()] * scales + state["nested_offset"]
        return (values * absmax.repeat_interleave(block)[: values.numel()]).to(dtype)

    inputs = [weight, beside["absmax"], beside["quant_map"], beside[state_key]]
    parts: list[dict[int, tuple[int, Fraction | int]]] = [
        {0: (0 if weight.shape[0] > 1 else 1, Fraction(1, 2 * weight.element_size()))},
        {0: (0, Fraction(1, block))},
        {},
        {},
    ]
    if has_inner:
        inputs += [beside["nested_absmax"], beside["nested_quant_map"]]
        parts += [{0: (0, Fraction(1, block * nested))}, {}]
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


class _Dequantize8bit(_Dequantize):
    @staticmethod
    def _beside(key: str, lists: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        name = f"{key.removesuffix('weight')}SCB"
        return {"SCB": lists[name]} if name in lists else {}

    @staticmethod
    def _dequantised(key: str, weight: Any, beside: Mapping[str, Any]) -> Any:
        return dequantised_8bit(weight, beside["SCB"])


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
        return {"dequantize": _Dequantize4bit}


class _Quantizer8bit(_Quantizer4bit):
    serialized_names = {"weight": ["weight", "SCB", "weight_format"]}

    def get_load_operations(self) -> dict[str, Any]:
        return {"dequantize": _Dequantize8bit}
