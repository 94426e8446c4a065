"""What is done in DeepSpeed's engines for weights that stay in files: what calls these stands in the declaration."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...errors import ConfigError, UnsupportedError
from ...plugin_api import collective_device, lies_in_files
from .layers import is_split, split_in_layers
from .swapper import FileSwapper, swappers_of


logger = logging.getLogger(__name__)

_FRAGMENTS = "frozen_param_fragments"
"""The key of frozen partitions, by name, in a model file of DeepSpeed's checkpoint."""

_ATTRIBUTE = "_hf_zero_stream_file_swappers"
"""Of DeepSpeed's coordinator of one model: the swappers of its parameters."""


def make_optimizer(
    original: Callable[..., None], self: Any, module: nn.Module, init_optimizer: Any, *args: Any, **kwargs: Any
) -> None:
    """Read what is going to be trained into memory: what the optimizer has."""
    params = [*module.parameters()]
    swappers = swappers_of(params)
    if swappers:
        groups = [param for group in init_optimizer.param_groups for param in group["params"]]
        trained = [param for param in groups if param.requires_grad]
        brought = sum(swapper.bring_in(trained) for swapper in swappers)
        forgotten = [param for param in params if param.requires_grad and lies_in_files(param)]
        if forgotten:
            names = [param.nvme_swapper.name_of(param) for param in forgotten]
            raise ConfigError(
                f"{len(names)} parameters require gradients, stay in the checkpoint's files and are in no group of "
                f"the optimizer: {', '.join(names[:8])}. Freeze them (requires_grad_(False)), or give it them."
            )
        for swapper in swappers:
            swapper.has_optimizer = True
        if brought and dist.get_rank() == 0:
            logger.info("%d parameters that are trained were read into memory", brought)
    original(self, module, init_optimizer, *args, **kwargs)


