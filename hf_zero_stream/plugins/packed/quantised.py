"""Dequantises checkpoints by transformers' own arithmetic, a piece at a time.

transformers' ops make whole tensors, and fuse those of a mixture's experts. Here each result is a lazy tensor, which
calls the op's own function on slices of its inputs when a rank reads its part.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ...errors import UnsupportedError
from ...plugin_api import LazyTensor, Original, Session, in_session, installed
from . import COMPRESSED


DequantisedPart = dict[int, tuple[int, Fraction | int]]
"""Where an input holds each dimension of the result; see :class:`...checkpoint.nodes.Blockwise`."""


# -------------------------------------------------------------------------------------------------- gpt-oss's MXFP4


def convert_moe_packed_tensors(original: Original, blocks: Any, scales: Any, **kwargs: Any) -> Any:
    """Blocks of shape [experts, rows, groups, bytes] and scales of [experts, rows, groups] give
    [experts, groups * 2 * bytes, rows]: the result is transposed, and each byte holds two values.
    """
    if not isinstance(blocks, LazyTensor):
        return original(blocks, scales, **kwargs)
    experts, rows, groups, nbytes = blocks.shape
    if blocks.shape[:-1] != scales.shape:
        raise ValueError(f"expected scales of shape {tuple(blocks.shape[:-1])}; found {tuple(scales.shape)}")
    part: DequantisedPart = {0: (0, 1), 1: (2, Fraction(1, 2 * nbytes)), 2: (1, 1)}
    return LazyTensor.of_blocks(
        lambda origin, *slices: original(*slices, **kwargs),
        (blocks, scales),
        sizes=(experts, groups * 2 * nbytes, rows),
        dtype=kwargs.get("dtype", torch.bfloat16),
        blocks=(1, 2 * nbytes, 1),
        parts=(part, part),
    )


# ------------------------------------------------------------------------------------------------ FP8 and FP4 blocks


def dequantize_one(original: Original, self: Any, quantized: Any, scales: Any, output_dtype: Any) -> Any:
    """A matrix of float8 values, or of pairs of float4 values in a byte, times a grid of scales.

    transformers 5.23 refuses blocks that do not divide the matrix, such as those of 128 for the 576 rows of
    DeepSeek-V3's `kv_a_proj_with_mqa`. Here the last block is cut short, as in DeepSeek's own code.
    """
    if not isinstance(quantized, LazyTensor) or output_dtype is None or scales.dim() != 2 or quantized.dim() != 2:
        return original(self, quantized, scales, output_dtype=output_dtype)
    packing = 2 if quantized.dtype in (torch.int8, getattr(torch, "float4_e2m1fn_x2", None)) else 1
    sizes = (quantized.shape[0], quantized.shape[1] * packing)
    configured = getattr(self.hf_quantizer.quantization_config, "weight_block_size", None) or (1, 1)
    block = tuple(map(_block_of, sizes, scales.shape, configured))
    if 0 in block:
        return original(self, quantized, scales, output_dtype=output_dtype)  # raises, with transformers' message

    def dequantise(origin: tuple[int, ...], values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        for dim, size in enumerate((values.shape[0], values.shape[1] * packing)):
            if origin[dim] % block[dim] or size % block[dim]:  # else the op itself repeats those of whole blocks
                index = torch.arange(origin[dim], origin[dim] + size, device=scales.device) // block[dim]
                scales = scales.index_select(dim, index - index[0])
        return original(self, values, scales, output_dtype=output_dtype)

    return LazyTensor.of_blocks(
        dequantise,
        (quantized, scales),
        sizes=sizes,
        dtype=output_dtype,
        blocks=(1, packing),
        parts=(_parts(1, packing), _parts(*block)),
    )


@functools.cache
def _parts(rows: int, columns: int) -> DequantisedPart:
    """For an input with one element for so many rows and columns of the result; thousands of experts have the same."""
    return {0: (0, Fraction(1, rows)), 1: (1, Fraction(1, columns))}


def _block_of(size: int, count: int, configured: int) -> int:
    """The length of `count` even blocks, else the configured one; 0 if that does not give `count` blocks."""
    if size % count == 0:
        return size // count
    return configured if -(-size // configured) == count else 0


# ----------------------------------------------------------------------------------------------- compressed-tensors

COMPRESSED_FORMATS = ("dense", "float-quantized", "naive-quantized", "int-quantized", "pack-quantized")


@contextmanager
def dequantising(hf_quantizer: Any) -> Iterator[None]:
    """Inside, compressed-tensors works on lazy tensors; raises an UnsupportedError for formats that cannot."""
    compressor = getattr(hf_quantizer, "compressor", None)
    if compressor is None:
        yield
        return
    config = compressor.quantization_config
    used = {group.format or config.format for group in config.config_groups.values()}
    if unknown := sorted(used - {*COMPRESSED_FORMATS}):
        raise UnsupportedError(
            f"quantization_config: expected compressed-tensors in the formats {', '.join(COMPRESSED_FORMATS)}; found "
            f"{', '.join(unknown)}, which hf_zero_stream cannot dequantise under ZeRO-3. Save the checkpoint "
            "dequantised first."
        )
    importlib.import_module("compressed_tensors.compressors.pack_quantized.base")
    with installed(COMPRESSED):
        yield


@in_session
def merge_dequantised_experts(session: Session, original: Original, *args: Any, **kwargs: Any) -> Any:
    """The op copies each expert into a fused tensor that it allocates; a :class:`_Stack` replaces that tensor."""
    with _PreallocatedStacks():
        result = original(*args, **kwargs)
    return {name: value.stacked() if isinstance(value, _Stack) else value for name, value in result.items()}


class _PreallocatedStacks(TorchFunctionMode):
    """Inside, ``torch.empty`` on the host returns a :class:`_Stack`.

    transformers' op calls it in the middle of a long function, without a function of its own that could be replaced
    instead. Unlike a patch of ``torch.empty``, a function mode is active in this thread only.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        on_host = func is torch.empty and torch.device(kwargs.get("device") or "cpu").type == "cpu"
        return _Stack() if on_host else func(*args, **kwargs)


