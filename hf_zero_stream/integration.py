"""``streaming()`` and ``plan()``: where a ``from_pretrained`` becomes a streaming load (saving: ``saving/hooks.py``).

Patches are put in when the first thread enters :func:`streaming` and taken out when the last one leaves. They look at
context variables, so a thread that did not enter sees stock behaviour.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import ContextDecorator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers.integrations import HfDeepSpeedConfig, is_fsdp_enabled
from transformers.utils import logging

from . import patching
from .config import StreamingConfig, adopt_alias, without_own_section
from .config import active_configs as _configs
from .coordination import Coordinator
from .errors import ConfigError, UnsupportedError
from .memory import collector_paused
from .planning.plan import LoadPlan
from .saving.hooks import REPLACEMENTS as SAVING_REPLACEMENTS
from .saving.hooks import is_active, trainer_patches
from .saving.publish import finish_interrupted
from .seams import REPLACEMENTS, Session, Stopped, other_config, raise_if_misfit, zero3_config, zero3_hidden


if TYPE_CHECKING:
    from .load import Load


__all__ = ["finish_saves_into", "lazily_loaded", "plan", "streaming"]

logger = logging.get_logger(__name__)


class streaming(ContextDecorator):  # noqa: N801 - used like a function
    """Inside, every ``from_pretrained`` under ZeRO-3 streams its checkpoint straight into partitions.

    Saving is the same, backwards: ``model.save_pretrained``, the Trainer's ``save_model`` and accelerate's ways to
    save a ZeRO model write each rank's own bytes, and gather nothing (see :func:`hf_zero_stream.save_pretrained`).

    A context manager and a decorator; may be nested and re-entered, and always restores transformers. Without ZeRO-3
    several ranks share the reading (see :attr:`StreamingConfig.share_reads`), so that all of them must make the call;
    with one rank calls are exactly transformers' own.

    Args:
        config: our settings; default: those of the ``streaming(config)`` around it, else from the environment and from
            the section ``"hf_zero_stream"`` of the DeepSpeed config (see :meth:`StreamingConfig.resolve`).

    Example:
        >>> with hf_zero_stream.streaming():
        ...     model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-30B-A3B", dtype="auto")
    """

    def __init__(self, config: StreamingConfig | None = None) -> None:
        if config is not None and not isinstance(config, StreamingConfig):
            raise ConfigError(f"streaming(config): expected a StreamingConfig; got {config!r}")
        self.config = config

    def __enter__(self) -> streaming:
        _patches.acquire()
        trainer_patches.acquire()
        around = _configs.get()
        inherited = around[-1] if around else None
        _configs.set((*around, inherited if self.config is None else self.config))
        is_active.set(True)
        return self

    def __exit__(self, *exception: object) -> None:
        _configs.set(_configs.get()[:-1])
        is_active.set(bool(_configs.get()))
        trainer_patches.release()
        _patches.release()


def _from_pretrained(original: Callable[..., Any], cls: Any, *args: Any, **kwargs: Any) -> Any:
    if not _configs.get() or Session.current() is not None:
        return original(*args, **kwargs)
    ds_config, strict = kwargs.pop("ds_config", None), kwargs.pop("strict", None)
    kept_alive = None if ds_config is None else HfDeepSpeedConfig(_buildable(ds_config))
    found = zero3_config()
    if found is None:
        _warn_if_zero3_comes_too_late()
        found_other = other_config()
        settings = _settings(found_other, strict)
        if not settings.share_reads or not _ranks_load_the_same(kwargs):
            return _stock_from_pretrained(original, args, kwargs, settings.strict)

    from .load import Load  # imports deepspeed, which takes seconds and which plain loading does not need
    from .partition import zero3

    if found is not None:
        zero3.init_distributed()
    zero3.reset_device_peak()
    coordinator = Coordinator.of_default_group()
    with coordinator.watched():
        try:
            if found is None:
                load = Load(settings, without_own_section(_buildable(found_other)), coordinator, replicated=True)
            else:
                adopt_alias(found, zero3.partition_dtype(found).itemsize)
                load = Load(_settings(found, strict), without_own_section(_buildable(found)), coordinator)
                zero3.refuse_unsupported(load.ds_config)
            with zero3.outside_zero_init():
                result = _streamed(load, original, args, kwargs)
        except BaseException as error:  # Ctrl-C too: the other ranks would wait for this one
            failure = coordinator.report(error)
            raise failure from (None if failure is error else error)
    if kept_alive is not None:
        (result[0] if isinstance(result, tuple) else result)._hf_zero_stream_ds_config = kept_alive
    return result


def _streamed(load: Load, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """What stock's `from_pretrained` returns while its seams are ours."""
    finish_saves_into(args[0] if args else kwargs.get("pretrained_model_name_or_path"), load.coordinator)
    # Partitions that are written later (by other threads, by training) must not be inference tensors.
    with (
        Session(load) as session,
        load.memory,
        load.clock("total"),
        collector_paused(),
        torch.inference_mode(False),
    ):
        result = original(*args, **kwargs)
    if session.stock_reason:
        load.coordinator.agree()
    else:
        model = result[0] if isinstance(result, tuple) else result
        model.streaming_report = load.finish(model, logger)
    return result


