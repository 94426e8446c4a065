"""transformers' seams; the only file that touches its private surface.

``from_pretrained`` stays transformers' own. While a :class:`Session` is active in a thread, its seams differ there:

1. ``get_init_context``: the model is built on the meta device instead of inside ``zero.Init``;
2. ``_load_pretrained_model``: the *stock* function runs, in its branch without ZeRO-3, on a state dict of lazy
   tensors, so that renames, conversions, prefix and dtype rules and the report of missing keys stay transformers' own;
3. ``_move_missing_keys_from_meta_to_device``: lazy tensors become ZeRO-3 partitions and are read;
4. ``_initialize_weights`` and the comparison of tied weights work on partitions.

Tried with transformers 5.1.0, 5.17.0 and 5.23.0.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import PreTrainedModel, core_model_loading, modeling_utils
from transformers.integrations import deepspeed as transformers_deepspeed
from transformers.integrations import mxfp4
from transformers.utils import logging

from . import patching
from .checkpoint.lazy import LazyTensor
from .errors import LoadError, UnsupportedError, VersionError
from .planning.plan import LoadPlan


if TYPE_CHECKING:
    from .load import Load


__all__ = ["REPLACEMENTS", "PlanReady", "Session", "raise_if_misfit", "zero3_config", "zero3_hidden"]

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


class Session:
    """One ``from_pretrained`` that streams: what its seams share. Active inside ``with session:``, in this thread.

    Args:
        load: carries the load out.
        only_plan: raise :class:`PlanReady` instead of reading.
    """

    def __init__(self, load: Load, *, only_plan: bool = False) -> None:
        self.load = load
        self.only_plan = only_plan
        self.stock_reason = ""
        """Why the load is left to stock; empty while it streams."""
        self.building = False
        self.model: PreTrainedModel | None = None
        self.placing: Callable[[], None] | None = None
        self.spares: dict[int, tuple[Any, Any]] = {}

    def __enter__(self) -> Session:
        self._token = _session.set(self)
        return self

    def __exit__(self, *exception: object) -> None:
        _session.reset(self._token)
        self.load.close()

    @staticmethod
    def current() -> Session | None:
        """The session of this thread."""
        return _session.get()

    @staticmethod
    def streaming() -> Session | None:
        """The session of this thread, unless its load was left to stock."""
        session = _session.get()
        return session if session is not None and not session.stock_reason else None


_session: ContextVar[Session | None] = ContextVar("hf_zero_stream_session", default=None)


class PlanReady(BaseException):
    """Ends a ``from_pretrained`` that was only called for its plan."""

    def __init__(self, plan: LoadPlan) -> None:
        self.plan = plan


def zero3_config() -> dict[str, Any] | None:
    """The DeepSpeed config in which transformers finds ZeRO-3, or None if it does not."""
    return transformers_deepspeed.deepspeed_config() if transformers_deepspeed.is_deepspeed_zero3_enabled() else None


# --------------------------------------------------------------------------------------------------- hiding ZeRO-3

_hidden: ContextVar[bool] = ContextVar("hf_zero_stream_hides_zero3", default=False)
_hiding_lock = threading.Lock()


@contextmanager
def zero3_hidden() -> Iterator[None]:
    """transformers, its models included, finds no ZeRO-3 in this thread."""
    token = _hidden.set(True)
    with _hiding_lock:
        reference = transformers_deepspeed._hf_deepspeed_config_weak_ref
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


def _get_init_context(original: Callable[..., Any], cls: Any, dtype: Any, is_quantized: bool, *args: Any) -> Any:
    session = _session.get()
    if session is None or session.building:
        return original(dtype, is_quantized, *args)
    if session.stock_reason:
        _warn_of_stock(session)
        return original(dtype, is_quantized, *args)
    with zero3_hidden():
        contexts = original(dtype, is_quantized, *args)
    # Sub-models that an __init__ builds by from_config must not open a zero.Init of their own.
    return [_building(session), *contexts, modeling_utils.set_zero3_state()]


@contextmanager
def _building(session: Session) -> Iterator[None]:
    session.building = True
    try:
        with zero3_hidden():
            yield
    finally:
        session.building = False


def _warn_of_stock(session: Session) -> None:
    if session.load.coordinator.is_main:
        logger.warning(
            f"hf_zero_stream hands this load to stock transformers and DeepSpeed, because {session.stock_reason}."
        )


def _stays_quantised(hf_quantizer: Any) -> bool:
    """Whether the model keeps a quantised form, which ZeRO-3 cannot partition; else conversion ops dequantise."""
    if hf_quantizer is None:
        return False
    return not (hf_quantizer.pre_quantized and getattr(hf_quantizer.quantization_config, "dequantize", False))


def _load_pretrained_model(
    original: Callable[..., Any],
    model: Any,
    state_dict: Any,
    checkpoint_files: Any,
    load_config: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    session = _session.get()
    if session is not None and session.model is None and _stays_quantised(load_config.hf_quantizer):
        session.stock_reason = (
            "the model stays quantised, and then every rank holds all of it. To fine-tune it under ZeRO-3, pass a "
            "quantization_config with dequantize=True, where the format has one"
        )
        _warn_of_stock(session)
    if session is None or session.stock_reason or session.model is not None:
        return original(model, state_dict, checkpoint_files, load_config, *args, **kwargs)
    session.model = model
    load = session.load
    slices = _open(load, state_dict, checkpoint_files, load_config)
    with load.clock("plan"), zero3_hidden():
        load.dtype = load.dtype or load_config.dtype
        _cast_meta_parameters(model, load.dtype)
        # Parameters take DeepSpeed's dtype, as in stock, and by a single cast from the file's.
        return original(model, slices, checkpoint_files, replace(load_config, dtype=load.dtype), *args, **kwargs)


def _load_adapter(model: Any, *args: Any, **kwargs: Any) -> Any:
    """What ``load_adapter`` finds as a streamed model's own ``_load_pretrained_model``.

    An adapter's parameters are not partitioned; under ZeRO-3 stock would give their values to rank 0 alone.
    """
    with zero3_hidden():
        return PreTrainedModel._load_pretrained_model(model, *args, **kwargs)


def _refuse_distributed_checkpoint(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    if _session.get() is None:
        return original(self, *args, **kwargs)
    raise UnsupportedError(
        "This folder holds a distributed checkpoint (torch.distributed.checkpoint), which is not a map of safetensors "
        "bytes. Save it with save_pretrained(distributed_checkpoint=False), or load it without streaming()."
    )


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
    session = _session.get()
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
            raise_if_misfit(*_misfits(model, loading_info))
        missing = set(loading_info.missing_and_mismatched())
        tied = missing & set(getattr(model, "all_tied_weights_keys", ()))
        if session.only_plan:
            loading_info.missing_keys -= tied  # no tie comes any more that would take them out of the LOAD REPORT
            raise PlanReady(session.load.plan_only(model, missing, tied))
        session.load.place(model, missing, tied)
        vars(model)["_load_pretrained_model"] = _load_adapter

    session.placing = place
    with zero3_hidden():
        before = session.load.clock.seconds
        with session.load.clock("finalise"):
            result = original(model, load_config, loading_info)
        # The plan and the reads ran inside, and are counted as themselves.
        after = session.load.clock.seconds
        inner = sum(after[phase] - before[phase] for phase in ("plan", "read", "convert", "copy"))
        session.load.clock.add("finalise", -inner)
        return result


def raise_if_misfit(missing: Any, unexpected: Any, mismatched: Any) -> None:
    kinds = {"missing": missing, "unexpected": unexpected, "mismatched": [key for key, *_ in mismatched]}
    found = [f"{kind} {', '.join(sorted(keys)[:8])} ({len(keys)} in all)" for kind, keys in kinds.items() if keys]
    if found:
        raise LoadError(f"strict=True: the checkpoint does not fit the model exactly: {'; '.join(found)}.")


def _misfits(model: Any, loading_info: Any) -> tuple[set[str], set[str], set[Any]]:
    """Missing, unexpected and mismatched keys as transformers will report them, after ties and known exceptions."""
    final = replace(loading_info, missing_keys=set(loading_info.missing_keys))
    ties = getattr(model, "all_tied_weights_keys", {})
    for source in set(ties.values()):
        group = {end for pair in ties.items() if source in pair for end in pair}
        if not group <= final.missing_keys:
            final.missing_keys -= group
    model._adjust_missing_and_unexpected_keys(final)
    return final.missing_keys, final.unexpected_keys, final.mismatched_keys


def _move_missing_keys(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    session = _session.get()
    if session is None or session.model is not self or session.placing is None:
        return original(self, *args, **kwargs)
    session.placing()
    session.placing = None


def _initialize_weights(original: Callable[..., Any], self: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
    session = Session.streaming()
    if session is None or session.model is None or session.building:
        return original(self, module, *args, **kwargs)
    from .partition.initialise import run_gathering_what_is_touched

    run_gathering_what_is_touched(lambda: original(self, module, *args, **kwargs), module)


def _tied_params_are_equal(original: Callable[..., bool], source: Any, target: Any) -> bool:
    if not hasattr(source, "ds_tensor") or not hasattr(target, "ds_tensor"):
        return original(source, target)
    from .partition.zero3 import partitions_equal

    return partitions_equal(source, target)


def _convert_moe_packed_tensors(original: Callable[..., Any], blocks: Any, scales: Any, **kwargs: Any) -> Any:
    """gpt-oss's MXFP4 experts, dequantised by transformers' own code, but a piece at a time.

    Blocks of shape [experts, rows, groups, bytes] and scales of [experts, rows, groups] give
    [experts, groups * 2 * bytes, rows]: the result is transposed, and each byte holds two values.
    """
    if not isinstance(blocks, LazyTensor):
        return original(blocks, scales, **kwargs)
    experts, rows, groups, nbytes = blocks.shape
    return LazyTensor.of_blocks(
        functools.partial(original, **kwargs),
        (blocks, scales),
        sizes=(experts, groups * 2 * nbytes, rows),
        dtype=kwargs.get("dtype", torch.bfloat16),
        blocks=(1, 2 * nbytes, 1),
        dims=(0, 2, 1),
    )


def _convert(original: Callable[..., Any], self: Any, layer_name: str, *args: Any, **kwargs: Any) -> Any:
    """A converter, run once more on real tensors where one of its ops cannot work on lazy ones (``numpy()``)."""
    if Session.streaming() is None:
        return original(self, layer_name, *args, **kwargs)
    collected = {pattern: list(tensors) for pattern, tensors in self.collected_tensors.items()}
    try:
        return original(self, layer_name, *args, **kwargs)
    except core_model_loading.SkipParameters:
        for pattern, tensors in collected.items():
            # What is collected are functions that give a tensor.
            values = [tensor() if callable(tensor) else tensor for tensor in tensors]
            self.collected_tensors[pattern] = [
                value.materialise() if isinstance(value, LazyTensor) else value for value in values
            ]
        kwargs["loading_info"].conversion_errors.pop(layer_name, None)
        return original(self, layer_name, *args, **kwargs)


def _tqdm(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if Session.streaming() is not None and args:
        return args[0]  # nothing is loaded in that loop; our own bar counts bytes
    return original(*args, **kwargs)


def _deepcopy(original: Callable[..., Any], value: Any, *args: Any) -> Any:
    """transformers copies a converter for each checkpoint key, and throws away all copies but a target's first.

    A copy in which nothing was collected is as good as new: it is handed out again until it is used. For the 45,000
    tensors of DeepSeek-V3 that is more than half of the planning time.
    """
    session = Session.streaming()
    if session is None or not isinstance(value, core_model_loading.WeightConverter):
        return original(value, *args)
    template, spare = session.spares.get(id(value), (value, None))
    if spare is None or spare.collected_tensors:
        spare = original(value, *args)
        session.spares[id(value)] = (template, spare)
    return spare


def _spawn_materialize(original: Callable[..., Any], thread_pool: Any, *args: Any, **kwargs: Any) -> Any:
    # A lazy tensor is made in microseconds: handing it to a thread takes longer.
    return original(thread_pool if Session.streaming() is None else None, *args, **kwargs)


_distributed_owner = next(
    (c for c in PreTrainedModel.__mro__ if "_load_and_finalize_distributed_pretrained_model" in vars(c)), None
)
REPLACEMENTS: dict[tuple[Any, str], patching.Make] = {
    (PreTrainedModel, "get_init_context"): patching.class_method(_get_init_context),
    (PreTrainedModel, "_load_pretrained_model"): patching.static_method(_load_pretrained_model),
    (PreTrainedModel, "_finalize_model_loading"): patching.static_method(_finalize_model_loading),
    (PreTrainedModel, "_move_missing_keys_from_meta_to_device"): patching.function(_move_missing_keys),
    (PreTrainedModel, "_initialize_weights"): patching.function(_initialize_weights),
    (modeling_utils, "_tied_params_are_equal"): patching.function(_tied_params_are_equal),
    (_distributed_owner, "_load_and_finalize_distributed_pretrained_model"): patching.function(
        _refuse_distributed_checkpoint
    ),
    (core_model_loading.WeightConverter, "convert"): patching.function(_convert),
    (mxfp4, "convert_moe_packed_tensors"): patching.function(_convert_moe_packed_tensors),
    (core_model_loading, "deepcopy"): patching.function(_deepcopy),
    (core_model_loading, "spawn_materialize"): patching.function(_spawn_materialize),
    (core_model_loading, "tqdm"): patching.function(_tqdm),
}
"""(owner, attribute) -> what makes its replacement; what this version of transformers does not have needs none."""
REPLACEMENTS = {place: make for place, make in REPLACEMENTS.items() if hasattr(*place)}
