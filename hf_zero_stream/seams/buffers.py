"""The buffers that are in no checkpoint, because transformers computes them when it loads."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from ..settings.config import announced_local_rank


logger = logging.get_logger(__name__)


def computed_buffers(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the values that transformers' initialisation gives a lazy `model`'s non-persistent buffers; spoils it."""
    made: dict[str, torch.Tensor] = {}
    for prefix, module in model.named_modules():
        for key in module._non_persistent_buffers_set:
            buffer = module._buffers.get(key)
            if buffer is not None and buffer.is_meta:
                name = f"{prefix}.{key}" if prefix else key
                made[name] = module._buffers[key] = torch.empty_like(buffer, device="cpu")
        # Nothing else is initialised.
        module._is_hf_initialized = not module._non_persistent_buffers_set
    new = set(map(id, made.values()))
    for tensor in (*model.parameters(), *model.buffers()):
        tensor._is_hf_initialized = id(tensor) not in new
    try:
        model.initialize_weights()
    except NotImplementedError as error:  # a model's own code writes over loaded values, which are lazy
        if announced_local_rank() == 0:
            logger.warning(f"The non-persistent buffers of the model stay as they are: {error}")
        return {}
    # A buffer that was not written to holds nothing: its module's __init__ computes it, or nobody does.
    found = {name: model.get_buffer(name) for name in made}
    return {name: buffer for name, buffer in found.items() if buffer is not made[name] or buffer._version}
