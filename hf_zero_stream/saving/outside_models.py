"""Parameters outside of all transformers models, for code that saves them by itself.

sentence-transformers, for instance, has the Trainer save a chain of modules, of which one is a transformers model. A
Dense beside it writes its own state dict. That of a sharded one has no values, and no error says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..holdings.introspection import has_partition


def values_outside_models(model: nn.Module) -> Callable[[], AbstractContextManager[None]]:
    """Take whole what `model` has sharded outside of transformers models (all ranks).

    Inside of what is returned, state dicts have these values, each in a memory of its own.
    """
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    inside = {id(param) for each in models for param in each.parameters()}
    whole: dict[int, torch.Tensor] = {}
    of_modules: dict[nn.Module, dict[str, torch.Tensor]] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if id(param) not in inside and (has_partition(param) or hasattr(param, "full_tensor")):
                if id(param) not in whole:
                    whole[id(param)] = _whole(param)
                of_modules.setdefault(module, {})[name] = whole[id(param)]

    def put(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
        state_dict.update({f"{prefix}{name}": value for name, value in of_modules[module].items()})

    @contextmanager
    def in_state_dicts() -> Iterator[None]:
        handles = [module.register_state_dict_post_hook(put) for module in of_modules]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    return in_state_dicts


def _whole(param: Any) -> torch.Tensor:
    if has_partition(param):
        from ..holdings.deepspeed.partitions import whole_value  # imports deepspeed, which takes seconds

        return whole_value(param)
    full: torch.Tensor = param.detach().full_tensor()
    # Uneven shards are gathered with padding, and safetensors refuses a tensor that is less than its storage.
    return full if full.untyped_storage().nbytes() == full.nbytes else full.clone()
