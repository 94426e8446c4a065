"""Receives the calls of ``from_pretrained``, and leaves some to transformers with nothing but light imports.

Most blocks on one rank, outside ZeRO-3, only load models as transformers loads them. They must not wait for the import
of what streams, which takes longer than such a load.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

from ..holdings.introspection import (
    LOADED_FROM,
    LOADED_SHAPES,
    accelerator_state,
    forget_quantizer,
    whole_shape,
)
from ..registry import has_tool
from ..reports.closing import tell_of_stock
from ..seams.ds_config import active_config
from ..settings import scope
from ..settings.config import StreamingConfig, announced_ranks, announces_zero3
from .arguments import (
    ALONE,
    MODEL_FILES,
    PROCESSOR_FILES,
    TOKENIZER_FILES,
    StockFunction,
    is_one_of_several,
    load_with_prefetch,
    may_be_at_url,
    model_of,
    shards_by_fsdp2,
)
from .whole import expect_zero3


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
        tell_of_stock(model_of(result), ALONE)
    else:
        from .integration import from_pretrained

        result = from_pretrained(original, cls, *args, **kwargs)
    model = model_of(result)
    path = args[0] if args else kwargs.get("pretrained_model_name_or_path")
    note_source(model, path, kwargs)
    expect_zero3(model, path)
    if has_tool("forget_quantizer"):  # without one, the save of it is an error
        forget_quantizer(model)
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
    path = kwargs.get("pretrained_model_name_or_path", path)
    asks = not _OURS.isdisjoint(kwargs) or may_be_at_url(path) or announced_ranks() > 1
    if asks or _may_stream() or announces_zero3() or shards_by_fsdp2() or active_config()[0]:
        return False
    settings = StreamingConfig.resolve(scope.current_config(), {})
    return not settings.strict and not settings.destination


def _may_stream() -> bool:
    return is_one_of_several() or "deepspeed.runtime.engine" in sys.modules or accelerator_state() is not None


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
