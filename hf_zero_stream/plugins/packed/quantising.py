"""Quantises by bitsandbytes while loading: NF4 and FP4, with double quantisation or without, and LLM.int8().

transformers' own quantizer makes each weight whole and quantises it, on every rank. Here the weight stays lazy, and
the ranks quantise it together (:mod:`.quantised_rows`), by the package's own functions. The result has the tensors
that a quantised checkpoint would have. The weight is dequantised, lazily, from their placeholders, and packed as if
it came from such a checkpoint.
"""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from math import ceil, prod
from typing import Any, NamedTuple

import torch
from transformers import BitsAndBytesConfig
from transformers.core_model_loading import ConversionOps
from transformers.quantizers import base, quantizer_bnb_4bit, quantizer_bnb_8bit

from ...errors import UnsupportedError, refuse_unknown_version
from ...plugin_api import FileTensor, LazyTensor, TensorEntry, entries_of
from .bitsandbytes import STATE, dequantised_4bit, dequantised_8bit, linear_modules
from .quantised_rows import Quantisation


_LONG = -2.2250738585072014e-308
"""A number with as many digits as any has in a text."""


def wanted_config(quantization_config: Any) -> BitsAndBytesConfig | None:
    """The `quantization_config` of a ``from_pretrained``, an object or a mapping, if it is one of bitsandbytes."""
    if isinstance(quantization_config, Mapping):
        fields = dict(quantization_config)
        is_known = fields.get("load_in_4bit") or fields.get("load_in_8bit")
        quantization_config = BitsAndBytesConfig.from_dict(fields) if is_known else None
    return quantization_config if isinstance(quantization_config, BitsAndBytesConfig) else None


def is_quantisable(config: BitsAndBytesConfig) -> bool:
    """Whether weights are quantised by `config` when they are loaded."""
    has_ops = hasattr(base.HfQuantizer, "get_load_operations")
    return has_ops and bool(config.is_quantizable()) and not (config.load_in_8bit and config.llm_int8_has_fp16_weight)


class PlannedQuantisation(NamedTuple):
    """A weight that is to be quantised: its `values`, the placeholders of its tensors, and how it is quantised."""

    values: LazyTensor
    entries: Sequence[TensorEntry]
    quantisation: Quantisation


class QuantisingQuantizer(base.HfQuantizer):
    """Gives transformers dequantised lazy weights; :attr:`made` says by the parameter's name how they are made."""

    requires_calibration = False

    def __init__(self, config: BitsAndBytesConfig) -> None:
        super().__init__(config, pre_quantized=False)
        self.made: dict[str, PlannedQuantisation] = {}
        self._modules: set[str] = set()
        self._transposed: set[str] = set()
        self._used: set[str] = set()

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """As transformers' own quantizer, whose errors say what is not installed."""
        in_8bit = self.quantization_config.load_in_8bit
        cls = quantizer_bnb_8bit.Bnb8BitHfQuantizer if in_8bit else quantizer_bnb_4bit.Bnb4BitHfQuantizer
        cls(self.quantization_config, pre_quantized=False).validate_environment(*args, **kwargs)

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        self._modules, self._transposed = linear_modules(model, self.quantization_config)

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        module, _, key = param_name.rpartition(".")
        return key == "weight" and module in self._modules

    def get_quantize_ops(self) -> ConversionOps:
        return _Quantise(self)

    def postprocess_model(self, model: Any, **kwargs: Any) -> None:
        """The model has plain parameters; :mod:`.packing` keeps the config where some are packed."""
        self.remove_quantization_config(model)

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True

    def dequantised(self, param_name: str, values: LazyTensor, shape: torch.Size) -> LazyTensor:
        """Quantise `values` lazily and dequantise them; those of another `shape` stay as they are.

        transformers reports that these do not fit.
        """
        module = param_name.rpartition(".")[0]
        if module in self._transposed:  # of a ``Conv1D`` in the checkpoint
            values = values.T
        if values.shape != shape:
            self._modules.discard(module)
            return values
        sources = list(entries_of([values.view_of_node]))
        # The name in the checkpoint, under which a save writes it, if it is one tensor there.
        name = sources[0].name if len(sources) == 1 and prod(sources[0].shape) == values.numel() else param_name
        name = param_name if name in self._used else name
        self._used.add(name)
        make = _make_8bit if self.quantization_config.load_in_8bit else _make_4bit
        result, self.made[param_name] = make(self.quantization_config, name, values)
        return result


