"""transformers' seams; the only file that touches its private surface, and the only one that patches it.

``from_pretrained`` stays transformers' own. Inside :func:`streaming`, under ZeRO-3, four of its seams differ:

1. ``get_init_context``: the model is built on the meta device instead of inside ``zero.Init``;
2. ``_load_pretrained_model``: the *stock* function runs, in its branch without ZeRO-3, on a state dict of lazy
   tensors, so that renames, conversions, prefix and dtype rules and the report of missing keys stay transformers' own;
3. ``_move_missing_keys_from_meta_to_device``: lazy tensors become ZeRO-3 partitions and are read;
4. ``_initialize_weights`` and the comparison of tied weights work on partitions.

Patches are put in when the first thread enters :func:`streaming` and taken out when the last one leaves. They look at
a context variable, so a thread that did not enter sees stock behaviour. Tried with transformers 5.23.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ContextDecorator, contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel, core_model_loading, modeling_utils
from transformers.integrations import deepspeed as transformers_deepspeed
from transformers.utils import logging

from . import patching
from .config import StreamingConfig, without_own_section
from .coordination import Coordinator
from .errors import ConfigError, LoadError, UnsupportedError, VersionError
from .memory import collector_paused
from .planning.plan import LoadPlan


__all__ = ["plan", "streaming"]

logger = logging.get_logger(__name__)

_RELIED_ON = (
    (PreTrainedModel, "get_init_context"),
    (PreTrainedModel, "_load_pretrained_model"),
    (PreTrainedModel, "_finalize_model_loading"),
    (PreTrainedModel, "_move_missing_keys_from_meta_to_device"),
    (PreTrainedModel, "_initialize_weights"),
    (core_model_loading, "convert_and_load_state_dict_in_model"),
    (modeling_utils, "load_state_dict"),
    (modeling_utils, "set_zero3_state"),
    (transformers_deepspeed, "_hf_deepspeed_config_weak_ref"),
)
_missing = [name for owner, name in _RELIED_ON if not hasattr(owner, name)]
if _missing:
    raise VersionError(
        f"transformers {transformers.__version__} has no {', '.join(_missing)}; "
        "this version is not known to hf_zero_stream: install transformers>=5.1 or a newer hf_zero_stream."
    )

_configs: ContextVar[tuple[StreamingConfig | None, ...]] = ContextVar("hf_zero_stream_configs", default=())
_load: ContextVar[Any] = ContextVar("hf_zero_stream_load", default=None)
_hidden: ContextVar[bool] = ContextVar("hf_zero_stream_hides_zero3", default=False)


class streaming(ContextDecorator):  # noqa: N801 - used like a function
    """Inside, every ``from_pretrained`` under ZeRO-3 streams its checkpoint straight into partitions.

    A context manager and a decorator; may be nested and re-entered, and always restores transformers. Without ZeRO-3
    calls are exactly transformers' own.

    Args:
        config: our settings; default: from the environment and from the section ``"hf_zero_stream"`` of the DeepSpeed
            config (see :meth:`StreamingConfig.resolve`).

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
        _configs.set((*_configs.get(), self.config))
        return self

    def __exit__(self, *exception: object) -> None:
        _configs.set(_configs.get()[:-1])
        _patches.release()


# --------------------------------------------------------------------------------------------------- hiding ZeRO-3


@contextmanager
def _zero3_hidden() -> Iterator[None]:
    """transformers, its models included, finds no ZeRO-3 in this thread."""
    reference = transformers_deepspeed._hf_deepspeed_config_weak_ref
    token = _hidden.set(True)
    with _hiding_lock:
        if not isinstance(reference, _HidingReference):
            transformers_deepspeed._hf_deepspeed_config_weak_ref = _HidingReference(reference)
        transformers_deepspeed._hf_deepspeed_config_weak_ref.users += 1
    try:
        yield
    finally:
        _hidden.reset(token)
        with _hiding_lock:
            reference = transformers_deepspeed._hf_deepspeed_config_weak_ref
            if isinstance(reference, _HidingReference):
                reference.users -= 1
                if reference.users == 0:
                    transformers_deepspeed._hf_deepspeed_config_weak_ref = reference.original


_hiding_lock = threading.Lock()


class _HidingReference:
    """Stands in for the weak reference to the DeepSpeed config through which transformers detects ZeRO-3.

    All of transformers, model files included, asks this one reference; to a thread that hides ZeRO-3 it answers that
    there is no config.
    """

    def __init__(self, original: Callable[[], Any] | None) -> None:
        self.original = original
        self.users = 0

    def __call__(self) -> Any:
        return None if _hidden.get() or self.original is None else self.original()


