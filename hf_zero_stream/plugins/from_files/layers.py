"""Micro-batches within layers: a step reads frozen weights twice, however many micro-batches it has.

Gradient accumulation goes through the whole model once for each micro-batch, and reads every frozen weight twice each
time. Here the model gets all of them at once, as one batch, and each layer takes them one after the other while its
weights are there: in the forward pass, and in the backward pass, which computes each of them again.

The sums over micro-batches are those of accumulation in another order: losses differ in the last digits.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, partial
from types import MethodType
from typing import Any

import torch
from deepspeed.utils import set_z3_leaf_module
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from ...errors import UnsupportedError


logger = logging.getLogger(__name__)

SETTING = "micro_batches_in_layers"


def split_in_layers(model: nn.Module, count: int) -> None:
    """Have each layer of `model` take a batch, in training, as `count` micro-batches one after the other.

    Before ``deepspeed.initialize``: ZeRO-3 is to gather a layer as a whole.

    Raises:
        UnsupportedError: it has no layers that transformers can checkpoint, or layers that take keys of others, or a
            loss over what its routers say.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise UnsupportedError(
            f"{SETTING}: expected layers that transformers can checkpoint (GradientCheckpointingLayer); the "
            f"{type(model).__name__} has none. Leave it out, and accumulate gradients."
        )
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "output_router_logits", False):
            raise UnsupportedError(
                f"{SETTING}: the loss of this {type(module).__name__} has a part that goes over what all routers say "
                "(output_router_logits), which would be computed again for each layer after its weights are gone. Set "
                "model.config.output_router_logits = False, or leave the setting out."
            )
    if any(getattr(layer, "_can_checkpoint_with_cache", False) for layer in layers):
        raise UnsupportedError(
            f"{SETTING}: layers of the {type(model).__name__} take keys and values of other layers, which each "
            "micro-batch would compute again. Leave it out, and accumulate gradients."
        )
    heads = _numbers_of_heads(model)
    for layer in layers:
        layer.gradient_checkpointing = False  # each micro-batch is checkpointed by itself
        forward = type(layer).forward
        names = [*inspect.signature(forward).parameters][1:]
        layer.forward = MethodType(partial(_forward_in_parts, forward, names, count, heads), layer)
        set_z3_leaf_module(layer, True)


def is_split(module: nn.Module) -> bool:
    """Whether `module` is a layer that takes, and checkpoints, micro-batches."""
    return isinstance(getattr(module.forward, "__func__", None), partial)


def _numbers_of_heads(model: nn.Module) -> set[int]:
    configs = [getattr(module, "config", None) for module in model.modules()]
    names = ("num_attention_heads", "n_head", "n_heads")
    found = [getattr(config, name, None) for config in configs for name in names]
    return {number for number in found if isinstance(number, int)}


