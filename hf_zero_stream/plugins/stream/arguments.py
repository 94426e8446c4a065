"""Checks the arguments of a weight stream: a model, and values that are known, and the same on all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ...errors import ConfigError, StreamError, UnsupportedError
from ...plugin_api import Coordinator, MeetingKind


STREAM = MeetingKind(
    "stream weights",
    "All of them must make the stream and go through each of its passes, because each gives its own part: take it out "
    "of `if accelerator.is_main_process:` and the like.",
    patience_s=600.0,
    error=StreamError,
)
"""A pass of a weight stream, or the plan of one."""

_KNOWN = {"to": ("rank0", "all", "owners"), "only": ("all", "trainable"), "layout": ("hub", "model")}


def refuse_unknown_values(arguments: Mapping[str, Any]) -> None:
    for name, known in _KNOWN.items():
        if arguments[name] not in known:
            raise ConfigError(f"{name}: expected one of {', '.join(known)}; got {arguments[name]!r}")
    nbytes = arguments["bucket_bytes"]
    if not isinstance(nbytes, int) or nbytes < 1:
        raise ConfigError(f"bucket_bytes: expected a size in bytes, at least 1; got {nbytes!r}")


def refuse_other_models(model: Any) -> None:
    if isinstance(model, PreTrainedModel):
        return
    modules = model.named_modules() if isinstance(model, nn.Module) else ()
    inside = [name for name, module in modules if isinstance(module, PreTrainedModel)]
    outermost = [name for name in inside if not any(name.startswith(f"{other}.") for other in inside)]
    raise UnsupportedError(
        f"weight_stream: expected a transformers model, one of PEFT's, or an engine around one; got {type(model)}."
        + (f" Give it one of those that it holds: {', '.join(outermost)}." if outermost else "")
    )


def refuse_different_values(arguments: Mapping[str, Any], coordinator: Coordinator) -> None:
    """Ranks with other arguments than rank 0's would wait for what nobody sends (all ranks)."""
    first, *others = coordinator.all_gather({name: str(value) for name, value in arguments.items()})
    for rank, theirs in enumerate(others, 1):
        for name, value in first.items():
            if theirs[name] != value:
                raise ConfigError(
                    f"{name}: expected the same value on all ranks; got {theirs[name]} on rank {rank}, and {value} on "
                    "rank 0"
                )
