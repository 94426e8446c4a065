"""The functions by which code comes to us: all that ``streaming()`` replaces until one of them needs the rest.

Most blocks on one rank, outside ZeRO-3, only load models as transformers loads them. They must not wait for the import
of what streams, which takes longer than such a load. So each replacement here first finds out, with nothing but light
imports, whether a call is stock's. If not, it *opens* the rest: everything that ``streaming()`` replaces is imported
and replaced. The rooms that do the work register as *handlers* of these functions when they are imported.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from transformers import PreTrainedModel
from transformers.utils import hub

from .. import scope
from ..config import StreamingConfig
from ..launcher import announces_zero3
from ..patching import Patches, Replacement
from ..ranks.presence import contact_replacements
from ..sources.urls import is_url
from .dequantised import forget_quantizer
from .ds_config import found_config
from .wrappers import accelerator_replacements, is_accelerator_there, shards_by_fsdp2


__all__ = [
    "MODEL_FILES",
    "WEIGHTS",
    "WATCHED",
    "handle",
    "keep_watching_saves",
    "must_open",
    "on_opening",
    "patch_imported",
    "patches",
]

Original = Callable[..., Any]

_OURS = frozenset({"ds_config", "strict", "distributed_config", "tp_plan", "tp_size", "device_mesh"})
"""Arguments of ``from_pretrained`` that stock does not know, or by which models are sharded."""

_openings: list[Callable[[], None]] = []
_handlers: dict[str, Callable[..., Any]] = {}


def on_opening(opening: Callable[[], None]) -> None:
    """Have `opening` called whenever a call is not stock's, before its handler."""
    _openings.append(opening)


def handle(**handlers: Callable[..., Any]) -> None:
    """Register what is called for `from_pretrained`, `save_pretrained`, `cached_files`: as a :data:`Replacement`;
    for `auto_model`: the same of an Auto class's ``from_pretrained``; for `asked_at_once`: a function of the first
    argument of a ``from_pretrained``, the others, and names of files; and for `file_of_engine`: the name of a function
    of DeepSpeed's ``zero_to_fp32``, and what a :data:`Replacement` of it gets.
    """
    _handlers.update(handlers)


def must_open() -> bool:
    """Whether a block that begins now may meet objects that exist already, with methods to be replaced at once."""
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    imported = {"transformers.trainer", "deepspeed.runtime.engine"} & sys.modules.keys()
    return several or bool(imported) or is_accelerator_there()


def _open() -> None:
    for opening in _openings:
        opening()


def _from_pretrained(original: Original, cls: Any, *args: Any, **kwargs: Any) -> Any:
    if not scope.active_configs():
        return original(cls, *args, **kwargs)
    is_loaded = "from_pretrained" in _handlers  # then there may be a session of a load around this
    if not is_loaded and _is_stocks(*args, **kwargs):
        result = original(cls, *args, **kwargs)
    else:
        _open()
        result = _handlers["from_pretrained"](original, cls, *args, **kwargs)
    forget_quantizer(result[0] if isinstance(result, tuple) else result)
    return result


def _is_stocks(path: Any = None, /, *args: Any, **kwargs: Any) -> bool:
    """Whether a load is left to transformers whatever comes: of one rank, of a whole model, with no wish for us.

    Raises a ConfigError, as every load, if settings are wrong.
    """
    settings = StreamingConfig.resolve(scope.current_config(), {})
    path = kwargs.get("pretrained_model_name_or_path", path)
    asks = settings.strict or not _OURS.isdisjoint(kwargs) or _may_be_at_url(path)
    return not (asks or must_open() or announces_zero3() or shards_by_fsdp2() or found_config()[0])


def _may_be_at_url(path: Any) -> bool:
    """Whether `path` may name a checkpoint that is read from a URL."""
    if is_url(path):
        return True
    looks_like_a_name = isinstance(path, str) and path.count("/") == 1
    return looks_like_a_name and StreamingConfig.resolve(scope.current_config()).hub != "cache"