class _Quantise(ConversionOps):
    """Replaces a weight by what it is once it has been quantised."""

    def __init__(self, hf_quantizer: QuantisingQuantizer) -> None:
        self.hf_quantizer = hf_quantizer

    def convert(self, input_dict: Any, model: Any = None, **kwargs: Any) -> dict[str, Any]:
        values = {name: value[0] if isinstance(value, list) else value for name, value in input_dict.items()}
        return {
            name: self.hf_quantizer.dequantised(name, value, model.get_parameter(name).shape)
            for name, value in values.items()
        }


def _placeholder(
    name: str, dtype: torch.dtype, shape: Sequence[int], values: LazyTensor
) -> tuple[TensorEntry, LazyTensor]:
    entry = TensorEntry(name, -1, dtype, tuple(shape), 0, prod(shape) * dtype.itemsize)
    return entry, LazyTensor.whole(FileTensor(entry.shape, dtype, entry), values.reader)


# ------------------------------------------------------------------------------------------------------- 4 bits


def _make_4bit(config: BitsAndBytesConfig, name: str, values: LazyTensor) -> tuple[LazyTensor, PlannedQuantisation]:
    quantisation = _Quantise4bit(config, name, tuple(values.shape), values.dtype)
    found = {key: _placeholder(key, dtype, shape, values) for key, (dtype, shape) in quantisation.tensors().items()}
    siblings = {key.removeprefix(f"{name}."): lazy for key, (_, lazy) in found.items() if key != name}
    result = dequantised_4bit(found[name][1], siblings, quantisation.state)
    return result, PlannedQuantisation(values, [entry for entry, _ in found.values()], quantisation)