# -------------------------------------------------------------------------------------------------------------- seams


class _Session:
    """What the seams of one ``from_pretrained`` share."""

    def __init__(self, load: Any) -> None:
        self.load = load
        self.model: PreTrainedModel | None = None
        self.building = False
        self.stock_reason = ""
        self.only_plan = False
        self.placing: Callable[[], None] | None = None
        self.spares: dict[int, tuple[Any, Any]] = {}

    @property
    def streams(self) -> bool:
        return not self.stock_reason


def _from_pretrained(original: Callable[..., Any], cls: Any, *args: Any, **kwargs: Any) -> Any:
    if not _configs.get() or _load.get() is not None:
        return original(*args, **kwargs)
    ds_config, strict = kwargs.pop("ds_config", None), kwargs.pop("strict", None)
    kept_alive = None
    if ds_config is not None:
        kept_alive = transformers_deepspeed.HfDeepSpeedConfig(_loadable(ds_config))
    if not transformers_deepspeed.is_deepspeed_zero3_enabled():
        _warn_if_zero3_comes_too_late()
        return _stock_from_pretrained(original, args, kwargs, _settings({}, strict).strict)

    from .load import Load  # imports deepspeed, which takes seconds and which only ZeRO-3 needs
    from .partition import zero3

    found = transformers_deepspeed.deepspeed_config()
    settings = _settings(found, strict)
    zero3.init_distributed()
    zero3.reset_device_peak()
    load = Load(settings, without_own_section(found), Coordinator.of_default_group())
    session = _Session(load)
    session.stock_reason = zero3.stock_reason(load.ds_config)
    token = _load.set(session)
    try:
        # Partitions that are written later (by other threads, by training) must not be inference tensors.
        with load.memory, load.clock("total"), torch.inference_mode(False):
            zero3.refuse_unsupported(load.ds_config)
            result = original(*args, **kwargs)
            model = result[0] if isinstance(result, tuple) else result
    except Exception as error:
        failure = load.coordinator.report(error)
        raise failure from (None if failure is error else error)
    finally:
        _load.reset(token)
        load.close()
    if session.streams:
        model.streaming_report = load.finish(model, logger.info)
    else:
        load.coordinator.agree()
    if kept_alive is not None:
        model._hf_zero_stream_ds_config = kept_alive
    return result


class _PlanReady(BaseException):
    """Ends a ``from_pretrained`` that was only called for its plan."""

    def __init__(self, plan: LoadPlan) -> None:
        self.plan = plan


def plan(
    path: str,
    *,
    world_size: int,
    rank: int = 0,
    ds_config: Mapping[str, Any] | str | None = None,
    dtype: torch.dtype | str | None = None,
    **kwargs: Any,
) -> LoadPlan:
    """The load plan of one rank of a world of any size; needs no process group and reads no weights.

    The model is built on the meta device, and transformers' own renames and conversions run over tensors that carry
    only their layout, exactly as in a load.

    Args:
        path: a checkpoint's folder or the id of a repository, as for ``from_pretrained``.
        world_size: number of ranks that share the checkpoint.
        rank: the rank to plan for.
        ds_config: a DeepSpeed config (dict or path), for the dtype that DeepSpeed gives to parameters and for our
            settings.
        dtype: dtype of the parameters where `ds_config` is not given; default: the checkpoint's own.
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

    found = {} if ds_config is None else _loadable(ds_config)
    settings = StreamingConfig.resolve(None, found)
    session = _Session(Load(settings, without_own_section(found), Coordinator(rank, world_size, alone=True)))
    session.only_plan = True
    model_class = _model_class(path, kwargs)
    with streaming(), _zero3_hidden():
        token = _load.set(session)
        try:
            model_class.from_pretrained(path, dtype="auto" if dtype is None else dtype, **kwargs)
        except _PlanReady as ready:
            return ready.plan
        finally:
            _load.reset(token)
            session.load.close()
    raise UnsupportedError(f"{path}: {session.stock_reason}, and such a load is not streamed, so it has no plan.")


def _model_class(path: str, kwargs: Mapping[str, Any]) -> Any:
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


def _settings(ds_config: Mapping[str, Any], strict: bool | None) -> StreamingConfig:
    settings = StreamingConfig.resolve(_configs.get()[-1], ds_config)
    return settings if strict is None else replace(settings, strict=strict)


def _stock_from_pretrained(original: Callable[..., Any], args: Any, kwargs: Any, strict: bool) -> Any:
    """Stock's own call, which knows no `strict`."""
    if not strict:
        return original(*args, **kwargs)
    wants_info = kwargs.pop("output_loading_info", False)
    model, info = original(*args, output_loading_info=True, **kwargs)
    _raise_if_misfit(info["missing_keys"], info["unexpected_keys"], info["mismatched_keys"])
    return (model, info) if wants_info else model


