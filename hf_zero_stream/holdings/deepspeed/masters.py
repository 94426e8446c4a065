"""The values that DeepSpeed trains in place of a model's parameters, at ZeRO stages 0 to 2 (not 3).

Each optimizer step copies them into the model. So whoever writes to parameters must write to these too, or the next
step puts the old values back. Neither the engine need be at hand, nor do parameters lead to all of these optimizers,
so every live one is looked at:

- ``DeepSpeedZeroOptimizer`` (stages 1 and 2) and ``BF16_Optimizer`` (stage 1 with gradients in fp32): the parameters
  lie in a flat buffer, of which each rank trains a part. The fragments that DeepSpeed attaches to parameters
  (``_hp_mapping``) are not used: with `round_robin_gradients`, DeepSpeed 0.19.8 attaches those of other parameters.
- ``FP16_Optimizer`` and ``FP16_UnfusedOptimizer`` (stage 0, bf16 too): each rank trains all of each parameter.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from ...errors import UnsupportedError, refuse_unknown_version


ZENFLOW = (
    "ZenFlow keeps copies of the values that it trains, which cannot be reached. Load before deepspeed.initialize, or "
    "use DeepSpeed's own checkpoints."
)

_STAGES_1_2 = ("bit16_groups", "bit16_groups_flat", "single_partition_of_fp32_groups", "real_dp_process_group")
_ATTRIBUTES: dict[type, tuple[str, ...]] = {
    DeepSpeedZeroOptimizer: _STAGES_1_2,
    BF16_Optimizer: ("bf16_groups", "bf16_groups_flat", "fp32_groups_flat_partition", "real_dp_process_group"),
    FP16_Optimizer: ("fp16_groups", "fp16_groups_flat", "fp32_groups_flat"),
    FP16_UnfusedOptimizer: ("fp16_groups", "fp32_groups"),
}
"""For each group of an optimizer: the model's parameters, the flat buffer that they lie in, what this rank trains of
it, and the ranks that share it. FP16_UnfusedOptimizer has no flat buffers, but a tensor for each parameter.
"""

MASTERED = tuple(_ATTRIBUTES)
"""These classes themselves: subclasses may step otherwise."""


class Master(NamedTuple):
    """Flat values that an optimizer trains in place of elements ``[start, stop)`` of a parameter."""

    values: torch.Tensor
    start: int
    stop: int
    is_whole: bool  # every rank has all of them; otherwise this rank has its fragment


def masters_of(params: Iterable[Any]) -> dict[int, list[Master]]:
    """Map the ``id`` of each trained one of `params`, none of ZeRO-3, to the masters of it on this rank.

    The same parameters on every rank, some with an empty list; an UnsupportedError if masters cannot be reached.
    """
    # Also those that do not require gradients: one that was frozen after the start of its engine is still copied back.
    whole = [param for param in params if param.numel()]
    if all(param.dtype == torch.float32 and not hasattr(param, "_hp_mapping") for param in whole):
        return {}  # these have no masters, and need no search, which takes 60 ms
    trained = set(map(id, whole))
    found: dict[int, list[Master]] = {}
    for optimizer in _optimizers_of(trained):
        is_whole = isinstance(optimizer, (FP16_Optimizer, FP16_UnfusedOptimizer))
        for param, part, first, start, stop in fragments_of(optimizer):
            if id(param) in trained:
                of_param = found.setdefault(id(param), [])
                if start < stop:
                    values = part.detach().view(-1)[first : first + stop - start]
                    of_param.append(Master(values, start, stop, is_whole))
    return found


def trained_by(optimizer: Any) -> Iterator[Any]:
    """The model's parameters that a DeepSpeed optimizer of stages 0 to 2 trains, wherever their memory is."""
    first, *_ = dict(_with_subclasses(_ATTRIBUTES))[type(optimizer)]
    yield from chain.from_iterable(getattr(optimizer, first))


def fragments_of(optimizer: Any) -> Iterator[tuple[Any, torch.Tensor, int, int, int]]:
    """Locate the parameters of a DeepSpeed optimizer of stages 0 to 2 in the tensors that it trains.

    Each is (parameter, tensor that is trained here, first element in it, first element of the parameter, one past the
    last); without elements where another rank trains it.

    Raises:
        UnsupportedError: masters cannot be reached.
        KeyError: the class of the optimizer is not known.
    """
    kind, names = type(optimizer), dict(_with_subclasses(_ATTRIBUTES))[type(optimizer)]
    refuse_unknown_version("deepspeed", [f"{kind.__name__}.{name}" for name in names if not hasattr(optimizer, name)])
    _refuse_unreachable(optimizer)
    parts: Iterable[Any] = zip(*(getattr(optimizer, name) for name in names), strict=True)
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


def _optimizers_of(trained: set[int]) -> Iterator[Any]:
    """The live optimizers of stages 0 to 2 that train any of these parameters."""
    attributes = dict(_with_subclasses(_ATTRIBUTES))
    for optimizer in _instances(list(attributes)):
        found = [getattr(optimizer, name, None) for name in attributes[type(optimizer)]]
        if all(each is None for each in found):
            continue  # its constructor has failed
        if found[0] is None or any(id(param) in trained for group in found[0] for param in group):
            yield optimizer


def _instances(kinds: list[type]) -> list[Any]:
    """Objects of these classes that are in use: an object refers to its class, and the garbage collector knows it."""
    was_frozen = gc.get_freeze_count() > 0
    if was_frozen:  # the collector would not look at what gc.freeze() took out
        gc.unfreeze()
    try:
        if not any(type(referrer) in kinds for referrer in gc.get_referrers(*kinds)):
            return []
        gc.collect()  # an engine that was dropped lives on until then, with values that nobody trains any more
        return [referrer for referrer in gc.get_referrers(*kinds) if type(referrer) in kinds]
    finally:
        if was_frozen:
            gc.freeze()


def _with_subclasses(attributes: Mapping[type, tuple[str, ...]]) -> Iterator[tuple[type, tuple[str, ...]]]:
    for kind, names in attributes.items():
        yield kind, names
        yield from _with_subclasses(dict.fromkeys(kind.__subclasses__(), names))


def _refuse_unreachable(optimizer: Any) -> None:
    moved = [state.value for state in getattr(optimizer, "offloaded_states", ())]
    away = sorted(set(moved) & {"hp_params", "lp_params"})
    if away:
        raise UnsupportedError(
            f"The engine has moved its {' and '.join(away)} away (offload_states). Call engine.reload_states() first."
        )
    if type(optimizer).__module__.startswith("deepspeed.runtime.zenflow"):
        raise UnsupportedError(ZENFLOW)
