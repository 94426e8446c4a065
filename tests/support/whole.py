"""The values of models that are partitioned or sharded, whole."""

from typing import Any

import deepspeed
import torch
from torch import nn
from torch.distributed.tensor import DTensor


def whole(tensor: Any) -> torch.Tensor:
    """A copy of a parameter's or a buffer's values (all ranks)."""
    if hasattr(tensor, "ds_id"):
        with deepspeed.zero.GatheredParameters([tensor]):
            return tensor.detach().clone()
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def whole_values(model: Any) -> dict[str, torch.Tensor]:
    """All parameters and buffers of a state dict, whole, by the names that they have without wrappers (all ranks)."""
    found = {}
    persistent = model.state_dict().keys()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        clean = name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")
        if isinstance(tensor, nn.Parameter) or name in persistent:
            found[clean] = whole(tensor)
    return found