def _raise_if_misfit(missing: Any, unexpected: Any, mismatched: Any) -> None:
    kinds = {"missing": missing, "unexpected": unexpected, "mismatched": [key for key, *_ in mismatched]}
    found = [f"{kind} {', '.join(sorted(keys)[:8])} ({len(keys)} in all)" for kind, keys in kinds.items() if keys]
    if found:
        raise LoadError(f"strict=True: the checkpoint does not fit the model exactly: {'; '.join(found)}.")


def _get_init_context(original: Callable[..., Any], cls: Any, dtype: Any, is_quantized: bool, *args: Any) -> Any:
    session = _load.get()
    if session is None or session.building:
        return original(dtype, is_quantized, *args)
    if is_quantized and not session.stock_reason:
        session.stock_reason = "the checkpoint is quantised (every rank then holds the whole model)"
    if not session.streams:
        if session.load.coordinator.is_main:
            logger.warning(
                f"hf_zero_stream hands this load to stock transformers and DeepSpeed, because {session.stock_reason}."
            )
        return original(dtype, is_quantized, *args)
    with _zero3_hidden():
        contexts = original(dtype, is_quantized, *args)
    # Sub-models that an __init__ builds by from_config must not open a zero.Init of their own.
    return [_building(session), *contexts, modeling_utils.set_zero3_state()]


@contextmanager
def _building(session: _Session) -> Iterator[None]:
    session.building = True
    try:
        with _zero3_hidden():
            yield
    finally:
        session.building = False


def _load_pretrained_model(
    original: Callable[..., Any], model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, *args: Any
) -> Any:
    session = _load.get()
    if session is None or not session.streams or session.model is not None:
        return original(model, state_dict, checkpoint_files, load_config, *args)  # an adapter, or stock's load
    session.model = model
    load = session.load
    with collector_paused():
        slices = _open(load, state_dict, checkpoint_files, load_config)
    with load.clock("plan"), collector_paused(), _zero3_hidden():
        load.dtype = load.dtype or load_config.dtype
        _cast_meta_parameters(model, load.dtype)
        # Parameters take DeepSpeed's dtype, as in stock, and by a single cast from the file's.
        return original(model, slices, checkpoint_files, replace(load_config, dtype=load.dtype), *args)


def _open(load: Any, state_dict: Any, checkpoint_files: Any, load_config: Any) -> Mapping[str, Any]:
    if state_dict is not None:
        return load.open_values(state_dict)
    if not checkpoint_files:
        raise ValueError("Neither a state dict nor checkpoint files were found.")
    if checkpoint_files[0].endswith(".safetensors"):
        return load.open(checkpoint_files, (load_config.sharded_metadata or {}).get("weight_map"))
    logger.info("The checkpoint is not in safetensors: hf_zero_stream reads it through torch.load's memory map.")
    values: dict[str, torch.Tensor] = {}
    for file in checkpoint_files:
        values.update(modeling_utils.load_state_dict(file, map_location="cpu", weights_only=load_config.weights_only))
    return load.open_values(values)


def _cast_meta_parameters(model: torch.nn.Module, dtype: torch.dtype) -> None:
    for param in model.parameters():
        if param.is_meta and param.is_floating_point() and param.dtype != dtype:
            param.data = param.data.to(dtype)


def _finalize_model_loading(original: Callable[..., Any], model: Any, load_config: Any, loading_info: Any) -> Any:
    session = _load.get()
    if session is None or session.model is not model:
        return original(model, load_config, loading_info)

    def place() -> None:
        faulty = (
            loading_info.error_msgs
            or loading_info.conversion_errors
            or (loading_info.mismatched_keys and not load_config.ignore_mismatched_sizes)
        )
        if faulty:
            raise LoadError("the checkpoint does not fit the model; see transformers' LOAD REPORT")
        if session.load.config.strict:
            _raise_if_misfit(*_misfits(model, loading_info))
        missing = set(loading_info.missing_and_mismatched())
        tied = missing & set(getattr(model, "all_tied_weights_keys", ()))
        if session.only_plan:
            loading_info.missing_keys -= tied  # no tie comes any more that would take them out of the LOAD REPORT
            raise _PlanReady(session.load.plan_only(model, missing, tied))
        session.load.place(model, missing, tied)

    session.placing = place
    with _zero3_hidden():
        before = session.load.clock.seconds
        result = None
        with session.load.clock("finalise"):
            result = original(model, load_config, loading_info)
        # The plan and the reads ran inside, and are counted as themselves.
        after = session.load.clock.seconds
        inner = sum(after[phase] - before[phase] for phase in ("plan", "read", "convert", "copy"))
        session.load.clock.add("finalise", -inner)
        return result