def _save_pretrained(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    if scope.active_configs():
        forget_quantizer(self)  # it may have been loaded outside
        _open()
    handler = _handlers.get("save_pretrained")
    return handler(original, self, *args, **kwargs) if handler else original(self, *args, **kwargs)


def _cached_files(original: Original, path_or_repo_id: Any, *args: Any, **kwargs: Any) -> Any:
    if not scope.active_configs() or not _may_be_at_url(path_or_repo_id):
        return original(path_or_repo_id, *args, **kwargs)
    _open()
    return _handlers["cached_files"](original, path_or_repo_id, *args, **kwargs)


def _open_before(original: Original, *args: Any, **kwargs: Any) -> Any:
    """In place of what comes before calls that are not stock's, which must be replaced by then."""
    if scope.active_configs():
        _open()
    return original(*args, **kwargs)


_of_saves = Patches({(PreTrainedModel, "save_pretrained"): _save_pretrained})

patches = Patches(
    {
        (PreTrainedModel, "from_pretrained"): _from_pretrained,
        (hub, "cached_files"): _cached_files,
        **contact_replacements(),
        **accelerator_replacements(__init__=_open_before),
    },
    on_top_of=_of_saves,
)


@functools.cache  # once
def keep_watching_saves() -> None:
    """Have the handler of `save_pretrained` called from now on outside of ``streaming()`` too.

    There are models now that transformers alone would save wrongly.
    """
    _of_saves.__enter__()


# ------------------------------------------------------------------------------------------- classes that load by name

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")

_SINGLE = "model.safetensors"
"""If it is not there, an index names the shards: of this file only the beginning is asked for."""

MODEL_FILES = ("config.json", "adapter_config.json", "generation_config.json", _SINGLE, f"{_SINGLE}.index.json")
_TOKENIZER_FILES = (
    *("config.json", "tokenizer_config.json", "tokenizer.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "chat_template.json", "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model"),
)
_PROCESSOR_FILES = (
    *("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"),
    *_TOKENIZER_FILES,
)
"""What transformers asks for, one file after the other, when it loads these; most are in no checkpoint."""

_FILES_OF = {
    "transformers.models.auto.modeling_auto": MODEL_FILES,
    "transformers.models.auto.tokenization_auto": _TOKENIZER_FILES,
    "transformers.models.auto.processing_auto": _PROCESSOR_FILES,
    "transformers.tokenization_utils_base": _TOKENIZER_FILES,
}
"""The modules of classes, with ``from_pretrained`` of their own, that ask for these files."""


_BEGINNINGS = {
    "deepspeed.runtime.engine": ("DeepSpeedEngine", "__init__"),
    "deepspeed.utils.zero_to_fp32": ("", "get_fp32_state_dict_from_zero_checkpoint"),
    "peft.tuners.tuners_utils": ("BaseTuner", "_check_merge_allowed"),
}
"""Modules that may be imported in the middle of a block, and the class and function with which their use begins."""

_FILES_OF_ENGINES = "deepspeed.utils.zero_to_fp32", ("get_optim_files", "get_model_state_file")
"""The module and functions that name files of an engine's checkpoint to whoever opens them by himself."""

WATCHED = frozenset({*_FILES_OF, *_BEGINNINGS})
"""The modules for which :func:`patch_imported` has something to replace."""


def patch_imported() -> None:
    """Replace in the modules that have been imported. Small files of classes that load by name are asked for at once;
    of libraries that have their own entrances, these are replaced."""
    found: dict[tuple[Any, str], Replacement] = {}
    for name, files in _FILES_OF.items():
        for each in list(vars(sys.modules.get(name, object)).values()):
            is_own = isinstance(each, type) and each.__module__ == name and not each.__name__.startswith("_")
            if is_own and "from_pretrained" in vars(each):
                found[each, "from_pretrained"] = _auto_model if files is MODEL_FILES else partial(_ask_at_once, files)
    for name, (owner_name, function) in _BEGINNINGS.items():
        module = sys.modules.get(name)
        owner = getattr(module, owner_name, None) if owner_name else module
        if owner is not None and function in vars(owner):
            found[owner, function] = _open_before
    module, functions = sys.modules.get(_FILES_OF_ENGINES[0]), _FILES_OF_ENGINES[1]
    found |= {(module, name): partial(_file_of_engine, name) for name in functions if hasattr(module, name)}
    patches.add(found)


def _file_of_engine(name: str, original: Original, *args: Any, **kwargs: Any) -> Any:
    if not scope.active_configs():
        return original(*args, **kwargs)
    _open()
    return _handlers["file_of_engine"](name, original, *args, **kwargs)


def _auto_model(original: Original, *args: Any, **kwargs: Any) -> Any:
    if scope.active_configs() and must_open():
        _open()
        original = partial(_handlers["auto_model"], original)
    return _ask_at_once(MODEL_FILES, original, *args, **kwargs)


def _ask_at_once(names: Sequence[str], original: Original, *args: Any, **kwargs: Any) -> Any:
    path = args[1] if len(args) > 1 else kwargs.get("pretrained_model_name_or_path")  # the first one is the class
    if not scope.active_configs() or not _may_be_at_url(path):
        return original(*args, **kwargs)
    _open()
    with _handlers["asked_at_once"](path, kwargs, names):
        return original(*args, **kwargs)
