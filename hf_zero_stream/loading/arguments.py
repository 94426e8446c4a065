"""Reads the arguments of ``from_pretrained``, with light imports: URLs, and whether FSDP2 will shard the model."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch.distributed as dist
from huggingface_hub.constants import HF_HUB_CACHE
from huggingface_hub.errors import HFValidationError
from huggingface_hub.file_download import repo_folder_name
from transformers.utils import logging

from ..bindings.table import refuse_lacking
from ..holdings.introspection import accelerator_state
from ..settings import scope
from ..settings.config import announced_local_rank, announces_fsdp2
from ..sources.base import is_url


logger = logging.get_logger(__name__)

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


ALONE = "it is for one process, outside ZeRO-3, which shares the work with none"
"""Why most loads that are stock's are left to it."""


def model_of(result: Any) -> Any:
    """The model in what `from_pretrained` returned, with or without the loading info."""
    return result[0] if isinstance(result, tuple) else result


def may_be_at_url(path: Any) -> bool:
    """Whether `path` may name a checkpoint that is read from a URL."""
    return bool(scope.active_configs()) and is_url(path)


def load_with_prefetch(names: Sequence[str], original: StockFunction, *args: Any, **kwargs: Any) -> Any:
    """Call a ``from_pretrained``, with the class first; for the `names` see :func:`prefetching`."""
    path = args[1] if len(args) > 1 else kwargs.get("pretrained_model_name_or_path")  # the first one is the class
    if isinstance(path, (str, os.PathLike)) and not is_url(path) and scope.active_configs():
        _warn_of_absent_folder(os.fspath(path), kwargs.get("cache_dir"))
    with prefetching(path, kwargs, names):
        return original(*args, **kwargs)


@functools.cache  # once
def _warn_of_absent_folder(path: str, cache: Any) -> None:
    """Say that there is no such folder, before transformers asks the Hub for a repository of that name.

    Without a network it gives up after a minute. Of a path that cannot be an id it says so itself, at once; an id of
    somebody's repository is hardly meant as a path.
    """
    parent = os.path.dirname(path)
    if os.path.exists(path) or (parent and not os.path.isdir(parent)) or announced_local_rank():
        return
    with suppress(HFValidationError):
        cached = os.path.join(cache or HF_HUB_CACHE, repo_folder_name(repo_id=path, repo_type="model"))
        if not os.path.isdir(cached):
            logger.warning(
                "%s: there is no such folder in %s, and no such repository in the Hub's cache. transformers asks the "
                "Hub for it, which takes a minute without a network.",
                *(path, os.getcwd()),
            )


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
