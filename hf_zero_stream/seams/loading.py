"""The seams of ``from_pretrained`` itself: build the model, load its weights, initialise what they lack."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, modeling_utils
from transformers.utils import logging

from ..bindings.install import override_methods
from ..bindings.table import install_model_rows, install_partition_rows
from ..checkpoint.formats import distributed_file, format_of_file, is_always_map, not_a_map_reason
from ..checkpoint.index import check_files, read_index_file
from ..checkpoint.lazy import LazyTensor
from ..destinations.base import refuse_wrapped
from ..destinations.initialise import random_state, set_random_state
from ..errors import CheckpointError, LoadError, UnsupportedError
from ..holdings.introspection import has_partition, keeping_groups
from ..ranks.coordinator import meeting
from ..ranks.rendezvous import LOAD
from ..registry import tool
from ..sources.base import is_url
from .converters import lazy_converters
from .ds_config import zero3_hidden
from .session import Original, Session, Stopped, bars_hidden, in_session, without_threads


logger = logging.get_logger(__name__)


@in_session
def get_hf_quantizer(
    session: Session, original: Original, config: Any, quantization_config: Any, *args: Any, **kwargs: Any
) -> Any:
    """Leave quantised loads to a plug-in; versions that pass no `gguf_file` here make values of such a file."""
    session.knows_config, session.quantised, file = True, None, kwargs.get("gguf_file")
    holders = [config, config.get_text_config(decoder=True)]
    configs = [quantization_config, *(getattr(each, "quantization_config", None) for each in holders)]
    if file is None and all(each is None for each in configs):
        return original(config, quantization_config, *args, **kwargs)
    what = f"{getattr(config, 'name_or_path', '') or 'this checkpoint'}: {file or 'its quantization_config'}"
    session.quantised = tool("PackedLoad", "packed", what)(session)
    session.load.destination.stock_reader = ""  # of such a checkpoint every rank may read all
    return session.quantised.quantizer(original, config, quantization_config, *args, **kwargs)


@in_session
def load_pretrained_model(
    session: Session,
    original: Original,
    model: Any,
    state_dict: Any,
    checkpoint_files: Any,
    load_config: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run transformers' function on a state dict of lazy tensors; the methods that it calls next are ours."""
    session.while_building.close()
    load, is_part, quantised = session.load, session.inside is not None, session.quantised
    if session.model is None and quantised is not None:
        quantised.leave_to_stock(checkpoint_files, load_config)
    if session.model is not None or session.stock_reason:
        return original(model, state_dict, checkpoint_files, load_config, *args, **kwargs)
    if not load.destination.takes_dtensors:
        whose = f"from_pretrained of {type(model).__name__}"
        refuse_wrapped(model.named_parameters(), whose, "Load it without streaming().")
    session.model = model
    load.clock.add_rest("model")
    load.destination.observe(model)
    slices = _open(session, state_dict, checkpoint_files, load_config)
    if session.rename is not None:
        slices = {session.rename(name): piece for name, piece in slices.items()}
    converting = nullcontext() if quantised is None else quantised.converting(load_config.hf_quantizer)
    with load.clock("plan"), converting, keeping_groups(model), lazy_converters(load_config.weight_mapping or ()):
        # Of a model inside another the dtype does not count: that of the outer one does.
        dtype = load.destination.dtype(None if is_part else load_config.dtype)
        if dtype is not None:
            for param in model.parameters():
                if param.is_meta and param.is_floating_point():
                    param.data = param.data.to(dtype)
            # Parameters take DeepSpeed's dtype, as in stock, by a single cast from the file's.
            load_config = replace(load_config, dtype=dtype)
        if load.destination.takes_dtensors:  # transformers would allocate as much as the whole model takes
            from .sharding import unshard

            load_config = replace(load_config, device_map=None)
            unshard(model)
        try:
            with bars_hidden(), without_threads():  # that loop loads nothing, and our own bar counts bytes
                info, *rest = original(model, slices, checkpoint_files, load_config, *args, **kwargs)
        except Exception:
            load.refuse_absent()  # an absent tensor may be why
            raise
        load.refuse_absent()
        info.unexpected_keys.difference_update(load.absent)  # they are in no shard
    if quantised is not None and not session.has_nested:  # else files are numbered in another way
        with load.clock("plan"):
            quantised.pack(model, load.destination.dtype(load_config.dtype), info)
    _plant(session, model, load_config, info)
    return info, *rest


