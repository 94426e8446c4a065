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
from transformers import BitsAndBytesConfig
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.base import HfQuantizer

from ..checkpoint.lazy import LazyTensor
from ..errors import CheckpointError


__all__ = ["dequantising_quantizer"]

_STATE = "quant_state.bitsandbytes__"
_INT8_STEP = 7.874015718698502e-3  # bitsandbytes' 1 / 127


def dequantising_quantizer(fields: Mapping[str, Any]) -> HfQuantizer:
    """A quantizer for a checkpoint whose ``quantization_config`` has these `fields`."""
    config = BitsAndBytesConfig.from_dict(dict(fields))
    config.dequantize = True
    quantizer: HfQuantizer = (_Quantizer8bit if config.load_in_8bit else _Quantizer4bit)(config, pre_quantized=True)
    return quantizer


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
                self._dequantised(key, value, {name: each[number] for name, each in beside.items()})
                if beside
                else value
                for number, value in enumerate(lists[key])
            ]
            result[key] = values
        if weights == ["weight"]:
            return {full_layer_name or "weight": result["weight"][0]}
        return result

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
        state_key = next((name for name in beside if name.startswith(_STATE)), None)
        if state_key is None or not {"absmax", "quant_map"} <= beside.keys():
            raise CheckpointError(f"{key}: expected absmax, quant_map and {_STATE}*; found {', '.join(beside)}.")
        state = json.loads(bytes(beside[state_key].tolist()))
        block, shape, offset = int(state["blocksize"]), tuple(state["shape"]), state.get("nested_offset")
        nested, dtype = int(state.get("nested_blocksize", 1)), getattr(torch, state["dtype"])

        def dequantise(origin: tuple[int, ...], packed: Any, absmax: Any, table: Any, _: Any, *inner: Any) -> Any:
            index = torch.stack([packed.view(-1) >> 4, packed.view(-1) & 15], dim=-1).view(-1)
            values = table[index.int()]
            if inner:
                first = origin[0] // block
                numbers = torch.arange(first, first + absmax.numel(), device=absmax.device)
                scales = inner[0][numbers // nested - first // nested]
                absmax = inner[1][absmax.int()] * scales + offset
            return (values * absmax.repeat_interleave(block)[: values.numel()]).to(dtype)

        inputs = [weight, beside["absmax"], beside["quant_map"], beside[state_key]]
        parts: list[dict[int, tuple[int, Fraction | int]]] = [
            {0: (0, Fraction(weight.element_size(), 2))} if weight.shape[0] > 1 else {0: (1, Fraction(1, 2))},
            {0: (0, Fraction(1, block))},
            {},
            {},
        ]
        if offset is not None:
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


class _Dequantize8bit(_Dequantize):
    @staticmethod
    def _beside(key: str, lists: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        name = f"{key.removesuffix('weight')}SCB"
        return {"SCB": lists[name]} if name in lists else {}

    @staticmethod
    def _dequantised(key: str, weight: Any, beside: Mapping[str, Any]) -> Any:
        return weight * beside["SCB"].view(-1, 1) * _INT8_STEP


class _Quantizer4bit(HfQuantizer):
    requires_calibration = False
    serialized_names = {
        "weight": [
            "weight",
            "weight.nested_absmax",
            "weight.nested_quant_map",
            "weight.quant_map",
            "weight.absmax",
            f"weight.{_STATE}nf4",
            f"weight.{_STATE}fp4",
        ]
    }

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True

    def get_load_operations(self) -> dict[str, Any]:
        return {"dequantize": _Dequantize4bit}


class _Quantizer8bit(_Quantizer4bit):
    serialized_names = {"weight": ["weight", "SCB", "weight_format"]}

    def get_load_operations(self) -> dict[str, Any]:
        return {"dequantize": _Dequantize8bit}