class _Quantise4bit:
    """Quantises one weight of `shape` into 4 bits: in blocks, and their scales too, all together, if `is_double`."""

    def __init__(self, config: BitsAndBytesConfig, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._kind, self._storage = config.bnb_4bit_quant_type, config.bnb_4bit_quant_storage
        self._is_double = config.bnb_4bit_use_double_quant
        self._name, self._shape, self._dtype = name, torch.Size(shape), dtype
        self.unit = _block_size()
        if (packed := -(-prod(shape) // 2)) % self._storage.itemsize:
            raise UnsupportedError(
                f"{name}: expected bnb_4bit_quant_storage of a size that divides its {packed} bytes; got "
                f"{self._storage}. Use torch.uint8."
            )
        template = _template(self._kind, self._is_double, self.unit, dtype)
        state = json.loads(bytes(template[f"{STATE}{self._kind}"].tolist()))
        self.state_key = f"{STATE}{self._kind}"
        self.state: dict[str, Any] = {**state, "shape": list(shape)}
        """What the tensor of this name describes; its ``nested_offset`` depends on the values."""
        self._template = template

    def tensors(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """The dtype and shape of each tensor of the checkpoint; the text that describes it is at its longest."""
        blocks = ceil(self._shape.numel() / self.unit)
        packed = -(-self._shape.numel() // 2) // self._storage.itemsize
        sizes: dict[str, tuple[int, ...]] = {"absmax": (blocks,)}
        if self._is_double:
            sizes["nested_absmax"] = (ceil(blocks / int(self.state["nested_blocksize"])),)
        sizes[self.state_key] = (len(json.dumps(self.state)),)
        found: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {self._name: (self._storage, (packed, 1))}
        for key, value in self._template.items():
            found[f"{self._name}.{key}"] = (value.dtype, sizes.get(key, tuple(value.shape)))
        return found

    def nbytes(self, numel: int) -> tuple[int, int]:
        return 4 * ceil(numel / self.unit), -(-numel // 2)

    def quantise(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        packed, state = _functional().quantize_4bit(values, blocksize=self.unit, quant_type=self._kind)
        return state.absmax.view(torch.uint8), packed.view(-1)

    def join(self, fields: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        absmax, packed = fields[0].view(torch.float32), fields[1]
        state = _joined_state(absmax, self._shape, self._dtype, self.unit, self._kind, self._is_double)
        found = {self._name: packed.view(self._storage).unsqueeze(1)}
        return found | {f"{self._name}.{key}": value for key, value in state.as_dict(packed=True).items()}

    def record_quant_state(self, pieces: Mapping[str, torch.Tensor]) -> dict[str, int]:
        name = f"{self._name}.{self.state_key}"
        text = bytes(pieces[name].tolist()).rstrip(b"\0")
        self.state.update(json.loads(text))
        return {name: len(text)}


def _functional() -> Any:
    return importlib.import_module("bitsandbytes.functional")


@functools.cache
def _block_size() -> int:
    size: int = importlib.import_module("bitsandbytes.nn").Params4bit(torch.empty(0)).blocksize
    return size


def _joined_state(
    absmax: torch.Tensor, shape: torch.Size, dtype: torch.dtype, block: int, kind: str, is_double: bool
) -> Any:
    """The ``QuantState`` that ``quantize_4bit`` makes of a weight whose blocks have these scales."""
    functional = _functional()
    code = functional.get_4bit_type(kind, device=absmax.device)
    inner: dict[str, Any] = {}
    if is_double:
        offset = absmax.mean()
        absmax, state2 = functional.quantize_blockwise(absmax - offset, blocksize=256)
        inner = {"offset": offset, "state2": state2}
    return functional.QuantState(
        absmax=absmax, shape=shape, dtype=dtype, blocksize=block, code=code, quant_type=kind, **inner
    )


@functools.cache
def _template(kind: str, is_double: bool, block: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the tensors of a quantised weight beside its bytes; the offset in its description has its full length.

    Raises a VersionError if the package does not quantise as :class:`_Quantise4bit` does.
    """
    values = torch.linspace(-3, 5, 300 * block, dtype=torch.float32).sin().to(dtype)
    _, state = _functional().quantize_4bit(
        values, blocksize=block, quant_type=kind, compress_statistics=is_double, quant_storage=torch.uint8
    )
    _, plain = _functional().quantize_4bit(values, blocksize=block, quant_type=kind)
    joined = _joined_state(plain.absmax, values.shape, dtype, block, kind, is_double)
    found, ours = state.as_dict(packed=True), joined.as_dict(packed=True)
    if found.keys() != ours.keys() or not all(torch.equal(found[key], ours[key]) for key in found):
        refuse_unknown_version("bitsandbytes", ["quantize_4bit with the scales that quantize_blockwise gives"])
    if is_double:
        state.offset = torch.tensor(_LONG, dtype=torch.float64)
    template: dict[str, torch.Tensor] = state.as_dict(packed=True)
    return template


# ------------------------------------------------------------------------------------------------------- 8 bits


def _make_8bit(config: BitsAndBytesConfig, name: str, values: LazyTensor) -> tuple[LazyTensor, PlannedQuantisation]:
    prefix = name.removesuffix("weight")
    weight, of_weight = _placeholder(name, torch.int8, values.shape, values)
    scales, of_scales = _placeholder(f"{prefix}SCB", torch.float32, values.shape[:1], values)
    row_format, _ = _placeholder(f"{prefix}weight_format", torch.uint8, (), values)
    quantisation = _Quantise8bit(values.shape[1], weight.name, scales.name, row_format.name)
    return dequantised_8bit(of_weight, of_scales), PlannedQuantisation(
        values, [weight, scales, row_format], quantisation
    )


class _Quantise8bit:
    """Quantises one weight into 8 bits: row by row, of `unit` values."""

    def __init__(self, unit: int, weight: str, scales: str, row_format: str) -> None:
        self.unit = unit
        self._names = (weight, scales, row_format)

    def nbytes(self, numel: int) -> tuple[int, int]:
        return 4 * (numel // self.unit), numel

    def quantise(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = values.view(-1, self.unit).to(torch.float16)
        quantised, scales, _ = _functional().int8_vectorwise_quant(rows)
        return scales.view(torch.uint8), quantised.view(-1).view(torch.uint8)

    def join(self, fields: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        tensors = fields[1].view(torch.int8), fields[0].view(torch.float32), torch.tensor(0, dtype=torch.uint8)
        return dict(zip(self._names, tensors, strict=True))

    def record_quant_state(self, pieces: Mapping[str, torch.Tensor]) -> dict[str, int]:
        return {}


def sources_of(made: Mapping[str, PlannedQuantisation]) -> Iterator[TensorEntry]:
    """The tensors of the checkpoint that are quantised."""
    return entries_of(each.values.view_of_node for each in made.values())