def _plant(session: Session, model: Any, load_config: Any, loading_info: Any) -> None:
    """Give `model` own methods in place of those of its class that transformers calls next, each once."""
    move_missing = model._move_missing_keys_from_meta_to_device
    new: dict[str, tuple[torch.Tensor, int]] = {}
    """By the name of each buffer that the load has made, and filled with zeros: it, and its version then."""

    def place(missing: Any, device_map: Any, device_mesh: Any, hf_quantizer: Any) -> None:
        session.called.add("_move_missing_keys_from_meta_to_device")
        del model._move_missing_keys_from_meta_to_device
        empty = {name for name, it in model.named_buffers() if it.is_meta and not isinstance(it, LazyTensor)}
        _place(session, model, load_config, loading_info)
        if session.inside is None and not session.load.destination.fills_missing:
            # With the environment variable by which FSDP loads on rank 0 alone, others would get nothing here, unless
            # their model is quantised: that is all that transformers takes from its quantizer.
            move_missing(missing, device_map, device_mesh, hf_quantizer or True)
        for name, buffer in model.named_buffers():
            if name in empty and not buffer.is_meta:
                new[name] = buffer.zero_(), 0 if buffer.is_inference() else buffer._version
        if any(isinstance(param, DTensor) for param in model.parameters()):
            install_model_rows()
        if any(map(has_partition, model.parameters())):
            install_partition_rows()

    def initialise_missing(*_: Any) -> None:
        del model._initialize_missing_keys
        if session.inside is None:  # else the outer model's load does it
            with session.load.clock("finalise"):
                _initialise(session, model)
            if session.load.coordinator.is_main:
                _say_what_is_zero(model, new)

    vars(model).update(_move_missing_keys_from_meta_to_device=place, _initialize_missing_keys=initialise_missing)


