"""Products with packed weights, which dequantise one matrix at a time and keep nothing of it.

ZeRO-3 frees a gathered parameter by giving it other memory (``param.data = ...``). A view of the gathered memory that
autograd saved would keep all of it alive until the backward pass. So only the parameter itself is saved here; the
backward pass, before which ZeRO-3 gathers it again, dequantises anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from ...plugin_api import PACKED, packed_weights
from .weights import PackedWeight


class PackedLinear(nn.Linear):
    """A linear layer whose `weight` is a frozen parameter of packed bytes."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        packed: PackedWeight = packed_weights(self)["weight"]
        result: torch.Tensor = _Product.apply(input, self.weight, self.bias, packed)
        return result

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, packed"


def note_packed(module: nn.Module, key: str, weight: PackedWeight) -> None:
    """Note that the parameter `key` of `module` is packed; copies of `module` keep it."""
    vars(module).setdefault(PACKED, {})[key] = weight


def is_packed_experts(module: nn.Module) -> bool:
    """Whether `module` has packed parameters that are stacks of experts' matrices."""
    return any(weight.is_stack for weight in packed_weights(module).values())


class _Product(torch.autograd.Function):
    """``F.linear`` with a packed weight, which gets no gradient."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, parameter: Any, bias: Any, packed: PackedWeight) -> torch.Tensor:
        ctx.save_for_backward(parameter)
        ctx.packed, ctx.dtype, ctx.bias_dtype = packed, input.dtype, None if bias is None else bias.dtype
        # Looked up when it is called: DeepSpeed replaces it, and the values must be those of a plain layer's.
        return functional.linear(input, packed.matrix(parameter), bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (parameter,) = ctx.saved_tensors
        of_input = of_bias = None
        if ctx.needs_input_grad[0]:
            of_input = grad.matmul(ctx.packed.matrix(parameter).to(grad.dtype)).to(ctx.dtype)
        if ctx.needs_input_grad[2]:
            of_bias = grad.reshape(-1, grad.shape[-1]).sum(0).to(ctx.bias_dtype)
        return of_input, None, of_bias, None


def grouped_product(
    input: torch.Tensor, parameter: torch.Tensor, packed: PackedWeight, ends: Sequence[int], is_transposed: bool
) -> torch.Tensor:
    """Rows of `input`, sorted by expert, times the matrix of their expert: expert `i` has the rows up to ``ends[i]``.

    `input` is [rows, inputs]; the matrices are [outputs, inputs] or, if `is_transposed`, [inputs, outputs]. Experts
    without rows are not dequantised.
    """
    result: torch.Tensor = _GroupedProduct.apply(input.to(packed.matrix_dtype), parameter, packed, ends, is_transposed)
    return result


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, parameter: Any, packed: PackedWeight, ends: Sequence[int], is_transposed: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(parameter)
        ctx.packed, ctx.ends, ctx.is_transposed = packed, ends, is_transposed
        return _grouped(input, parameter, packed, ends, packed.shape[2 if is_transposed else 1], not is_transposed)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (parameter,) = ctx.saved_tensors
        packed = ctx.packed
        width = packed.shape[1 if ctx.is_transposed else 2]
        return _grouped(grad, parameter, packed, ctx.ends, width, ctx.is_transposed), None, None, None, None


def _grouped(
    rows: torch.Tensor, parameter: Any, packed: PackedWeight, ends: Sequence[int], width: int, transpose: bool
) -> torch.Tensor:
    result = rows.new_zeros(rows.shape[0], width)
    for number, (begin, end) in enumerate(pairwise([0, *ends])):
        if begin < end:
            matrix = packed.matrix(parameter, number)
            torch.mm(rows[begin:end], matrix.t() if transpose else matrix, out=result[begin:end])
            del matrix  # before the next one is made
    return result


class Factors(NamedTuple):
    """An adapter of experts: that of expert e adds ``scaling * of_outputs[e] @ of_inputs[e]`` to its matrix.

    `of_inputs` is [experts, rank, inputs], `of_outputs` [experts, outputs, rank].
    """

    of_inputs: torch.Tensor
    of_outputs: torch.Tensor
    scaling: float

    def product(self, input: torch.Tensor, ends: Sequence[int]) -> torch.Tensor:
        """What the adapter adds to :func:`grouped_product`: [rows, outputs], in the adapter's dtype."""
        rows, spans = input.to(self.of_inputs.dtype), [*enumerate(pairwise([0, *ends]))]
        # One expert is always asked, also without rows, so that factors get a gradient, for which ranks wait.
        asked = [span for span in spans if span[1][0] < span[1][1]] or spans[:1]
        products = [
            rows[begin:end] @ self.of_inputs[number].t() @ self.of_outputs[number].t()
            for number, (begin, end) in asked
        ]
        return torch.cat(products) * self.scaling


def factors_beside(experts: nn.Module) -> dict[str, list[Factors]]:
    """The adapters that are active in the pass under way, by the name of the parameter."""
    found: dict[str, list[Factors]] = vars(experts).setdefault("_hf_zero_stream_factors", {})
    return found
