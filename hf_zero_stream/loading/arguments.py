"""Reads the arguments of ``from_pretrained``, with light imports: URLs, and whether FSDP2 will shard the model."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist

from ..bindings.table import refuse_lacking
from ..holdings.introspection import accelerator_state
from ..settings import scope
from ..settings.config import announces_fsdp2
from ..sources.base import is_url


StockFunction = Callable[..., Any]

_SINGLE = "model.safetensors"
"""If it is not there, an index names the shards: of this file only the beginning is asked for."""

MODEL_FILES = ("config.json", "adapter_config.json", "generation_config.json", _SINGLE, f"{_SINGLE}.index.json")
TOKENIZER_FILES = (
    *("config.json", "tokenizer_config.json", "tokenizer.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "chat_template.json", "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model"),
)
PROCESSOR_FILES = (
    *("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"),
    *TOKENIZER_FILES,
)
"""The names of the files that transformers asks for when it loads something by name; most are in no checkpoint."""


def shards_by_fsdp2() -> bool:
    """Whether ``accelerator.prepare`` is going to shard models by FSDP2, as far as one can know by now.

    Raises a VersionError if it is, in a way that is not known: every rank would load the whole model.
    """
    accelerator = accelerator_state()
    shards = bool(announces_fsdp2() if accelerator is None else getattr(accelerator, "is_fsdp2", False))
    if shards:
        refuse_lacking("FSDP2 by accelerate")
    return shards


def is_one_of_several() -> bool:
    """Whether this process is one of several ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def may_be_at_url(path: Any) -> bool:
    """Whether `path` may name a checkpoint that is read from a URL."""
    return bool(scope.active_configs()) and is_url(path)


def load_with_prefetch(names: Sequence[str], original: StockFunction, *args: Any, **kwargs: Any) -> Any:
    """Call a ``from_pretrained``, with the class first; for the `names` see :func:`prefetching`."""
    path = args[1] if len(args) > 1 else kwargs.get("pretrained_model_name_or_path")  # the first one is the class
    with prefetching(path, kwargs, names):
        return original(*args, **kwargs)


def prefetching(path: Any, kwargs: Mapping[str, Any], names: Sequence[str]) -> AbstractContextManager[None]:
    """A context around a load; of a checkpoint at a URL, files with these `names` are asked for at once.

    Raises as :func:`url_of`.
    """
    if not (url := url_of(path, kwargs)):
        return nullcontext()
    from ..checkpoint.urls import checkpoints_at

    subfolder = kwargs.get("subfolder") or ""
    return checkpoints_at(url).prefetching(url, [os.path.join(subfolder, name) for name in names])


def url_of(path: Any, kwargs: Mapping[str, Any]) -> str:
    """The URL of the checkpoint that these arguments of a ``from_pretrained`` name; "" if it is not read from one.

    Raises:
        MissingPluginError: nothing that reads from URLs is installed.
        UrlError: there can be no checkpoint.
    """
    if not may_be_at_url(path):
        return ""
    from ..checkpoint.urls import checkpoints_at

    return checkpoints_at(path).canonical(str(path), kwargs.get("revision"), kwargs.get("token"))