def _initialise(session: Session, model: Any) -> None:
    """Have transformers initialise what the checkpoint lacks, with the values that it touches in memory."""

    def initialise(part: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        session.called.add("_initialize_weights")
        own = partial(type(part)._initialize_weights, part, module, *args, **kwargs)
        session.load.destination.initialise(own, module)

    # Where FSDP loads on the first rank of a host, the others draw no random numbers in stock's load: what their
    # programs draw next is what it is there.
    draws_apart = modeling_utils.is_fsdp_enabled() and not modeling_utils.is_local_dist_rank_0()
    callers_state = random_state() if draws_apart else None
    with ExitStack() as stack:
        for part in model.modules():
            if isinstance(part, PreTrainedModel):
                methods = {"_initialize_weights": partial(initialise, part)}
                if session.load.destination.takes_dtensors:
                    from .sharding import class_of_model

                    methods["is_custom_code"] = class_of_model(part).is_custom_code
                stack.enter_context(override_methods(part, **methods))
        model.initialize_weights()
    if callers_state is not None:
        set_random_state(callers_state)


def _load_adapter(model: Any, *args: Any, **kwargs: Any) -> Any:
    """For ``load_adapter``: an adapter is not partitioned, and under ZeRO-3 stock would fill it on rank 0 alone."""
    with zero3_hidden():
        return type(model)._load_pretrained_model(model, *args, **kwargs)


@in_session
def get_checkpoint_shard_files(
    session: Session, original: Original, name: Any, index_filename: str, *args: Any, **kwargs: Any
) -> Any:
    """Check the index before transformers parses it and looks for the files that it names."""
    read_index_file(index_filename)
    found = original(name, index_filename, *args, **kwargs)
    _check_and_read_ahead(session, found[0])  # while the model is built
    return found


def _check_and_read_ahead(session: Session, files: Sequence[str]) -> None:
    check_files(files)
    if not session.is_dry and session.inside is None and all(file.endswith(".safetensors") for file in files):
        session.load.checkpoint.read_ahead(files)


def load_state_dict(original: Original, file: Any, *args: Any, **kwargs: Any) -> Any:
    """Check what transformers reads: pickles, and the first shard where nothing else says the dtype.

    With ``weights_only``, transformers' default, no code in a pickle runs; torch raises its own error for such code.
    """
    session = Session.current()  # also of a load that was left to stock
    if session is None:
        return original(file, *args, **kwargs)
    if is_always_map(str(file)):
        views = session.load.map_file(file).views
        if not format_of_file(str(file)).holds_values or not session.load.checkpoint.reads_itself or is_url(file):
            return {name: torch.empty(it.sizes, dtype=it.node.dtype, device="meta") for name, it in views.items()}
    values = original(file, *args, **kwargs)
    if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
        raise CheckpointError(f"{file}: expected a map of names to tensors, found {type(values).__name__}.")
    return values


@in_session
def get_resolved_checkpoint_files(session: Session, original: Original, *args: Any, **kwargs: Any) -> Any:
    """A rank for which another one reads need not see the single file of a checkpoint without an index.

    transformers knows no folders of torch.distributed.checkpoint with that library's own files.
    """
    folder: Any = kwargs.get("pretrained_model_name_or_path")
    safetensors = kwargs.get("use_safetensors")
    subfolder = (kwargs.get("download_kwargs") or {}).get("subfolder") or ""
    is_folder = bool(folder) and os.path.isdir(folder) and not kwargs.get("gguf_file")
    if is_folder and not safetensors and (distributed := distributed_file(Path(folder, subfolder))) is not None:
        format_of_file(str(distributed))  # raises if the plug-in that reads it is not there
        return [str(distributed)], None
    try:
        return original(*args, **kwargs)
    except OSError:
        if session.load.checkpoint.reads_itself or not is_folder or safetensors is False:
            raise
        name = ".".join(filter(None, ("model", kwargs.get("variant"), "safetensors")))
        return [os.path.join(folder, subfolder, name)], None  # if rank 0 has others, the load says so


def _open(session: Session, state_dict: Any, files: Any, load_config: Any) -> Mapping[str, Any]:
    load = session.load
    if state_dict is not None:
        if not all(isinstance(value, torch.Tensor) for value in state_dict.values()):
            state_dict = tool("mapped_gguf_values", "packed", "a GGUF file")(state_dict)
        return load.open_values(state_dict)
    if not files:
        raise ValueError("Neither a state dict nor checkpoint files were found.")
    if load_config.sharded_metadata is None:
        _check_and_read_ahead(session, files)  # of an index, this was done when it was read
    weight_map = (load_config.sharded_metadata or {}).get("weight_map")
    if is_always_map(files[0]):
        return load.open(files, weight_map)
    load.compare_files(files)
    reason = load.coordinator.broadcast(partial(not_a_map_reason, load.checkpoint.source, files))
    if not reason:
        return load.open(files, weight_map)
    if load.coordinator.is_main:
        logger.info(f"hf_zero_stream reads this checkpoint through torch.load's memory map, because {reason}.")
    if is_url(files[0]):
        raise UnsupportedError(f"{reason}. Only a local copy of such a file can be read: download the checkpoint.")
    values: dict[str, torch.Tensor] = {}
    for file in files:
        values.update(modeling_utils.load_state_dict(file, map_location="cpu", weights_only=load_config.weights_only))
    return load.open_values(values)


def _say_what_is_zero(model: Any, new: Mapping[str, tuple[torch.Tensor, int]]) -> None:
    """Warn of those `new` buffers, which were zeros, that nothing has written to since; in stock they have any values.

    A load builds a model without values, so that what an ``__init__`` has put into a buffer is gone.
    """
    now = dict(model.named_buffers())
    untouched = {name: it for name, (it, version) in new.items() if not it.is_inference() and it._version == version}
    if left := [name for name, it in untouched.items() if not it.any() and now.get(name) is it]:
        logger.warning(
            f"{type(model).__name__}: {len(left)} buffer(s) are zeros: {', '.join(left[:8])}. The checkpoint does not "
            "have them, and the class's _init_weights does not initialise them: do that there, or after the load."
        )


def _place(session: Session, model: Any, load_config: Any, loading_info: Any) -> None:
    mismatched = loading_info.mismatched_keys and not load_config.ignore_mismatched_sizes
    if loading_info.error_msgs or loading_info.conversion_errors or mismatched:
        if not session.load.checkpoint.reads_itself:
            session.load.coordinator.check()  # the reason may be that the rank that reads for this one died
        raise LoadError("the checkpoint does not fit the model; see transformers' LOAD REPORT")
    if session.strict:
        lacking, unexpected, mismatched = _misfits(model, loading_info)
        raise_if_misfit(lacking.difference(session.optional), unexpected, mismatched)
    if session.inside is not None:
        return  # what its checkpoint lacks stays on the meta device, like the rest of the outer model
    missing = set(loading_info.missing_and_mismatched())
    tied = missing & set(getattr(model, "all_tied_weights_keys", ()))
    if session.has_nested:
        # Not missing: the from_pretrained in the model's __init__ gave them values.
        tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
        missing -= {name for name, tensor in tensors if not tensor.is_meta} - tied
    if session.is_dry:
        loading_info.missing_keys -= tied  # transformers, which would drop them when it ties, stops before that
        if session.is_quiet:
            loading_info.missing_keys.clear()
            loading_info.unexpected_keys.clear()
        raise Stopped((model, missing, tied))
    session.lacks = bool(missing - tied)
    session.load.fill(model, missing, tied)
    if session.load.destination.hides_zero3:
        vars(model)["_load_pretrained_model"] = _load_adapter


def raise_if_misfit(missing: Any, unexpected: Any, mismatched: Any) -> None:
    kinds = {"missing": missing, "unexpected": unexpected, "mismatched": [key for key, *_ in mismatched]}
    found = [f"{kind} {', '.join(sorted(keys)[:8])} ({len(keys)} in all)" for kind, keys in kinds.items() if keys]
    if found:
        raise LoadError(
            f"strict=True: the checkpoint does not fit the model exactly: {'; '.join(found)}. No weights were read. "
            "Use the model class and config that the checkpoint was saved from, or strict=False."
        )


def _misfits(model: Any, loading_info: Any) -> tuple[set[str], set[str], set[Any]]:
    """Missing, unexpected and mismatched keys as transformers will report them: without ties and known exceptions."""
    final = replace(loading_info, missing_keys=set(loading_info.missing_keys))
    ties = getattr(model, "all_tied_weights_keys", {})
    for source in set(ties.values()):
        group = {end for pair in ties.items() if source in pair for end in pair}
        if not group <= final.missing_keys:
            final.missing_keys -= group
    model._adjust_missing_and_unexpected_keys(final)
    return final.missing_keys, final.unexpected_keys, final.mismatched_keys


def tied_params_are_equal(original: Original, source: Any, target: Any) -> Any:
    """Compare partitions; transformers also asks for loaded models, whose weights it ties anew."""
    if not has_partition(source) or not has_partition(target):
        return original(source, target)
    from ..holdings.deepspeed.partitions import partitions_equal

    session = Session.current()
    with meeting(LOAD, "tied weights", None if session is None else session.load.coordinator) as coordinator:
        return partitions_equal(source, target, coordinator)