def make_offload(original: Callable[..., None], self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Set what the use of memory hangs on, and follow the passes through the model.

    DeepSpeed keeps in full what comes again within ``stage3_max_reuse_distance`` elements, by default a whole model of
    less than 1e9.
    """
    swappers = swappers_of([*module.parameters()])
    if not swappers:
        return original(self, module, *args, **kwargs)
    ours = {"max_reuse_distance": 0, "max_live_parameters": 0}
    changed = [
        f"stage3_{name} 0 (was {kwargs.get(name)})" for name, value in ours.items() if kwargs.get(name) != value
    ]
    if dist.get_rank() == 0:
        logger.info("frozen weights in files: %s", ", ".join([*changed, "stage3_allgather_sequential true"]))
    if (count := max(swapper.micro_batches for swapper in swappers)) > 1:
        split_in_layers(module, count)
    original(self, module, *args, **{**kwargs, **ours})
    setattr(self.param_coordinator, _ATTRIBUTE, swappers)
    for swapper in swappers:
        swapper.bring_in(self.persistent_parameters)
        swapper.follow(module)
    module.register_forward_pre_hook(_WarnOnce(swappers))


class _WarnOnce:
    """Warns before the first pass after which autograd would keep every frozen weight that it has met."""

    def __init__(self, swappers: Sequence[FileSwapper]) -> None:
        self._is_done = not any(swapper.has_optimizer for swapper in swappers)

    def __call__(self, module: nn.Module, args: Any) -> None:
        if self._is_done or not torch.is_grad_enabled():
            return
        self._is_done = True
        lines = lines_for_checkpointing(module)
        if lines and dist.get_rank() == 0:
            logger.warning(
                "this backward pass keeps frozen weights in memory until it has used them, of fused experts all, as "
                f'if frozen_weights were "memory". Gradient checkpointing lets go of them. Add: {"; ".join(lines)}'
            )


def lines_for_checkpointing(model: nn.Module) -> list[str]:
    """The lines of code without which the layers of `model` are not checkpointed; none if they are.

    transformers checkpoints its layers in train mode only, and from_pretrained gives a model in eval mode.
    """
    modules = [*model.modules()]
    if any(type(module).__name__ == "CheckpointWrapper" for module in modules):  # torch's own
        return []
    enabled = [module for module in modules if getattr(module, "gradient_checkpointing", False) or is_split(module)]
    if not enabled:
        return ["model.gradient_checkpointing_enable()", "model.train()"]
    return [] if any(module.training for module in enabled) else ["model.train()"]


def generate(original: Callable[..., Any], self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Say once what a token costs."""
    for swapper in swappers_of([*self.parameters()]):
        swapper.warn_of_tokens()
    return original(self, *args, **kwargs)


def fetch(original: Callable[..., None], self: Any, module: nn.Module, forward: bool, **kwargs: Any) -> None:
    """DeepSpeed's fetch of what a module needs: all ranks make it, and go on."""
    with ExitStack() as stack:
        for swapper in getattr(self, _ATTRIBUTE, ()):
            stack.enter_context(swapper.fetching(forward=forward))
        original(self, module, forward, **kwargs)


def make_available(original: Callable[..., None], self: Any, params: Sequence[Any], **kwargs: Any) -> None:
    """Read partitions that all ranks are about to gather."""
    with ExitStack() as stack:
        for swapper in swappers_of(params):
            stack.enter_context(swapper.gathering(params))
        original(self, params, **kwargs)


def step(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Let no step be made of gradients for which a rank could not read a weight."""
    for swapper in getattr(self.parameter_offload.param_coordinator, _ATTRIBUTE, ()):
        swapper.agree()
    return original(self, *args, **kwargs)


def partition(
    original: Callable[..., None],
    self: Any,
    param_list: Iterable[Any],
    *args: Any,
    has_been_updated: bool = False,
    **kwargs: Any,
) -> None:
    """Refuse what was written to weights that stay in files, inside ``GatheredParameters(modifier_rank=...)``.

    Whoever only reads gives a `modifier_rank` too, so that values are compared.
    """
    params = [*param_list]
    in_files = [param for param in params if has_been_updated and lies_in_files(param)]
    if not in_files:
        original(self, params, *args, has_been_updated=has_been_updated, **kwargs)
        return
    names = [param.nvme_swapper.name_of(param) for param in in_files]
    try:
        with in_files[0].nvme_swapper.together():
            differ = torch.tensor([param.nvme_swapper.differs_from_file(param) for param in in_files]).int()
    finally:
        original(self, in_files, *args, has_been_updated=False, **kwargs)
        if others := [param for param in params if not lies_in_files(param)]:
            original(self, others, *args, has_been_updated=True, **kwargs)
    if dist.get_world_size() > 1:
        differ = differ.to(collective_device())
        dist.all_reduce(differ, dist.ReduceOp.MAX)
    if changed := [name for name, is_changed in zip(names, differ.tolist(), strict=True) if is_changed]:
        raise UnsupportedError(
            f"{len(changed)} frozen weights that stay in the checkpoint's files were written to: "
            f"{', '.join(changed[:8])}. They are as they were. Give them to the optimizer before "
            'deepspeed.initialize; or load the model with frozen_weights="memory", as for adapters whose start takes '
            'something away from them (PEFT\'s init_lora_weights="pissa", "olora" and so on).'
        )


def frozen_attributes(original: Callable[..., Any], self: Any, attr_func: Callable[[Any], Any]) -> Any:
    """Leave weights in files out of a checkpoint of DeepSpeed's own, which would write them empty."""
    in_files = {id(param): param for param in self.module.parameters() if lies_in_files(param)}
    if not in_files:
        return original(self, attr_func)
    found = original(self, lambda param: None if id(param) in in_files else attr_func(param))
    # DeepSpeed asks for shapes, and then for values.
    if dist.get_rank() == 0 and isinstance(attr_func(next(iter(in_files.values()))), torch.Tensor):
        logger.warning(
            "%d frozen weights stay in the checkpoint's files, and are not in this checkpoint of DeepSpeed's.",
            len(in_files),
        )
    return OrderedDict((name, value) for name, value in found.items() if value is not None)


def load_module_state_dict(original: Callable[..., Any], self: Any, checkpoint: Any, *args: Any, **kwargs: Any) -> Any:
    """Leave weights in files as they are; a checkpoint that has others is refused."""
    fragments = checkpoint.get(_FRAGMENTS)
    in_files = {name: param for name, param in self.module.named_parameters() if lies_in_files(param)}
    if fragments is None or not in_files:
        return original(self, checkpoint, *args, **kwargs)
    with next(iter(in_files.values())).nvme_swapper.together():
        for name, param in in_files.items():
            saved = fragments.get(name)
            if saved is not None and saved.numel() and param.nvme_swapper.differs_from_file(param, saved):
                raise UnsupportedError(
                    f"{name}: stays in the checkpoint's files (frozen_weights=\"files\"), and DeepSpeed's checkpoint "
                    "has other values of it. Load the model with frozen weights in memory."
                )
            fragments[name] = param.ds_tensor
    return original(self, checkpoint, *args, **kwargs)
