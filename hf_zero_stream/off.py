"""Our public functions where ``HF_ZERO_STREAM_DISABLE`` leaves everything to stock: stock's own, or an error."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from .errors import ConfigError
from .settings.config import DISABLE


_REFUSED = frozenset(
    {"HostStates", "load_into", "load_state", "load_tensors", "save_state", "save_tensors"}
    | {"weight_sender", "weight_stream"}
)


def instead_of(name: str) -> Callable[..., Any] | None:
    """What is called in place of the public function or class `name`; None where that loads and saves nothing."""
    if name == "save_pretrained":
        return _save_pretrained
    return functools.partial(_refuse, name) if name in _REFUSED else None


def _refuse(name: str, *args: Any, **kwargs: Any) -> None:
    del args, kwargs
    raise ConfigError(f"hf_zero_stream.{name}: {DISABLE} is set, and stock has no such function. Unset it.")


def _save_pretrained(model: Any, folder: str | os.PathLike[str], *, dtype: Any = None, **kwargs: Any) -> None:
    """``model.save_pretrained``, on rank 0; raises a ConfigError if no rank has all values, or for a `dtype`."""
    import torch.distributed as dist

    from .holdings.introspection import lacks_values
    from .seams.wrappers import unwrapped

    inner = unwrapped(model)
    lacks = kwargs.get("state_dict") is None and lacks_values(inner)
    if lacks or dtype is not None:
        why = f"no rank holds all of this {type(inner).__name__}" if lacks else "transformers' own takes no dtype"
        raise ConfigError(
            f"hf_zero_stream.save_pretrained: {DISABLE} is set, and {why}. Unset it, or gather the values by "
            "accelerator.get_state_dict(model), on all ranks, and give them as state_dict."
        )
    is_main = not dist.is_initialized() or dist.get_rank() == 0
    inner.save_pretrained(folder, **{"is_main_process": is_main, **kwargs})