def _misfits(model: Any, loading_info: Any) -> tuple[set[str], set[str], set[Any]]:
    """Missing, unexpected and mismatched keys as transformers will report them, after ties and known exceptions."""
    final = replace(loading_info, missing_keys=set(loading_info.missing_keys))
    ties = getattr(model, "all_tied_weights_keys", {})
    for ends in ties.items():
        group = {end for pair in ties.items() if ends[1] in pair for end in pair}
        if not group <= final.missing_keys:
            final.missing_keys -= group
    model._adjust_missing_and_unexpected_keys(final)
    return final.missing_keys, final.unexpected_keys, final.mismatched_keys


def _move_missing_keys(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    session = _load.get()
    if session is None or session.model is not self or session.placing is None:
        return original(self, *args, **kwargs)
    session.placing()
    session.placing = None


def _initialize_weights(original: Callable[..., Any], self: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
    session = _load.get()
    if session is None or session.model is None or not session.streams or session.building:
        return original(self, module, *args, **kwargs)
    from .partition.initialise import run_gathering_what_is_touched

    run_gathering_what_is_touched(lambda: original(self, module, *args, **kwargs), module)


def _tied_params_are_equal(original: Callable[..., bool], source: Any, target: Any) -> bool:
    if not hasattr(source, "ds_tensor") or not hasattr(target, "ds_tensor"):
        return original(source, target)
    from .partition.zero3 import partitions_equal

    return partitions_equal(source, target)


def _tqdm(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    session = _load.get()
    if session is not None and session.streams and args:
        return args[0]  # nothing is loaded in that loop; our own bar counts bytes
    return original(*args, **kwargs)


def _deepcopy(original: Callable[..., Any], value: Any, *args: Any) -> Any:
    """transformers copies a converter for each checkpoint key, and throws away all copies but a target's first.

    A copy in which nothing was collected is as good as new: it is handed out again until it is used. For the 45,000
    tensors of DeepSeek-V3 that is more than half of the planning time.
    """
    session = _load.get()
    if session is None or not isinstance(value, core_model_loading.WeightConverter):
        return original(value, *args)
    template, spare = session.spares.get(id(value), (value, None))
    if spare is None or spare.collected_tensors:
        spare = original(value, *args)
        session.spares[id(value)] = (template, spare)
    return spare


def _spawn_materialize(original: Callable[..., Any], thread_pool: Any, *args: Any, **kwargs: Any) -> Any:
    # A lazy tensor is made in microseconds: handing it to a thread takes longer.
    return original(thread_pool if _load.get() is None else None, *args, **kwargs)


_REPLACEMENTS: dict[tuple[Any, str], Callable[[Any], Any]] = {
    (PreTrainedModel, "from_pretrained"): patching.class_method(_from_pretrained),
    (PreTrainedModel, "get_init_context"): patching.class_method(_get_init_context),
    (PreTrainedModel, "_load_pretrained_model"): patching.static_method(_load_pretrained_model),
    (PreTrainedModel, "_finalize_model_loading"): patching.static_method(_finalize_model_loading),
    (PreTrainedModel, "_move_missing_keys_from_meta_to_device"): patching.function(_move_missing_keys),
    (PreTrainedModel, "_initialize_weights"): patching.function(_initialize_weights),
    (modeling_utils, "_tied_params_are_equal"): patching.function(_tied_params_are_equal),
    (core_model_loading, "deepcopy"): patching.function(_deepcopy),
    (core_model_loading, "spawn_materialize"): patching.function(_spawn_materialize),
    (core_model_loading, "tqdm"): patching.function(_tqdm),
}
# What an older transformers does not have needs no patch.
_patches = patching.Patches({place: make for place, make in _REPLACEMENTS.items() if hasattr(*place)})


# ---------------------------------------------------------------------------------------------------- finding ZeRO-3


def _loadable(ds_config: Any) -> Any:
    """A DeepSpeed config with which a model can be built before the batch size is known, as accelerate makes it."""
    if not isinstance(ds_config, Mapping):
        import json

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
