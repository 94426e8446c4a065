"""What is asked of transformers' code that builds and initialises a model, beyond calling it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from transformers import PreTrainedModel, modeling_utils
from transformers.utils import logging

from ..settings.config import announced_local_rank


logger = logging.get_logger(__name__)


@contextmanager
def drawing_as_stock(device: torch.device) -> Iterator[None]:
    """Inside, a model that is built draws the random numbers that stock draws under ZeRO-3, where it has memory."""
    with modeling_utils.init.no_init_weights(), _DrawOnDevice(device):
        yield


class _DrawOnDevice(TorchDispatchMode):
    """Inside, what is drawn on the meta device is also drawn on `device`, as stock does there, and dropped."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and _is_on_meta((args, kwargs)):
            real_args, real_kwargs = tree_map(self._real, (args, kwargs))
            func(*real_args, **real_kwargs)
        return func(*args, **kwargs)

    def _real(self, value: Any) -> Any:
        """`value` on the device, if it is a tensor of the meta device or names that."""
        if isinstance(value, torch.Tensor) and value.is_meta:
            return torch.zeros(value.shape, dtype=value.dtype, device=self._device)
        return self._device if isinstance(value, torch.device) and value.type == "meta" else value


def _is_on_meta(values: Any) -> bool:
    return any(getattr(value, "is_meta", False) or value == torch.device("meta") for value in tree_leaves(values))


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
