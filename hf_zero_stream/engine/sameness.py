"""Checks, before anything is read, that ranks which load together have the same model, files, settings and libraries.

Nodes often differ: a stale copy of the checkpoint, an old library, an environment variable that was not passed on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..checkpoint.format import ShardHeader
from ..checkpoint.lazy import LazyTensor
from ..checkpoint.nodes import FileTensor, View
from ..errors import CheckpointError, DisagreementError, installed_version
from ..holdings.introspection import whole_shape
from ..ranks.coordinator import Coordinator, shortened
from ..ranks.presence import digest_of
from ..settings.config import StreamingConfig
from ..settings.values import dtype_name


LIBRARIES = ("hf_zero_stream", "torch", "transformers", "deepspeed", "accelerate")

_SETTINGS = ("random_numbers", "strict", "verify")
_DEEPSPEED = ("zero_optimization", "bf16", "bfloat16", "fp16", "expert_parallel", "weight_quantization")
_MAY_DIFFER = {"_name_or_path", "nvme_path"}
"""Entries of configs that may differ between nodes."""


Described = str | dict[str, str]
"""A short text; or texts by what they describe, for instance the fields of a config."""

_SHOWN, _SHOWN_CHARACTERS = 3, 80
"""Of what differs: fields that a message shows, and characters of each value."""


def describe_load(
    model: nn.Module,
    missing: Iterable[str],
    ds_config: Mapping[str, Any],
    settings: StreamingConfig,
    exchange_settings: Iterable[str],
) -> dict[str, Described]:
    """Describe, item by item, what this rank will load into the lazy `model`.

    `exchange_settings` are names of settings that decide what ranks exchange of what they read.
    """
    tensors = [*model.named_parameters(), *model.named_buffers()]
    config = model.config.to_dict() if hasattr(model, "config") else {}
    items: dict[str, Described] = {f"the version of {name}": _version(name) for name in LIBRARIES}
    items |= {f"the setting {name}": str(getattr(settings, name)) for name in (*_SETTINGS, *exchange_settings)}
    return items | {
        "the model's class": type(model).__name__,
        "the model's config": _fields(config),
        "the DeepSpeed config": _fields({key: ds_config[key] for key in _DEEPSPEED if key in ds_config}),
        "the parameters' names and shapes": {name: str(tuple(whole_shape(tensor))) for name, tensor in tensors},
        "the parameters' dtypes": {name: dtype_name(param.dtype) for name, param in model.named_parameters()},
        "the keys that the checkpoint lacks": dict.fromkeys(sorted(missing), "missing"),
        "the checkpoint's tensors that become parameters": dict(_sources(tensors)),
    }


def refuse_differences(coordinator: Coordinator, described: Mapping[str, Described], *, beside: int) -> list[int]:
    """Raise a DisagreementError that names the ranks whose description is not rank 0's, and what differs (all ranks).

    Ranks exchange digests, and the texts, which are long, only if something differs. Returns every rank's `beside`.
    """
    mine = [digest_of(str(item)) for item in described.values()], beside
    everyone, besides = zip(*coordinator.all_gather(mine), strict=True)
    differing = [rank for rank, other in enumerate(everyone) if other != everyone[0]]
    if not differing:
        return [*besides]
    pairs = zip(described, everyone[0], everyone[differing[0]], strict=True)
    here = {name: described[name] for name, on_rank_0, there in pairs if on_rank_0 != there}
    on_rank_0, there = (coordinator.broadcast(lambda: here, rank) for rank in (0, differing[0]))
    details = "; ".join(f"{name} ({_difference(there[name], on_rank_0[name])})" for name in here)
    others = "" if len(differing) == 1 else f" Others that differ: {', '.join(map(str, differing[1:9]))}."
    raise DisagreementError(
        f"rank {differing[0]} differs from rank 0 in {details}.{others} Nothing has been read. Make all nodes the "
        "same: the checkpoint's folder, the environment, the installed packages."
    )


def _difference(there: Described, on_rank_0: Described) -> str:
    if isinstance(there, str) or isinstance(on_rank_0, str):
        return f"{there} there, {on_rank_0} on rank 0"
    fields = [name for name in {**on_rank_0, **there} if there.get(name) != on_rank_0.get(name)]
    shown = []
    for field in fields[:_SHOWN]:
        values = (shortened(each.get(field, "nothing"), _SHOWN_CHARACTERS) for each in (there, on_rank_0))
        shown.append("{}: {} there, {} on rank 0".format(field, *values))
    more = [f"and {len(fields) - _SHOWN} more"] if len(fields) > _SHOWN else []
    return "; ".join([*shown, *more]) or "in another order"


HeaderAndSample = tuple[ShardHeader, bytes]
"""The header of a shard as one rank has read it, and a digest of a sample of its values."""


def refuse_other_shards(
    paths: Sequence[str],
    own: Iterable[HeaderAndSample],
    of_rank_0: Iterable[HeaderAndSample],
    folder_of_rank_0: str,
    *,
    shares_host: bool,
) -> None:
    """Raise a CheckpointError if a shard that this rank has read is not the one that rank 0 has read.

    `shares_host`: this rank and rank 0 are on one host.
    """
    for path, (own_header, values), (header, values_of_rank_0) in zip(paths, own, of_rank_0, strict=True):
        if own_header.size_bytes != header.size_bytes:
            difference = f"has {own_header.size_bytes} bytes where rank 0 sees {header.size_bytes}"
        elif own_header != header:
            difference = "has another header than rank 0's, of other tensors or in another order"
        elif values != values_of_rank_0:
            difference = "has the same header as rank 0's and other values"
        else:
            continue
        other = os.path.join(folder_of_rank_0, os.path.basename(path))
        advice = "Give all ranks the same folder." if shares_host else "Make the checkpoint the same on every node."
        if path != other:
            difference += f" (rank 0 loads {other})"
            advice += (
                " Or, if that is another model: ranks load different things at this moment, perhaps in several "
                "threads; all must make the same loads in the same order."
            )
        raise CheckpointError(f"{path}: the file on this {'rank' if shares_host else 'host'} {difference}. {advice}")


def _version(library: str) -> str:
    """The release: builds for different accelerators count as the same."""
    return installed_version(library).partition("+")[0]


def _sources(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterable[tuple[str, str]]:
    """Each tensor's name, and the first and last tensor of the checkpoint that it is made of: all take too long."""
    for name, tensor in tensors:
        if isinstance(tensor, LazyTensor):
            yield name, " to ".join(_leaf(tensor.view_of_node, end) for end in (0, -1))


def _leaf(view: View, end: int) -> str:
    node = view.node
    while inputs := list(node.inputs()):
        node = inputs[end].node
    return node.entry.name if isinstance(node, FileTensor) else type(node).__name__


def _fields(config: Mapping[Any, Any], prefix: str = "") -> dict[str, str]:
    """The values of a config by their names, those inside of others as ``outer.inner``."""
    found: dict[str, str] = {}
    for key in sorted(config.keys() - _MAY_DIFFER, key=str):
        name, value = f"{prefix}{key}", config[key]
        if isinstance(value, (list, tuple)) and any(isinstance(each, Mapping) for each in value):
            value = dict(enumerate(value))
        if isinstance(value, Mapping) and value:
            found |= _fields(value, f"{name}.")
        else:
            found[name] = json.dumps(value, default=lambda other: type(other).__name__)
    return found
