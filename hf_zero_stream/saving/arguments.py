"""The arguments of a save, which are transformers' own, and what of them is refused."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypedDict

import torch
from transformers import PreTrainedModel

from ..errors import ConfigError, UnsupportedError, UrlError
from ..settings.config import refuse_settings
from ..settings.values import floating_dtype
from ..sources.base import is_url


class SaveArguments(TypedDict, total=False):
    """For type checkers: what the newest version of transformers' ``save_pretrained`` takes besides."""

    distributed_checkpoint: bool
    is_main_process: bool
    push_to_hub: bool
    save_original_format: bool
    save_peft_format: bool
    state_dict: Mapping[str, Any] | None
    token: str | bool | None
    variant: str | None


SIGNATURE = inspect.signature(PreTrainedModel.save_pretrained)

_OF_EARLIER_VERSIONS = {"safe_serialization", "save_function"}
"""transformers takes these still, and does nothing with them."""

_SIZE = re.compile(r"\d+(\.\d+)?\s*[KMGT]B", re.IGNORECASE)


def refuse_url(folder: Any, what: str) -> None:
    """Raise an UrlError if `folder`, which `what` takes, is a URL: it would become the path of a folder."""
    if is_url(folder):
        raise UrlError(
            f"{what}: expected a local folder; got a URL, {str(folder).partition(':')[0]}://... "
            "hf_zero_stream.save_pretrained, save_state and load_state, and model.save_pretrained of a class that "
            "does not override it, take URLs of s3://, gs:// and az://. For the rest, save into a folder, then upload "
            "it from one rank. (If you mean a local folder of this name, begin it with ./)"
        )


def refuse_unknown(arguments: Mapping[str, Any], others: Iterable[str] = ()) -> None:
    """Raise if an argument of a save by all ranks is neither transformers' nor one of the `others`, or has no effect.

    ``model.save_pretrained`` itself ignores arguments that it does not know.

    Raises:
        ConfigError: no such argument, or no such value.
        UnsupportedError: the argument asks for files of ``torch.save``.
    """
    refuse_settings({name: value for name, value in arguments.items() if name not in others})
    known = {*SIGNATURE.parameters, *_OF_EARLIER_VERSIONS, *others} - {"self", "save_directory", "kwargs"}
    if unknown := sorted(set(arguments) - known):
        raise ConfigError(f"save: unknown argument {unknown[0]}; known are {', '.join(sorted(known))}")
    if arguments.get("safe_serialization") not in (None, True):
        raise UnsupportedError(
            "safe_serialization=False: files of torch.save are not written; transformers 5 does not write them "
            "either. Leave it out."
        )
    size = arguments.get("max_shard_size", "5GB")
    is_size = _SIZE.fullmatch(size) if isinstance(size, str) else type(size) is int and size >= 1
    if not is_size:
        raise ConfigError(f'max_shard_size: expected bytes, at least 1, or a text like "5GB"; got {size!r}')


def refuse_values(state_dict: Mapping[str, Any] | None, variant: Any) -> None:
    """Raise a ConfigError if one of these arguments has a value that means nothing."""
    if state_dict is not None and not state_dict:
        raise ConfigError("state_dict: expected at least one tensor; got none. Leave it out to save all of the model.")
    if variant is not None and re.search(r"[/\\\0]", str(variant)):
        raise ConfigError(
            f"variant: expected a part of a file's name, as in model.VARIANT.safetensors; got {variant!r}"
        )


def dtype_of_argument(dtype: Any) -> torch.dtype | None:
    """The dtype that `dtype` is or names; raises a ConfigError if weights cannot be cast to it."""
    found = floating_dtype(dtype)
    if found is not None and found.itemsize < 2:
        raise ConfigError(
            f"dtype: expected a dtype of at least 16 bits; got {dtype!r}. Weights in so few bits need scales, which a "
            "cast does not make: engines and from_pretrained quantise weights in bfloat16 themselves."
        )
    return found
