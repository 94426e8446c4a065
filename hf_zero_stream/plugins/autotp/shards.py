"""Which elements of a parameter this rank holds where DeepSpeed's AutoTP has cut it.

DeepSpeed leaves a map on each parameter that it cuts (``deepspeed.checkpoint.affine``): for each rank of tensor
parallelism, pieces of the whole parameter and where they lie in the rank's part. A fused weight has a piece of each
weight in it. What has no map is whole on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any

import torch.distributed as dist
from deepspeed.module_inject import layers
from deepspeed.utils import groups
from torch import nn

from ...errors import UnsupportedError
from ...plugin_api import (
    CUT,
    Interval,
    LocalShard,
    Member,
    ParameterBox,
    Slot,
    has_partition,
    is_cut,
    named_parameters,
    row_major_strides,
)


_DESCRIBED = (
    "LinearLayer",
    "LinearAllreduce",
    "LinearAllreduceWithReplicatedInput",
    "VocabParallelLinear",
    "VocabParallelEmbedding",
    "HiddenParallelEmbedding",
    "SubParamLinearLayer",
    "SubParamLinearAllreduce",
    "fused_LinearLayer",
    "GateUpPack_LinearLayer",
    "Yuan_LinearLayer",
    "Yuan_LinearAllreduce",
)
"""The layers that cut as their maps say. Those of ``Conv1D`` (GPT-2) transpose what they cut, which no map says."""


def shard_of(name: str, param: Any) -> LocalShard:
    """The elements of parameter `name` that this rank holds, as one of the ranks of data parallelism that do.

    Raises:
        UnsupportedError: DeepSpeed does not say which elements they are, or ranks hold some of them in common.
    """
    layer = getattr(getattr(param, "gather_params", None), "__self__", None)  # an embedding has none
    if layer is not None and type(layer) not in [getattr(layers, known, None) for known in _DESCRIBED]:
        raise _undescribed(name, f"how a {type(layer).__name__} cuts its parameters is not known")
    group = groups.get_tensor_model_parallel_group()
    size, index = dist.get_world_size(group), dist.get_rank(group)
    members = dist.get_process_group_ranks(group)
    if layer is not None and dist.get_process_group_ranks(layer.mp_group) != members:
        raise _undescribed(name, "a tp_group of its own says which ranks have parts of it")
    copy, begins = divmod(members[0], size)
    if members != list(range(members[0], members[0] + size)) or begins:
        raise _undescribed(name, f"the ranks of tensor parallelism, {members}, do not follow each other")
    box = _box(name, getattr(param, CUT)["conversion"], index)
    shape = tuple(getattr(param, "ds_shape", param.shape))
    if box.sizes != shape:
        raise _undescribed(name, f"its part has shape {shape}, and DeepSpeed's map says {box.sizes}")
    if has_partition(param) and {*members}.intersection(dist.get_process_group_ranks(param.ds_process_group)) != {
        dist.get_rank()
    }:
        raise _undescribed(name, "ZeRO-3 has partitioned it over ranks that have other parts of it")
    return LocalShard(box, copy, dist.get_world_size() // size)


def add_empty_parts(model: nn.Module, optimizer: Any, slots: list[Slot]) -> None:
    """Have the slots name the parameters of which this rank holds nothing: DeepSpeed gives them to no optimizer."""
    params = dict(named_parameters(model))
    empty = [name for name, param in params.items() if _is_empty_on_any_rank(param)]
    if empty and len(optimizer.param_groups) > 1:
        raise UnsupportedError(
            f"{', '.join(empty[:8])}: some ranks of tensor parallelism hold nothing of {len(empty)} parameter(s), and "
            "the optimizer's groups do not say which of them these are in. Use one group, no more ranks of tensor "
            "parallelism than key-value heads, or DeepSpeed's own checkpoints."
        )
    known = {member.name for slot in slots for member in slot.members}
    for name in empty:
        if not params[name].numel() and name not in known:
            box = shard_of(name, params[name]).box
            slots[0] = replace(slots[0], members=[*slots[0].members, Member(name, box, 0, 0, 0)])


def _is_empty_on_any_rank(param: Any) -> bool:
    """Whether any rank of tensor parallelism holds nothing of `param`, which is trained; the same on all ranks."""
    if not is_cut(param) or not param.requires_grad:
        return False
    of_ranks = getattr(param, CUT)["conversion"]["affine_map"]["ranks"].values()
    return not all(prod(of_rank["shard_shape"]) for of_rank in of_ranks)


def _box(name: str, described: Mapping[str, Any], index: int) -> ParameterBox:
    """The part of rank number `index` of tensor parallelism, as DeepSpeed has `described` a parameter."""
    if described["unsupported_reason"] or "affine_map" not in described:
        raise _undescribed(name, described["unsupported_reason"] or "DeepSpeed describes no layout of it")
    shape, logical = tuple(described["original_shape"]), tuple(described["affine_map"]["logical_shape"])
    of_rank = described["affine_map"]["ranks"][index]
    part, pieces = tuple(of_rank["shard_shape"]), [piece for piece in of_rank["pieces"] if prod(piece["shape"])]
    if any(piece.get("scale", 1.0) != 1.0 for piece in pieces):
        raise _undescribed(name, "ranks hold it multiplied by a number")
    if any(piece["locations"] != [index] for piece in pieces):
        raise _undescribed(name, "ranks hold some of its elements in common, and others not")
    dim = _cut_dim(logical, part, pieces)
    intervals = list(_intervals(name, logical, part, pieces, dim))
    dim, intervals = _in_shape(name, shape, logical, dim, intervals)
    whole = ParameterBox.whole(shape).intervals
    return ParameterBox(shape, (*whole[:dim], tuple(intervals) or ((0, 0),), *whole[dim + 1 :]))


def _cut_dim(logical: tuple[int, ...], part: tuple[int, ...], pieces: Sequence[Mapping[str, Any]]) -> int:
    """The dimension along which the parameter is cut; 0 if the part is all of it, in one piece."""
    shapes = [part, *(tuple(piece["shape"]) for piece in pieces)]
    return next((dim for dim, size in enumerate(logical) if any(shape[dim] != size for shape in shapes)), 0)


def _intervals(
    name: str, logical: tuple[int, ...], part: tuple[int, ...], pieces: Sequence[Mapping[str, Any]], dim: int
) -> Iterator[Interval]:
    """The indices along `dim` of the pieces, in the order in which they lie in the part."""
    strides, inside = row_major_strides(logical), row_major_strides(part)
    position = 0
    for piece in pieces:
        (offset, source), (begin, to) = piece["source"], piece["dest"]
        start, size = offset // strides[dim], piece["shape"][dim]
        expected = [*logical[:dim], size, *logical[dim + 1 :]]
        lies_as_expected = (
            (tuple(source), tuple(to)) == (strides, inside)
            and list(piece["shape"]) == expected
            and (offset, begin) == (start * strides[dim], position * inside[dim])
        )
        if not lies_as_expected:
            raise _undescribed(name, "DeepSpeed's map has pieces that are no slices along one dimension")
        yield start, start + size
        position += size


def _in_shape(
    name: str, shape: tuple[int, ...], logical: tuple[int, ...], dim: int, intervals: Sequence[Interval]
) -> tuple[int, list[Interval]]:
    """`intervals` along dimension `dim` of a view of `logical` shape, as a dimension of `shape` and indices there.

    The view has the last dimension of a matrix, and its other dimensions are the rows; or all of them are a vector's.
    """
    if shape == logical:
        return dim, _joined(intervals)
    last = shape[1:]
    rows = logical[: len(logical) - len(last)]
    if len(shape) > 2 or logical[len(rows) :] != last or prod(rows) != shape[0]:
        raise _undescribed(name, f"DeepSpeed cuts a view of shape {logical} of its shape {shape}")
    if dim >= len(rows):
        return 1, _joined(intervals)
    inner = prod(rows[dim + 1 :])
    outer = range(prod(rows[:dim]))
    found = (
        ((number * rows[dim] + start) * inner, (number * rows[dim] + stop) * inner)
        for number, (start, stop) in product(outer, intervals)
    )
    return 0, _joined(found)


def _joined(intervals: Any) -> list[Interval]:
    """`intervals`, of which those that follow each other without a gap are one."""
    found: list[Interval] = []
    for start, stop in intervals:
        if found and found[-1][1] == start:
            start, _ = found.pop()
        found.append((start, stop))
    return found


def _undescribed(name: str, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"{name}: AutoTP has cut it, and {why}. So its elements cannot be put together or cut anew: use DeepSpeed's "
        "own engine.save_checkpoint and engine.load_checkpoint (inside streaming() too), at the same number of ranks."
    )


def unknown_reason(engine: Any) -> str:
    """Why it is not known what ranks hold where AutoTP has cut the model of `engine`; "" if it is."""
    if engine.has_moe_layers:
        return f"the model is cut by AutoTP (tensor_parallel.autotp_size = {engine.autotp_size()}) and by experts"
    try:
        for name, param in engine.module.named_parameters():
            if is_cut(param):
                shard_of(name, param)
    except UnsupportedError as error:
        return str(error)
    return ""
