"""Models that a script cuts itself: as Megatron-DeepSpeed does, with an `mpu`; or in the stages of a pipeline."""

from typing import Any

import torch
import torch.distributed as dist

from tests.support.mpu import Mpu


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


class _Layer(torch.nn.Module):
    """A layer that makes the positions itself: between stages there is one tensor."""

    def __init__(self, layer: torch.nn.Module, rotary: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self._rotary = [rotary]  # without parameters, and of no stage

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(hidden.shape[1])[None]
        output: torch.Tensor = self.layer(hidden, position_embeddings=self._rotary[0](hidden, positions))
        return output


def _loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())


def in_stages(model: Any) -> Any:
    """The layers of a model in a `PipelineModule`, of which each rank has a stage."""
    from deepspeed.pipe import PipelineModule

    inner = model.model
    layers = [_Layer(layer, inner.rotary_emb) for layer in inner.layers]
    parts = [inner.embed_tokens, *layers, inner.norm, model.lm_head]
    return PipelineModule(layers=parts, num_stages=2, loss_fn=_loss, partition_method="uniform")
