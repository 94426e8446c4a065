"""The names of torch's dtypes in files and settings: ``"bfloat16"``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    import torch


def dtype_name(dtype: Any) -> str:
    """The name of a dtype, or of what is given by one."""
    return str(dtype).removeprefix("torch.")


def is_dtype_name(name: Any) -> bool:
    """Whether a dtype has this name."""
    import torch  # settings and headers do without

    return isinstance(name, str) and isinstance(vars(torch).get(name), torch.dtype)


def dtype_named(name: Any) -> torch.dtype:
    """The dtype of this name; a ValueError if there is none."""
    import torch

    if not is_dtype_name(name):
        raise ValueError(f"{name!r} is the name of no dtype")
    found: torch.dtype = vars(torch)[name]
    return found
