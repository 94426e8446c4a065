"""Turns a call of ``model.save_pretrained`` into a save by all ranks, of what they hold between them.

Usually all ranks make the call. But the Trainer makes it on rank 0 only, and a model's class may have a
``save_pretrained`` of its own, which does something with the files afterwards. :func:`run_on_leader` runs such code:
on rank 0 alone, while the others wait, and each save that it comes to is carried out by all ranks there and then.
"""

from __future__ import annotations

import inspect
import os
import pickle
from collections.abc import Callable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Unpack

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from ..bindings.install import shortening
from ..bindings.table import installed
from ..checkpoint.lazy import LazyTensor
from ..errors import PeerError, SaveError, UnsupportedError
from ..holdings.introspection import (
    forget_quantizer,
    has_gathered,
    has_partition,
    is_dtensor,
    is_gathered_whole,
    is_packed,
    is_peft_model,
    is_sharded,
    lacks_values,
)
from ..holdings.own_names import adapter_names, named_parameters
from ..ranks.coordinator import Coordinator, meeting
from ..ranks.presence import Presence, is_alone
from ..ranks.rendezvous import SAVE, DoneAlone, pass_by
from ..registry import PatchScope
from ..reports.save import SaveReport
from ..seams.saving import is_laying_out
from ..seams.wrappers import unwrapped
from ..settings.scope import active_configs, set_in_context
from ..sources.base import is_url
from .arguments import SIGNATURE, SaveArguments, kind_of_save, refuse_unknown_arguments, refuse_url
from .beside import Kept
from .count import refuse_empty
from .mirrors import url_of
from .pending import operation
from .save import Save


@shortening
def save_pretrained(
    model: Any,
    folder: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | str | None = None,
    values: Kept | None = None,
    **kwargs: Unpack[SaveArguments],
) -> SaveReport:
    """Save the whole of a model that ranks share, as transformers' ``save_pretrained`` would; nothing is gathered.

    Every rank must call it, and writes the bytes that it holds. The folder is the one that transformers writes: the
    same shards with the same bytes, index, config and generation config. Names and layouts are those of the checkpoint
    that the model came from. It works before and after ``deepspeed.initialize``, with every ZeRO stage and without
    DeepSpeed, and with models that FSDP2 or tensor parallelism has sharded into DTensors.

    Files get their final names when all are complete. If anything fails, an earlier checkpoint in the folder stays.
    Settings (who writes, whether files are compared, a bar) are those of :class:`streaming` around the call.

    Args:
        model: the model, or the engine, or what ``accelerator.prepare`` made of it. Of PEFT's the adapters are saved.
        folder: where to save: a folder, which only rank 0 must see, or a URL (``s3://``, ``gs://``, ``az://``).
        max_shard_size: of a file, in bytes, or as in ``"5GB"``.
        dtype: of the floating-point weights; default: the model's own. ``torch.float32`` saves the fp32 values that
            the optimizer trains, if it has them.
        values: what is written in place of the values of parameters, an average of weights for instance, as
            :func:`hf_zero_stream.save_state` takes it `beside`. What it lacks are the model's own values.
        kwargs: anything else that transformers' ``save_pretrained`` takes, for instance ``variant``.

    Returns:
        What every rank did; the same on all of them.

    Raises:
        SaveError: on all ranks, if a file cannot be written on any.
        ConfigError, UnsupportedError: an argument or its value is not known, or cannot be honoured.
        UrlError: nothing can be saved to the URL.

    Examples:
        >>> hf_zero_stream.save_pretrained(engine, "trained", dtype=torch.float32)
    """
    call: dict[str, Any] = {"max_shard_size": max_shard_size, "dtype": dtype, **kwargs}
    leader = _leader.get()
    if leader is not None:  # a save_pretrained of the model's own calls this
        _refuse_values(model, values)
        return leader.save(model, folder, call)
    with operation(SAVE, folder=folder):
        save = Save(model, folder, values=values, **call)
        if not _has_own_code(save.model):
            others = _OF_PEFT if is_peft_model(save.model) else ()
            refuse_unknown_arguments({"max_shard_size": max_shard_size, **kwargs}, others)
            return save.pretrained()
        _refuse_values(save.model, values)
        refuse_url(folder, f"{type(save.model).__name__}.save_pretrained")
    report = run_on_leader(save.model, save.call_own_code, {"dtype": dtype})  # which may change modules
    if report is None:
        raise SaveError(f"{folder}: {type(save.model).__name__}.save_pretrained has saved nothing.")
    return report


def _refuse_values(model: Any, values: Kept | None) -> None:
    """Raise an UnsupportedError for `values` that code of the model's own, on rank 0, would have to pass on."""
    if values is not None:
        raise UnsupportedError(
            f"save_pretrained(values=...): {type(model).__name__}'s own save_pretrained saves the model's values. "
            "Copy these into the model, or into another one of its class, and save that."
        )


