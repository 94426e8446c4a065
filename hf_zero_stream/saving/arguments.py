"""What a save is asked for, and whether it can be made: its arguments, the parameters, and the other ranks."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, TypedDict

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import PreTrainedModel

from ..destinations.base import fill_whole
from ..errors import ConfigError, UnsupportedError, UrlError
from ..holdings.holder import refuse_unreadable
from ..holdings.introspection import has_gathered, lacks_values, refuse_unknown_shards
from ..holdings.own_names import modules
from ..ranks.coordinator import Coordinator
from ..ranks.rendezvous import SAVE, MeetingKind
from ..settings.config import refuse_settings
from ..settings.values import floating_dtype
from ..sources.base import is_url


class SaveArguments(TypedDict, total=False):
    """For type checkers: what the newest version of transformers' ``save_pretrained`` takes besides."""

    distributed_checkpoint: bool
    is_main_process: bool
    push_to_hub: bool
    save_original_format: bool
    save_peft_format: bool
    state_dict: Mapping[str, Any] | None
    token: str | bool | None
    variant: str | None


SIGNATURE = inspect.signature(PreTrainedModel.save_pretrained)

_OF_EARLIER_VERSIONS = {"safe_serialization", "save_function"}
"""transformers takes these still, and does nothing with them."""

_SIZE = re.compile(r"\d+(\.\d+)?\s*[KMGT]B", re.IGNORECASE)


def refuse_url(folder: Any, what: str) -> None:
    """Raise an UrlError if `folder`, which `what` takes, is a URL: it would become the path of a folder."""
    if is_url(folder):
        raise UrlError(
            f"{what}: expected a local folder; got a URL, {str(folder).partition(':')[0]}://... "
            "hf_zero_stream.save_pretrained, save_state and load_state, model.save_pretrained of a class that does "
            "not override it, and training states of the Trainer, accelerate and DeepSpeed take URLs of s3://, gs:// "
            "and az://. For the rest, save into a folder, then upload it from one rank. (If you mean a local folder "
            "of this name, begin it with ./)"
        )


def refuse_unknown_arguments(arguments: Mapping[str, Any], others: Iterable[str] = ()) -> None:
    """Raise if an argument of a save by all ranks is neither transformers' nor one of the `others`, or has no effect.

    ``model.save_pretrained`` itself ignores arguments that it does not know.

    Raises:
        ConfigError: no such argument, or no such value.
        UnsupportedError: the argument asks for files of ``torch.save``.
    """
    refuse_settings({name: value for name, value in arguments.items() if name not in others})
    known = {*SIGNATURE.parameters, *_OF_EARLIER_VERSIONS, *others} - {"self", "save_directory", "kwargs"}
    if unknown := sorted(set(arguments) - known):
        raise ConfigError(f"save: unknown argument {unknown[0]}; known are {', '.join(sorted(known))}")
    if arguments.get("safe_serialization") not in (None, True):
        raise UnsupportedError(
            "safe_serialization=False: files of torch.save are not written; transformers 5 does not write them "
            "either. Leave it out."
        )
    size = arguments.get("max_shard_size", "5GB")
    is_size = _SIZE.fullmatch(size) if isinstance(size, str) else type(size) is int and size >= 1
    if not is_size:
        raise ConfigError(f'max_shard_size: expected bytes, at least 1, or a text like "5GB"; got {size!r}')


def refuse_values(state_dict: Mapping[str, Any] | None, variant: Any) -> None:
    """Raise a ConfigError if one of these arguments has a value that means nothing."""
    if state_dict is not None and not state_dict:
        raise ConfigError("state_dict: expected at least one tensor; got none. Leave it out to save all of the model.")
    if variant is not None and re.search(r"[/\\\0]", str(variant)):
        raise ConfigError(
            f"variant: expected a part of a file's name, as in model.VARIANT.safetensors; got {variant!r}"
        )


