"""Checks, before anything is read, that ranks which load together have the same model, files, settings and libraries.

Nodes often differ: a stale copy of the checkpoint, an old library, an environment variable that was not passed on.
"""

from __future__ import annotations

import hashlib
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
from ..settings.config import StreamingConfig


LIBRARIES = ("hf_zero_stream", "torch", "transformers", "deepspeed", "accelerate")

_SETTINGS = ("random_numbers", "share_reads", "strict", "verify")
_DEEPSPEED = ("zero_optimization", "bf16", "bfloat16", "fp16", "expert_parallel", "weight_quantization")
_MAY_DIFFER = {"_name_or_path", "nvme_path"}
"""Entries of configs that may differ between nodes."""


def describe_load(
    model: nn.Module,
    missing: Iterable[str],
    ds_config: Mapping[str, Any],
    settings: StreamingConfig,
    exchange_settings: Iterable[str],
) -> dict[str, str]:
    """Describe, item by item, what this rank will load into the lazy `model`: short texts, or digests of long ones.

    `exchange_settings` are names of settings that decide what ranks exchange of what they read.
    """
    tensors = [*model.named_parameters(), *model.named_buffers()]
    dtypes = [str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()]
    shapes = [f"{name}{tuple(whole_shape(tensor))}" for name, tensor in tensors]
    config = model.config.to_dict() if hasattr(model, "config") else {}
    items = {f"the version of {name}": _version(name) for name in LIBRARIES}
    items |= {f"the setting {name}": str(getattr(settings, name)) for name in (*_SETTINGS, *exchange_settings)}
    return items | {
        "the model's class": type(model).__name__,
        "the model's config": _digest(_json(config)),
        "the DeepSpeed config": _digest(_json({key: ds_config[key] for key in _DEEPSPEED if key in ds_config})),
        "the parameters' names and shapes": _digest(*shapes),
        "the parameters' dtypes": f"{', '.join(sorted(set(dtypes)))} [{_digest(*dtypes)}]",
        "the keys that the checkpoint lacks": _digest(*sorted(missing)),
        "the checkpoint's tensors that become parameters": _digest(*_sources(tensors)),
    }


def refuse_differences(descriptions: Sequence[Mapping[str, str]]) -> None:
    """Raise a DisagreementError that names the ranks whose description is not rank 0's, and what differs."""
    first = descriptions[0]
    differing = {
        rank: items
        for rank, other in enumerate(descriptions)
        if (items := [item for item in first if other.get(item) != first[item]])
    }
    if not differing:
        return
    rank, items = next(iter(differing.items()))
    details = "; ".join(f"{item} ({descriptions[rank].get(item)} there, {first[item]} on rank 0)" for item in items)
    others = "" if len(differing) == 1 else f" Others that differ: {', '.join(map(str, [*differing][1:9]))}."
    raise DisagreementError(
        f"rank {rank} differs from rank 0 in {details}.{others} Nothing has been read. Make all nodes the same: the "
        "checkpoint's folder, the environment, the installed packages."
    )


HeaderAndSample = tuple[ShardHeader, bytes]
"""The header of a shard as one rank has read it, and a digest of a sample of its values."""


def refuse_other_shards(
    paths: Sequence[str], own: Iterable[HeaderAndSample], of_rank_0: Iterable[HeaderAndSample], folder_of_rank_0: str
) -> None:
    """Raise a CheckpointError if a shard that this rank has read is not the one that rank 0 has read."""
    for path, (own_header, values), (header, values_of_rank_0) in zip(paths, own, of_rank_0, strict=True):
        if own_header.size_bytes != header.size_bytes:
            difference = f"has {own_header.size_bytes} bytes where rank 0 sees {header.size_bytes}"
        elif own_header != header:
            difference = "has another header than rank 0's, of other tensors or in another order"
        elif values != values_of_rank_0:
            difference = "has the same header as rank 0's and other values"
        else:
            continue
        advice = "Make the checkpoint the same on every node."
        if os.path.dirname(path) != folder_of_rank_0:
            advice += (
                f" Or, if {folder_of_rank_0}, from which rank 0 loads, is another model: ranks load different things "
                "at this moment, perhaps in several threads; all must make the same loads in the same order."
            )
        raise CheckpointError(f"{path}: the file on this host {difference}. {advice}")


def _version(library: str) -> str:
    """The release: builds for different accelerators count as the same."""
    return installed_version(library).partition("+")[0]


def _sources(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterable[str]:
    """Each tensor's name, and the first and last tensor of the checkpoint that it is made of: all take too long."""
    for name, tensor in tensors:
        if isinstance(tensor, LazyTensor):
            yield from (name, *(_leaf(tensor.view_of_node, end) for end in (0, -1)))


def _leaf(view: View, end: int) -> str:
    node = view.node
    while inputs := list(node.inputs()):
        node = inputs[end].node
    return node.entry.name if isinstance(node, FileTensor) else type(node).__name__


def _digest(*texts: str) -> str:
    state = hashlib.blake2b(digest_size=8)
    for text in texts:
        state.update(text.encode() + b"\0")
    return state.hexdigest()


def _json(value: Any) -> str:
    def kept(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {str(key): kept(inner) for key, inner in value.items() if key not in _MAY_DIFFER}
        return [kept(inner) for inner in value] if isinstance(value, (list, tuple)) else value

    return json.dumps(kept(value), sort_keys=True, default=lambda other: type(other).__name__)