def _forward_in_parts(
    forward: Callable[..., Any],
    names: Sequence[str],
    count: int,
    heads: Collection[int],
    layer: nn.Module,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if not (layer.training and torch.is_grad_enabled()):
        return forward(layer, *args, **kwargs)
    hidden = args[0] if args else kwargs["hidden_states"]
    if hidden.dim() == 2:  # the patches of all images, one behind the other: attention knows where each begins
        count = 1
    elif hidden.dim() != 3:
        raise UnsupportedError(
            f"{SETTING}: expected that a {type(layer).__name__} takes (samples, positions, features); got "
            f"{tuple(hidden.shape)}. Leave it out, and accumulate gradients."
        )
    batch = hidden.shape[0]
    if batch < count:  # the last batch of an epoch; or of a tower, which has one sample for each image
        _warn_of_small_batch(type(layer).__name__, batch, count)
        count = max(1, batch)
    if count > 1:
        for name, value in [*zip(names[1:], args[1:], strict=False), *kwargs.items()]:
            _refuse_unclear(name, value, hidden.shape, heads)
    if "use_cache" in kwargs:
        kwargs["use_cache"] = False
    results = []
    for number in range(count):
        cut = partial(_part, number, count, batch)
        call = partial(forward, layer, **{name: cut(value) for name, value in kwargs.items()})
        with torch.autograd.graph.saved_tensors_hooks(_to_host, _from_host):
            results.append(checkpoint(call, *map(cut, args), use_reentrant=False))
    return _joined(results)


@cache
def _warn_of_small_batch(layer: str, batch: int, count: int) -> None:
    logger.warning(
        f"{SETTING}={count}: a {layer} got a batch of {batch}, which makes as many micro-batches. If the model's are "
        "all so small, multiply per_device_train_batch_size (train_micro_batch_size_per_gpu) by the setting, and "
        "divide the steps of accumulation by it."
    )


_OF_SAMPLES = ("hidden_states", "attention_mask", "position_ids", "encoder_hidden_states", "encoder_attention_mask")
"""What belongs to samples where its first dimension is as long as a batch, whatever else has that length."""


def _refuse_unclear(name: str, value: Any, shape: Sequence[int], heads: Collection[int]) -> None:
    """Raise an UnsupportedError if nothing tells whether an argument belongs to samples, or that it cannot be cut."""
    if isinstance(value, (tuple, list)):
        for each in value:
            _refuse_unclear(name, each, shape, heads)
    if not isinstance(value, torch.Tensor) or value.dim() < 2 or name in _OF_SAMPLES:
        return
    (batch, positions), others = shape[:2], {shape[1], *heads}
    if value.shape[:2] == (batch, positions) and batch != positions:
        return
    if value.shape[0] == batch and batch in others:
        raise UnsupportedError(
            f"{SETTING}: {name} of shape {tuple(value.shape)} belongs to samples, or to heads or positions, of which "
            f"there are {batch} too. Take batches of another number of samples."
        )
    if value.shape[0] in {batch * number for number in heads if number > 1}:
        raise UnsupportedError(
            f"{SETTING}: {name} of shape {tuple(value.shape)} has samples and heads in one dimension, which is not "
            "cut. Leave the setting out, and accumulate gradients."
        )


def _part(number: int, count: int, batch: int, value: Any) -> Any:
    """The part of an argument that belongs to a micro-batch; what is alike for all samples stays whole."""
    if isinstance(value, Cache):  # its keys would be those of other micro-batches, and twice there in backward
        if value.get_seq_length():
            raise UnsupportedError(
                f"{SETTING}: layers get keys of before the batch, as from PEFT's prefix tuning, which are not cut. "
                "Leave the setting out, and accumulate gradients."
            )
        return None
    if isinstance(value, torch.Tensor):
        # Of one dimension is what belongs to positions, also where there are as many of these as samples.
        of_samples = value.dim() > 1 and value.shape[0] == batch
        return value.tensor_split(count)[number] if of_samples else value
    if type(value).__name__ == "BlockMask":
        raise UnsupportedError(f"{SETTING}: masks of flex_attention cannot be cut. Load with another attention.")
    if isinstance(value, (tuple, list)):
        return type(value)(_part(number, count, batch, each) for each in value)
    if isinstance(value, Mapping):
        return {key: _part(number, count, batch, each) for key, each in value.items()}
    return value


def _joined(results: list[Any]) -> Any:
    if isinstance(results[0], torch.Tensor):
        return torch.cat(results)
    if isinstance(results[0], tuple):
        return tuple(_joined([*each]) for each in zip(*results, strict=True))
    return results[0]


def _to_host(tensor: torch.Tensor) -> tuple[torch.device, torch.Tensor]:
    """Keep the inputs of layers, which need gradients, in host memory: there are as many as layers."""
    return tensor.device, tensor.cpu() if tensor.requires_grad else tensor


def _from_host(saved: tuple[torch.device, torch.Tensor]) -> torch.Tensor:
    device, tensor = saved
    return tensor.to(device)
