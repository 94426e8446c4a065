"""Masters: the fp32 values that DeepSpeed's optimizers train in place of a model's own, at any ZeRO stage.

Each optimizer step copies them into the model. So whoever writes to parameters must write to these too, or the next
step puts the old values back. A save in fp32, and a load into a model in use, are given the model alone. ZeRO-3's
parameters lead to their optimizer; for those of other stages every live engine is looked at:

- ``DeepSpeedZeroOptimizer`` (stages 1 and 2) and ``BF16_Optimizer`` (stage 1 with gradients in fp32): the parameters
  lie in a flat buffer, of which each rank trains a part. The fragments that DeepSpeed attaches to parameters
  (``_hp_mapping``) are not used: with `round_robin_gradients`, DeepSpeed 0.19.8 attaches those of other parameters.
- ``FP16_Optimizer`` and ``FP16_UnfusedOptimizer`` (stage 0, bf16 too): each rank trains all of each parameter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.partition_parameters import is_zero_param
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from ...errors import UnsupportedError, refuse_unknown_version, require_names
from ..fsdp import shard_of
from ..introspection import instances_of
from ..slots import Member, Slot, entries_of, in_memory


require_names(
    "deepspeed",
    DeepSpeedZeroOptimizer_Stage3,
    *("_swappable_optimizer_subgroup", "get_param_id"),
    purpose="load_into under ZeRO-3",
)

_STAGE_3 = ("grad_position", "sub_group_to_group_id", "fp32_partitioned_groups_flat", "fp16_groups")
_STAGES_1_2 = ("bit16_groups", "bit16_groups_flat", "single_partition_of_fp32_groups", "real_dp_process_group")
STAGES_0_TO_2: dict[type, tuple[str, ...]] = {
    DeepSpeedZeroOptimizer: _STAGES_1_2,
    BF16_Optimizer: ("bf16_groups", "bf16_groups_flat", "fp32_groups_flat_partition", "real_dp_process_group"),
    FP16_Optimizer: ("fp16_groups", "fp16_groups_flat", "fp32_groups_flat"),
    FP16_UnfusedOptimizer: ("fp16_groups", "fp32_groups"),
}
"""For each group of an optimizer: the model's parameters, the flat buffer that they lie in, what this rank trains of
it, and the ranks that share it. FP16_UnfusedOptimizer has no flat buffers, but a tensor for each parameter.
"""


def masters_of(params: Mapping[str, Any], rank: int, world_size: int) -> dict[str, list[tuple[Slot, Member]]]:
    """By its name, where the masters of each of `params` that has any lie, in every engine that trains it.

    The same names on every rank of stages 0 to 2, some without elements; an UnsupportedError if masters cannot be
    reached.
    """
    names = {id(param): name for name, param in params.items()}
    found: dict[str, list[tuple[Slot, Member]]] = {}
    for wrapper in _optimizers_of(params.values()):
        for slot in slots_of_masters(wrapper, names, rank, world_size):
            for member in slot.members:
                found.setdefault(member.name, []).append((slot, member))
    return found


def _optimizers_of(params: Collection[Any]) -> Iterator[Any]:
    """DeepSpeed's optimizers of live engines that train any of these parameters in fp32."""
    whole = [param for param in params if not is_zero_param(param)]
    of_stage_3 = [getattr(param, "_z3_optimizer", None) for param in params if is_zero_param(param)]
    yield from {id(each): each for each in of_stage_3 if each is not None}.values()
    # Also those that do not require gradients: one that was frozen after the start of its engine is still copied back.
    trained = {id(param) for param in whole if param.numel()}
    if all(param.dtype == torch.float32 and not hasattr(param, "_hp_mapping") for param in whole if param.numel()):
        return  # these have no masters, and need no search, which takes 60 ms
    for engine in instances_of(DeepSpeedEngine):
        wrapper = getattr(engine, "optimizer", None)  # not if its constructor has failed
        if isinstance(wrapper, tuple(STAGES_0_TO_2)) and any(id(param) in trained for param in trained_by(wrapper)):
            yield wrapper


def slots_of_masters(wrapper: Any, names: Mapping[int, str], rank: int, world_size: int) -> list[Slot]:
    """The slots of a DeepSpeed optimizer, for parameters that have `names` by their ``id``; others are left out.

    Raises:
        UnsupportedError: masters cannot be reached, or the class of the optimizer is not known.
    """
    is_stage_3 = isinstance(wrapper, DeepSpeedZeroOptimizer_Stage3)
    needed = _STAGE_3 if is_stage_3 else _attributes_of(wrapper)
    missing = [f"{type(wrapper).__name__}.{name}" for name in needed if not hasattr(wrapper, name)]
    refuse_unknown_version("deepspeed", missing)
    if getattr(wrapper, "zenflow", False) or type(wrapper).__module__.startswith("deepspeed.runtime.zenflow"):
        raise UnsupportedError(
            "ZenFlow keeps copies of the values that it trains, which cannot be reached. Load before "
            "deepspeed.initialize, or use DeepSpeed's own checkpoints."
        )
    return [*(_stage_3(wrapper, names) if is_stage_3 else _stages_0_to_2(wrapper, names, rank, world_size))]


