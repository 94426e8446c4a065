"""The arguments of ``save_pretrained``, checked."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import ConfigError, UnsupportedError


__all__ = ["floating_dtype", "refuse_unsupported"]


def refuse_unsupported(kwargs: dict[str, Any]) -> None:
    """Raise for what a save cannot do; take out of `kwargs` what it does in any case.

    Raises:
        UnsupportedError: names the argument.
    """
    if kwargs.pop("push_to_hub", False):
        raise UnsupportedError(
            "push_to_hub=True: save first, then upload the folder from one rank: "
            "huggingface_hub.upload_folder(repo_id=..., folder_path=...)."
        )
    if kwargs.pop("distributed_checkpoint", False):
        raise UnsupportedError(
            "distributed_checkpoint=True: a distributed checkpoint is not a safetensors checkpoint; leave it out."
        )
    kwargs.pop("safe_serialization", None)
    kwargs.pop("is_main_process", None)
    kwargs.pop("save_function", None)


def floating_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """`dtype`, which may be given by its name.

    Raises:
        ConfigError: it is not a floating-point dtype.
    """
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype.removeprefix("torch."), dtype)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigError(f'dtype: expected a floating-point torch dtype or its name ("float32"); got {dtype!r}')
    return dtype
