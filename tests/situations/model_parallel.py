"""A model that a script cuts itself, as Megatron-DeepSpeed does, and the `mpu` by which DeepSpeed hears of it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.support.mpu import Mpu


__all__ = ["cut_in_halves"]


class _SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class _SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        value = value.clone()
        dist.all_reduce(value)
        return value

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def cut_in_halves(model: Any) -> Mpu:
    """Leave this rank half of the rows or columns of each MLP's weights, and let ranks add up what it computes."""
    for layer in model.model.layers:
        for name, axis in (("gate_proj", 0), ("up_proj", 0), ("down_proj", 1)):
            linear = getattr(layer.mlp, name)
            half = linear.weight.detach().chunk(2, axis)[dist.get_rank()].clone()
            linear.weight = torch.nn.Parameter(half, linear.weight.requires_grad)
            linear.weight.tensor_model_parallel = True
        layer.mlp.register_forward_pre_hook(lambda module, args: (_SumBackward.apply(args[0]),))
        layer.mlp.down_proj.register_forward_hook(lambda module, args, output: _SumForward.apply(output))
    return Mpu()