def finish_saves_into(path: Any, coordinator: Coordinator) -> None:
    """Have rank 0 finish a save into the folder `path` that died while its files got their final names."""

    def finish() -> list[str]:
        return finish_interrupted(Path(path)) if path is not None and os.path.isdir(path) else []

    if coordinator.share(finish) and coordinator.is_main:
        logger.warning(f"{path}: an interrupted save was complete; its files have their final names now.")


def _ranks_load_the_same(kwargs: Mapping[str, Any]) -> bool:
    """Whether there are several ranks, each of which would load all of the model into its host memory."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return False
    elsewhere = any(kwargs.get(name) is not None for name in ("device_map", "tp_plan", "device_mesh", "state_dict"))
    return not elsewhere and not is_fsdp_enabled() and torch.get_default_device().type == "cpu"


def _settings(ds_config: Mapping[str, Any], strict: bool | None) -> StreamingConfig:
    settings = StreamingConfig.resolve(_configs.get()[-1], ds_config)
    return settings if strict is None else replace(settings, strict=strict)


def _stock_from_pretrained(original: Callable[..., Any], args: Any, kwargs: Any, strict: bool) -> Any:
    """Stock's own call, which knows no `strict`."""
    if not strict:
        return original(*args, **kwargs)
    wants_info = kwargs.pop("output_loading_info", False)
    model, info = original(*args, output_loading_info=True, **kwargs)
    raise_if_misfit(info["missing_keys"], info["unexpected_keys"], info["mismatched_keys"])
    return (model, info) if wants_info else model


_patches = patching.Patches(
    {
        (transformers.PreTrainedModel, "from_pretrained"): patching.class_method(_from_pretrained),
        **REPLACEMENTS,
        **SAVING_REPLACEMENTS,
    }
)


