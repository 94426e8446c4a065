"""Receives the calls of ``from_pretrained``, and leaves some to transformers with nothing but light imports.

Most blocks on one rank, outside ZeRO-3, only load models as transformers loads them. They must not wait for the import
of what streams, which takes longer than such a load.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch.distributed as dist

from ..bindings.table import refuse_lacking
from ..holdings.marks import (
    FORGETS,
    LOADED_FROM,
    LOADED_SHAPES,
    accelerator_state,
    is_dequantised,
    whole_shape,
)
from ..registry.plugins import has_tool, tool
from ..seams.ds_config import active_config
from ..settings import scope
from ..settings.config import StreamingConfig, announces_fsdp2, announces_zero3
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

_OURS = frozenset({"ds_config", "strict", "distributed_config", "tp_plan", "tp_size", "device_mesh"})
"""Arguments of ``from_pretrained`` that stock does not know, or by which models are sharded."""

_OF_CHECKPOINT = (
    *("revision", "subfolder", "variant", "cache_dir", "local_files_only"),
    *("key_mapping", "use_safetensors", "gguf_file", "weights_only"),
)
"""Arguments of ``from_pretrained`` that say which checkpoint is loaded."""

_LOADS = f"{__package__}.integration"
"""The module that streams. Once it is imported, a load may be inside another one."""


def from_pretrained_hook(original: StockFunction, cls: Any, *args: Any, **kwargs: Any) -> Any:
    """``PreTrainedModel.from_pretrained``."""
    if not scope.active_configs():
        return original(cls, *args, **kwargs)
    if _LOADS not in sys.modules and _is_stock_load(*args, **kwargs):
        result = original(cls, *args, **kwargs)
    else:
        from .integration import from_pretrained

        result = from_pretrained(original, cls, *args, **kwargs)
    model = result[0] if isinstance(result, tuple) else result
    note_source(model, args[0] if args else kwargs.get("pretrained_model_name_or_path"), kwargs)
    if is_dequantised(model) and has_tool(FORGETS):  # without one, the save of it is an error
        tool(FORGETS, "packed")(model)
    return result


def note_source(model: Any, path: Any, kwargs: Mapping[str, Any]) -> None:
    """Note on `model` which checkpoint it has been loaded from, so that it can be compared with it later.

    Without a token: a model may be pickled. What was downloaded is found by its commit, and needs none.
    """
    if path is None:
        return
    found = {name: kwargs[name] for name in _OF_CHECKPOINT if name in kwargs}
    if os.path.exists(path):
        path = os.path.abspath(path)
    elif commit := getattr(getattr(model, "config", None), "_commit_hash", None):
        found["revision"] = commit
    vars(model)[LOADED_FROM] = str(path), found
    # Nothing is around its modules yet, unless adapters are: what has another name is compared with the class alone.
    vars(model)[LOADED_SHAPES] = {name: tuple(whole_shape(param)) for name, param in model.named_parameters()}


def _is_stock_load(path: Any = None, /, *args: Any, **kwargs: Any) -> bool:
    """Whether a load is left to transformers whatever comes: of one rank, of a whole model, with no wish for us.

    Raises a ConfigError, as every load, if settings are wrong.
    """
    settings = StreamingConfig.resolve(scope.current_config(), {})
    path = kwargs.get("pretrained_model_name_or_path", path)
    asks = settings.strict or bool(settings.destination) or not _OURS.isdisjoint(kwargs) or _may_be_at_url(path)
    return not (asks or _may_stream() or announces_zero3() or shards_by_fsdp2() or active_config()[0])


def shards_by_fsdp2() -> bool:
    """Whether ``accelerator.prepare`` is going to shard models by FSDP2, as far as one can know by now.

    Raises a VersionError if it is, in a way that is not known: every rank would load the whole model.
    """
    accelerator = accelerator_state()
    shards = bool(announces_fsdp2() if accelerator is None else getattr(accelerator, "is_fsdp2", False))
    if shards:
        refuse_lacking("FSDP2 by accelerate")
    return shards


def _may_stream() -> bool:
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return several or "deepspeed.runtime.engine" in sys.modules or accelerator_state() is not None


def _may_be_at_url(path: Any) -> bool:
    """Whether `path` may name a checkpoint that is read from a URL."""
    return bool(scope.active_configs()) and is_url(path)


def auto_model_hook(original: StockFunction, *args: Any, **kwargs: Any) -> Any:
    """``from_pretrained`` of an Auto class for models."""
    load = partial(load_with_prefetch, MODEL_FILES, original)
    if not scope.active_configs() or (_LOADS not in sys.modules and not _may_stream()):
        return load(*args, **kwargs)
    from .integration import auto_model

    return auto_model(load, *args, **kwargs)


def tokenizer_hook(original: StockFunction, *args: Any, **kwargs: Any) -> Any:
    return load_with_prefetch(TOKENIZER_FILES, original, *args, **kwargs)


def processor_hook(original: StockFunction, *args: Any, **kwargs: Any) -> Any:
    return load_with_prefetch(PROCESSOR_FILES, original, *args, **kwargs)


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
    if not _may_be_at_url(path):
        return ""
    from ..checkpoint.urls import checkpoints_at

    return checkpoints_at(path).canonical(str(path), kwargs.get("revision"), kwargs.get("token"))