def dtype_of_argument(dtype: Any) -> torch.dtype | None:
    """The dtype that `dtype` is or names; raises a ConfigError if weights cannot be cast to it."""
    found = floating_dtype(dtype)
    if found is not None and found.itemsize < 2:
        raise ConfigError(
            f"dtype: expected a dtype of at least 16 bits; got {dtype!r}. Weights in so few bits need scales, which a "
            "cast does not make: engines and from_pretrained quantise weights in bfloat16 themselves."
        )
    return found


ARRIVAL_S = 600.0  # how long the first rank waits for the last one to begin a save
OTHERS_COME_S = 30.0  # how long rank 0 waits for the others inside a ``GatheredParameters``


def make_ready(model: Any, inner: torch.nn.Module, doing: str, instead: str) -> None:
    """Have all parameters of `inner` be there to be read; raises if those of `model`, around it, cannot be.

    The error is ``{doing}: ... {instead}``.
    """
    refuse_unknown_shards(model, doing)
    fill_whole(inner)
    if isinstance(model, torch.nn.Module):
        _refuse_fsdp1(model, doing, instead)
    refuse_unreadable(inner, doing, instead)
    if isinstance(inner, PreTrainedModel):
        _refuse_without_dtype(inner, doing, instead)


def _refuse_without_dtype(model: PreTrainedModel, doing: str, instead: str) -> None:
    """Raise an UnsupportedError (``{doing}: ... {instead}``) if transformers cannot tell the dtype that it writes."""
    try:
        _ = model.dtype
    except StopIteration:  # no error that anybody should get to see
        dtypes = sorted({str(param.dtype) for param in model.parameters()})
        raise UnsupportedError(
            f"{doing}: expected a floating-point parameter, whose dtype transformers takes for the model's; found "
            f"{', '.join(dtypes) or 'no parameters'} alone. DeepSpeed's stages 1 and 2 make all parameters complex "
            f"that they flatten with a complex one: keep that as real numbers (torch.view_as_real). {instead}"
        ) from None


def _refuse_fsdp1(model: torch.nn.Module, doing: str, instead: str) -> None:
    """Raise if FSDP1 shards any of `model`, whose parameters then are flat pieces that look like whole ones."""
    if any(isinstance(module, FullyShardedDataParallel) for module in modules(model)):
        raise UnsupportedError(
            f"{doing}: expected parameters that are DTensors, ZeRO partitions or whole; FSDP1 "
            "(FullyShardedDataParallel) keeps flat pieces in their place. Use FSDP2 (fully_shard; accelerate: "
            f"fsdp_version 2). {instead}"
        )


def kind_of_save(model: PreTrainedModel, coordinator: Coordinator, *, to_url: bool = False) -> MeetingKind:
    """How ranks come together to save `model`.

    Rank 0 waits briefly where it is often alone: in a ``GatheredParameters``, and with a model that it has whole.
    """
    if to_url and not lacks_values(model):
        advice = "All ranks save to a URL together, also a model that each has whole: take it out of `if rank == 0:`."
        return replace(SAVE, patience_s=OTHERS_COME_S, advice=advice)
    if coordinator.is_alone or not coordinator.is_main or not has_gathered(model):
        return replace(SAVE, patience_s=ARRIVAL_S)
    from ..holdings.deepspeed.partitions import partitioned_names  # imports deepspeed, which takes seconds

    missing = partitioned_names(model)
    if missing:
        advice = (
            f"Inside GatheredParameters rank 0 cannot save alone, because {len(missing)} parameters are not gathered: "
            f"{', '.join(missing[:8])}. Gather these too, or save on all ranks, outside of `if rank == 0:` and the "
            "like."
        )
    else:
        advice = (
            "Inside GatheredParameters, hf_zero_stream.save_pretrained is for all ranks: take it out of "
            "`if rank == 0:` and the like. Or call model.save_pretrained inside streaming(): rank 0 may do so alone, "
            "as all the model is gathered."
        )
    return replace(SAVE, patience_s=OTHERS_COME_S, advice=advice)