def plan(
    path: str,
    *,
    world_size: int,
    rank: int = 0,
    ds_config: Mapping[str, Any] | str | None = None,
    dtype: torch.dtype | str | None = None,
    device: str | None = None,
    **kwargs: Any,
) -> LoadPlan:
    """The load plan of one rank of a world of any size; needs no process group and reads no weights.

    The model is built on the meta device, and transformers' own renames and conversions run over tensors that carry
    only their layout, exactly as in a load.

    Args:
        path: a checkpoint's folder or the id of a repository, as for ``from_pretrained``.
        world_size: number of ranks that share the checkpoint.
        rank: the rank to plan for.
        ds_config: a DeepSpeed config (dict or path), for the dtype that DeepSpeed gives to parameters, for the memory
            that its engine needs (``plan.footprint``) and for our settings.
        dtype: dtype of the parameters where `ds_config` is not given; default: the checkpoint's own.
        device: type of the device that will train ("cuda", "cpu"), for ``plan.footprint``; default: this machine's.
        kwargs: anything else that ``from_pretrained`` takes (``revision``, ``trust_remote_code``, ...).

    Raises:
        ConfigError: `rank` is not below `world_size`.
        HfZeroStreamError: the checkpoint is not sound.
        RuntimeError: it does not fit its model (transformers' own error, after its LOAD REPORT).

    Example:
        >>> plan = hf_zero_stream.plan("Qwen/Qwen3-30B-A3B", world_size=64, rank=37)
        >>> plan.cost.bytes_read, len(plan)
    """
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank: expected 0 <= rank < world_size ({world_size}); got {rank}")
    from .load import Load

    found = {} if ds_config is None else _buildable(ds_config)
    load = Load(
        StreamingConfig.resolve(None, found), without_own_section(found), Coordinator(rank, world_size, alone=True)
    )
    load.device = device or load.device
    return lazily_loaded(path, load, load.plan_only, dtype="auto" if dtype is None else dtype, **kwargs)


def lazily_loaded(
    path: str,
    load: Load,
    use: Callable[[torch.nn.Module, set[str], set[str]], Any],
    dtype: Any = "auto",
    **kwargs: Any,
) -> Any:
    """What `use` returns for the lazy model of a checkpoint, its missing names and its tied ones; nothing is read.

    Args:
        load: gives the lazy tensors; it is closed afterwards, but can still be read from.
        kwargs: for ``from_pretrained``.

    Raises:
        UnsupportedError: the load is one that is left to stock.
    """
    model_class = model_class_of(path, kwargs)
    with streaming(), zero3_hidden(), collector_paused(), Session(load, instead_of_placing=use) as session:
        try:
            model_class.from_pretrained(path, dtype=dtype, **kwargs)
        except Stopped as stopped:
            return stopped.result
    raise UnsupportedError(f"{path}: {session.stock_reason}, and such a load is not streamed.")


def model_class_of(path: str, kwargs: Mapping[str, Any]) -> Any:
    """The class that the checkpoint was saved from, else the Auto class that its own code is registered for."""
    names = ("revision", "token", "cache_dir", "subfolder", "trust_remote_code", "local_files_only")
    config = kwargs.get("config") or transformers.AutoConfig.from_pretrained(
        path, **{name: kwargs[name] for name in names if name in kwargs}
    )
    architecture = (config.architectures or [""])[0]
    if hasattr(transformers, architecture):
        return getattr(transformers, architecture)
    own = [auto for auto, name in getattr(config, "auto_map", {}).items() if str(name).endswith(f".{architecture}")]
    return getattr(transformers, own[0] if own else "AutoModel")


def _buildable(ds_config: Any) -> Any:
    """A DeepSpeed config with which a model can be built before the batch size is known, as accelerate makes it."""
    if not isinstance(ds_config, Mapping):
        with open(ds_config, encoding="utf-8") as file:
            ds_config = json.load(file)
    config = dict(ds_config)
    for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        if config.get(key, "auto") == "auto":
            config[key] = 1
    if config.get("train_batch_size") == "auto":
        del config["train_batch_size"]
    return config


def _warn_if_zero3_comes_too_late() -> None:
    environ = os.environ
    if environ.get("ACCELERATE_USE_DEEPSPEED") == "true" and environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE") == "3":
        if environ.get("ACCELERATE_DEEPSPEED_ZERO3_INIT", "true") == "true":
            logger.warning_once(
                "The launcher announces DeepSpeed ZeRO-3, but no DeepSpeed config object is alive yet, so this model "
                "is loaded in full on every rank. Move the line that creates Accelerator() or TrainingArguments(...) "
                "above from_pretrained(...)."
            )
        else:
            logger.warning_once(
                "The launcher announces DeepSpeed ZeRO-3 with zero3_init_flag: false, so this model is loaded in full "
                "on every rank. Set zero3_init_flag: true in the accelerate config to stream it."
            )