class _Stack:
    """Stands for a new tensor that is filled by ``tensor[i].copy_(value)``."""

    def __init__(self) -> None:
        self._values: dict[int, torch.Tensor] = {}

    def __getitem__(self, index: int) -> _Stack:
        self._index = index
        return self

    def copy_(self, value: torch.Tensor) -> None:
        self._values[self._index] = value

    def stacked(self) -> torch.Tensor:
        return torch.stack([self._values[index].detach() for index in range(len(self._values))])


def decompress_packed(original: Original, cls: Any, state_dict: Any, scheme: Any) -> Any:
    """Compute the shape from the scales: it is a tensor in the shard too, but reading each takes a tiny read."""
    packed, scale = state_dict["weight_packed"], state_dict["weight_scale"]
    if isinstance(packed, LazyTensor) and scheme.weights.group_size and scale.dim() == 2:
        columns = scale.shape[-1] * scheme.weights.group_size
        if -(-columns * scheme.weights.num_bits // 32) == packed.shape[-1]:
            state_dict = {**state_dict, "weight_shape": torch.tensor([packed.shape[0], columns])}
    return original(cls, state_dict, scheme)


def unpack_from_int32(original: Original, value: Any, num_bits: int, shape: Any, packed_dim: int = 1) -> Any:
    """32 integers of `num_bits` bits lie in `num_bits` words, side by side along `packed_dim`."""
    if not isinstance(value, LazyTensor) or value.dim() != 2:
        return original(value, num_bits, shape, packed_dim)
    sizes = list(value.shape)
    sizes[packed_dim] = int(shape[packed_dim])
    if (words := -(-sizes[packed_dim] * num_bits // 32)) != value.shape[packed_dim]:
        raise ValueError(
            f"expected {words} words of 32 bits for {sizes[packed_dim]} values; found {tuple(value.shape)}"
        )
    blocks: list[int] = [1, 1]
    part: DequantisedPart = {0: (0, 1), 1: (1, 1)}
    blocks[packed_dim], part[packed_dim] = 32, (packed_dim, Fraction(num_bits, 32))

    def unpack(origin: tuple[int, ...], words: torch.Tensor) -> torch.Tensor:
        unpacked = list(words.shape)
        unpacked[packed_dim] = words.shape[packed_dim] * 32 // num_bits
        if packed_dim == 0:  # compressed-tensors itself fails at a single row of words, whose transpose is contiguous
            rows = words.t().clone(memory_format=torch.contiguous_format)
            return original(rows, num_bits, torch.Size(unpacked[::-1]), 1).t()
        return original(words, num_bits, torch.Size(unpacked), packed_dim)

    return LazyTensor.of_blocks(
        unpack, (value,), sizes=tuple(sizes), dtype=torch.int8, blocks=tuple(blocks), parts=(part,)
    )


# ---------------------------------------------------------------------------------------------------------- GGUF


def mapped_gguf_values(state_dict: Any) -> dict[str, torch.Tensor]:
    """The tensors of a GGUF file that transformers has mapped into memory, without copies."""
    values = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # nor is it written to
        for name, value in state_dict.items():
            if not isinstance(value, torch.Tensor):
                from transformers.integrations.gguf.reader import _TORCH_DTYPE  # in versions that map files

                mapped = torch.from_numpy(value.data).view(_TORCH_DTYPE.get(value.ggml_type, torch.uint8))
                value = mapped.reshape(value.shape)
            values[name] = value
    return values


def dequantize_blocks(original: Original, raw: Any, kind: Any, rows: int, columns: int, dtype: Any) -> Any:
    """Rows of blocks; the kind says how many bytes and values a block has."""
    if not isinstance(raw, LazyTensor):
        return original(raw, kind, rows, columns, dtype)
    from transformers.integrations.gguf.dequant import GGML_BLOCK

    values, nbytes = GGML_BLOCK[kind]

    def dequantise(origin: tuple[int, ...], raw: torch.Tensor) -> torch.Tensor:
        return original(raw, kind, raw.shape[0], raw.shape[1] // nbytes * values, dtype)

    return LazyTensor.of_blocks(
        dequantise,
        (raw,),
        sizes=(rows, columns),
        dtype=dtype,
        blocks=(1, values),
        parts=({0: (0, 1), 1: (1, Fraction(nbytes, values))},),
    )