def save_pretrained_hook(original: Callable[..., Any], self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    """``PreTrainedModel.save_pretrained``."""
    if active_configs():
        forget_quantizer(self)  # it may have been loaded outside
    bound = SIGNATURE.bind(self, *args, **kwargs)
    arguments = bound.arguments
    if not _is_ours(arguments):
        _refuse_packed(arguments)
        if active_configs() and not is_laying_out():
            refuse_url(arguments["save_directory"], "save_pretrained with these arguments")
            if arguments.get("state_dict") is not None:
                _save_alone(arguments)
            else:
                refuse_empty(self)
        return original(self, *args, **kwargs)
    leader = _leader.get()
    if _has_own_code(self):
        refuse_url(arguments["save_directory"], f"{type(self).__name__}.save_pretrained")
    if leader is None and arguments.get("state_dict") is None and is_gathered_whole(self):
        _refuse_packed(arguments)
        refuse_url(arguments["save_directory"], "save_pretrained inside GatheredParameters")
        # Of several callers rank 0 writes, as in newer versions of transformers.
        arguments["is_main_process"] = arguments.get("is_main_process", True) and dist.get_rank() == 0
        return original(*bound.args, **bound.kwargs)
    folder = arguments["save_directory"]
    call = {name: value for name, value in arguments.items() if name not in ("self", "save_directory", "kwargs")}
    call.update(arguments.get("kwargs", {}))
    if leader is not None:
        leader.save(self, folder, call)
        return
    coordinator = Coordinator.of_default_group()
    try:
        with operation(SAVE, folder=folder):
            kind = replace(kind_of_save(self, coordinator, to_url=is_url(folder)), call=str(folder))
            with meeting(kind, "a model", coordinator):
                Save(self, folder, coordinator=coordinator, **call).pretrained()
    except DoneAlone:
        if coordinator.is_main:
            raise SaveError(
                f"{folder}: another rank was given a state dict with values to save, and rank 0, which writes it, was "
                "given none. Give it to rank 0, or to none of them: then all ranks save what they hold."
            ) from None
        arguments["is_main_process"] = False
        return original(*bound.args, **bound.kwargs)


_OF_PEFT = ("selected_adapters", "save_embedding_layers")
"""Arguments that PEFT's ``save_pretrained`` has, and transformers' has not."""


def save_adapters_hook(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """``PeftModel.save_pretrained``, which saves what one rank has of adapters: under ZeRO-3 that is nothing."""
    call = inspect.signature(original).bind(self, *args, **kwargs).arguments
    call |= call.pop("kwargs", {})
    names = adapter_names(self)
    in_parts = any(
        has_partition(param) or is_dtensor(param) for name, param in named_parameters(self) if name in names
    )
    if not active_configs() or not in_parts or call.get("state_dict") is not None or has_gathered(self):
        return original(self, *args, **kwargs)
    del call["self"]
    save_pretrained(self, call.pop("save_directory"), **call)
    return None


def _is_ours(arguments: Mapping[str, Any]) -> bool:
    """Whether all ranks save together what a call of ``save_pretrained`` asks for; else transformers does.

    If it does, other ranks may still be given the values, and save them alone: see :func:`_save_alone`.
    """
    if is_laying_out():
        return False
    leader = _leader.get()
    if leader is not None and leader.settings is not None:
        return True
    if not active_configs() or arguments.get("distributed_checkpoint"):
        return False
    state_dict = arguments.get("state_dict")
    if state_dict is not None:
        return any(isinstance(value, LazyTensor) for value in state_dict.values())
    model = arguments["self"]
    is_shared = any(map(has_partition, model.parameters())) or is_sharded(model) or is_packed(model)
    return is_shared or is_url(arguments["save_directory"])  # transformers would take a URL for the path of a folder


def _save_alone(arguments: Mapping[str, Any]) -> None:
    """Have ranks that make the same call without values, which this rank has gathered, know that this one saves them.

    The usual way to gather gives them to rank 0, and None to the others. This rank waits for nobody: the others may
    not make the call at all.
    """
    if _leader.get() is None and not is_alone() and lacks_values(arguments["self"]):
        with suppress(PeerError):  # the store is lost, and nobody waits for long
            pass_by(Presence.in_default_group(), replace(SAVE, call=str(arguments["save_directory"])))


def _has_own_code(model: PreTrainedModel) -> bool:
    """Whether another ``save_pretrained`` than transformers' saves `model`, and may write more than that does."""
    if is_peft_model(model):
        return False
    has_own = "save_pretrained" in vars(model)  # in place of its class's
    return has_own or type(model).save_pretrained is not PreTrainedModel.save_pretrained


def _refuse_packed(arguments: Mapping[str, Any]) -> None:
    """Raise if transformers alone is to save packed weights: it would write their bytes as if they were values.

    A load may take them for values and give a wrong model, as bitsandbytes' does. Adapters alone it saves rightly.
    """
    model = arguments["self"]
    if is_laying_out() or getattr(model, "_hf_peft_config_loaded", False) or not is_packed(model):
        return
    raise UnsupportedError(
        f"save_pretrained({arguments['save_directory']!r}): the weights of this {type(model).__name__} are quantised "
        "and packed (hf_zero_stream's keep_quantized), and transformers alone would write their bytes as flat tensors "
        "without scales. Call hf_zero_stream.save_pretrained(model, folder), or model.save_pretrained(folder) inside "
        "streaming(), on all ranks, outside of GatheredParameters, and without a state_dict or distributed_checkpoint."
    )


def run_on_leader(model: Any, work: Callable[[], Any], settings: Mapping[str, Any] | None = None) -> SaveReport | None:
    """Run `work` on rank 0, and every save that it calls for on all ranks (all ranks); the last report, if any.

    The `settings` are for saves that do not give their own. With them, calls are taken over that else would be left to
    transformers, because each rank has the whole model. A failed save or `work` raises on all ranks.
    """
    whole, coordinator = unwrapped(model), Coordinator.of_default_group()
    with meeting(kind_of_save(whole, coordinator), "a model, by code of rank 0", coordinator):
        if not coordinator.is_main:
            report = None
            while (call := pickle.loads(coordinator.broadcast(bytes))) is not None:  # of what rank 0 sends
                report = _save_part(whole, coordinator, call)
            return report
        leader = _Leader(whole, coordinator, settings)
        with set_in_context(_leader, leader), suppress(_Failed), installed(PatchScope.BLOCK):
            work()
        if leader.failure is not None:
            raise leader.failure
        coordinator.broadcast(lambda: pickle.dumps(None))  # there is no more to save
        return leader.report


def runs_on_leader() -> bool:
    """Whether this thread runs the work of :func:`run_on_leader`, while the other ranks wait for its saves."""
    return _leader.get() is not None


class _Failed(BaseException):
    """A save has failed on some rank, and all ranks know it, so rank 0 cannot go on.

    Not an ``Exception``: the Trainer takes a ``ValueError`` for a wish to save in another way, on rank 0 alone.
    """


@dataclass(eq=False)
class _Leader:
    """Rank 0 while the others follow."""

    model: PreTrainedModel
    coordinator: Coordinator
    settings: Mapping[str, Any] | None
    report: SaveReport | None = None
    failure: BaseException | None = None

    def save(self, model: Any, folder: Any, arguments: Mapping[str, Any]) -> SaveReport:
        """Carry out one save with all ranks, of a module that is named for them."""
        if self.failure is not None:
            raise _Failed from self.failure
        refuse_url(folder, "save_pretrained on rank 0 alone")
        part = unwrapped(model)
        name = next((name for name, module in self.model.named_modules() if module is part), None)
        if name is None:
            raise UnsupportedError(
                f"save_pretrained: rank 0 saves a {type(part).__name__} that is no part of the "
                f"{type(self.model).__name__} that all ranks are saving, so the others cannot take part. Save it by a "
                "call of its own, on all ranks."
            )
        place = url_of(folder) or os.path.abspath(folder)
        call = {**(self.settings or {}), **arguments, "folder": place, "part": name}
        for of_rank_0 in ("is_main_process", "save_function"):  # may not be picklable; the others do not need them
            call.pop(of_rank_0, None)
        if call.get("state_dict") is not None:
            call["state_dict"] = {
                name: value.view_of_node if isinstance(value, LazyTensor) else value
                for name, value in call["state_dict"].items()
            }
        try:
            if not self.coordinator.is_alone:
                self.coordinator.broadcast(lambda: pickle.dumps(call))
            self.report = _save_part(self.model, self.coordinator, call)
        except BaseException as error:
            self.failure = error
            raise _Failed from error
        return self.report


_leader: ContextVar[_Leader | None] = ContextVar("hf_zero_stream_leader", default=None)


def _save_part(model: PreTrainedModel, coordinator: Coordinator, call: dict[str, Any]) -> SaveReport:
    """Save with all ranks the part of `model` that `call` names."""
    # Errors are reported at once: rank 0 may go on with its own work before it raises.
    with coordinator.reporting(), operation(SAVE, folder=call["folder"], is_part=True):
        part = model.get_submodule(call.pop("part"))
        return Save(part, coordinator=coordinator, **call).pretrained()