def _stage_3(wrapper: Any, names: Mapping[int, str]) -> Iterator[Slot]:
    """DeepSpeed trains sub-groups of a group's partitions, each as a flat buffer."""
    sub_groups = zip(wrapper.fp16_groups, wrapper.fp32_partitioned_groups_flat, strict=True)
    for number, (params, flat) in enumerate(sub_groups):
        members = []
        for param in params:
            if id(param) in names:
                _, first, _ = wrapper.grad_position[wrapper.get_param_id(param)]
                part = shard_of(names[id(param)], param, None, 0, 1)  # these are all partitions
                members.append(Member(names[id(param)], part.box, first, *part.share))
        is_swapped = wrapper._swappable_optimizer_subgroup(number)
        yield Slot(
            wrapper.sub_group_to_group_id[number],
            flat,
            entries_of(wrapper.optimizer, flat),
            members,
            has_masters=True,
            is_swapped=is_swapped,
            opened=partial(_swapped_in, wrapper, number) if is_swapped else in_memory,
        )


@contextmanager
def _swapped_in(wrapper: Any, number: int, *, changes: bool) -> Iterator[None]:
    """Inside, the sub-group's masters and states are in memory; `changes` go to the swap file."""
    wrapper._optimizer_states_and_gradient_swap_in(number)
    try:
        yield
    finally:
        if changes:
            wrapper._optimizer_states_and_gradient_swap_out(number)
        else:
            wrapper._release_swap_buffers(number)


def _stages_0_to_2(wrapper: Any, names: Mapping[int, str], rank: int, world_size: int) -> Iterator[Slot]:
    """DeepSpeed trains this rank's part of each group's flat buffer; at stage 0 all of it, or of each parameter."""
    trained = enumerate(group["params"] for group in wrapper.optimizer.param_groups)
    groups = {id(part): number for number, parts in trained for part in parts}
    members: dict[int, tuple[Any, list[Member]]] = {}
    for param, part, first, start, stop in fragments_of(wrapper):
        if id(param) not in names:
            continue
        is_whole = isinstance(wrapper, (FP16_Optimizer, FP16_UnfusedOptimizer))
        name = names[id(param)]
        shard = shard_of(name, param, None, rank, world_size)
        if is_whole:
            start, stop = shard.share
        member = Member(name, shard.box, first, start, stop, is_whole)
        members.setdefault(id(part), (part, []))[1].append(member)
    for key, (part, of_part) in members.items():
        yield Slot(groups[key], part, entries_of(wrapper.optimizer, part), of_part, has_masters=True)


def fragments_of(optimizer: Any) -> Iterator[tuple[Any, torch.Tensor, int, int, int]]:
    """Locate the parameters of a DeepSpeed optimizer of stages 0 to 2 in the tensors that it trains.

    Each is (parameter, tensor that is trained here, first element in it, first element of the parameter, one past the
    last); without elements where another rank trains it. An UnsupportedError if masters are somewhere else now.
    """
    moved = [state.value for state in getattr(optimizer, "offloaded_states", ())]
    if away := sorted(set(moved) & {"hp_params", "lp_params"}):
        raise UnsupportedError(
            f"The engine has moved its {' and '.join(away)} away (offload_states). Call engine.reload_states() first."
        )
    parts: Iterable[Any] = zip(*(getattr(optimizer, name) for name in _attributes_of(optimizer)), strict=True)
    if isinstance(optimizer, FP16_UnfusedOptimizer):  # each parameter is like a group of its own
        pairs = chain.from_iterable(zip(*group, strict=True) for group in parts)
        parts = (([param], None, master) for param, master in pairs)
    for params, flat, part, *shared_by in parts:
        rank = dist.get_rank(*shared_by) if shared_by else 0
        following = 0
        for param in params:
            if shared_by:
                offset = (param.data_ptr() - flat.data_ptr()) // flat.element_size()
                if not 0 <= offset <= flat.numel() - param.numel():
                    continue  # it has other memory by now, another optimizer's perhaps: no step of this one changes it
            else:  # a step copies to each parameter, wherever it lies, what comes next
                offset, following = following, following + param.numel()
            start = max(0, rank * part.numel() - offset)
            stop = max(start, min(param.numel(), (rank + 1) * part.numel() - offset))
            yield param, part, offset + start - rank * part.numel(), start, stop


def _attributes_of(optimizer: Any) -> tuple[str, ...]:
    """The attributes of a DeepSpeed optimizer of stages 0 to 2, or of a subclass; else an UnsupportedError."""
    for kind, names in STAGES_0_TO_2.items():
        if isinstance(optimizer, kind):
            return names
    raise UnsupportedError(
        f"The engine has a {type(optimizer).__name__}, and where that trains its parameters is not known. Use "
        "DeepSpeed's own checkpoints."
    )


def trained_by(optimizer: Any) -> Iterator[Any]:
    """The model's parameters that a DeepSpeed optimizer trains, wherever their memory is."""
    first = _attributes_of(optimizer)[0]
    refuse_unknown_version("deepspeed", [] if hasattr(optimizer, first) else [f"{type(optimizer).__name__}.{first}"])
    yield from chain.from_iterable(getattr(optimizer, first))
