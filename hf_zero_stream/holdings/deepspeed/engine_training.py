"""Describes the training of a DeepSpeed engine's model, at any ZeRO stage: slots, scheduler, scaler, counters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch import nn

from ...errors import UnsupportedError, refuse_unknown_version
from ...ranks.coordinator import Coordinator
from ..own_names import named_parameters, parameters
from ..slots import VALUES, Member, Slot, entries_of, slots_of_parameters
from ..training import STEPS, Training
from . import partitions
from .autotp_shards import autotp_shard_of, is_empty_on_any_rank, trained_box
from .masters import MASTERED, ZENFLOW, fragments_of, trained_by
from .model_parallel import refuse_unknown_shards


_RELIED_ON = ("grad_position", "sub_group_to_group_id", "fp32_partitioned_groups_flat", "fp16_groups")
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")


def is_engine(trained: Any) -> bool:
    return isinstance(trained, DeepSpeedEngine)


def validate_tag(engine: DeepSpeedEngine, tag: str) -> None:
    """Compare the ranks' tags; warn or raise an AssertionError, as the config's ``tag_validation`` says."""
    engine._checkpoint_tag_validation(tag)


def training_of_engine(engine: Any, model: nn.Module, scheduler: Any, coordinator: Coordinator) -> Training:
    """Describe the training of `model`, which is inside `engine`; its scheduler is `scheduler`, or the engine's own.

    Raises:
        UnsupportedError: its state cannot be reached, or is not known.
    """
    wrapper = engine.optimizer
    # A user's own optimizer may have another one inside.
    optimizer = wrapper if isinstance(wrapper, torch.optim.Optimizer) else getattr(wrapper, "optimizer", wrapper)
    if not hasattr(optimizer, "state"):  # there is none, or one of DeepSpeed's that stands in for it
        raise UnsupportedError("The engine has no optimizer: deepspeed.initialize was given none.")
    refuse_unknown_shards(engine, "training state")
    _refuse_data_efficiency(engine)
    if isinstance(wrapper, DeepSpeedZeroOptimizer_Stage3):
        slots = list(_stage_3(model, wrapper))
    elif wrapper is optimizer:
        slots = slots_of_parameters(model, optimizer, coordinator)
    else:
        slots = _stages_0_to_2(model, wrapper, coordinator)
    if engine.autotp_size() > 1:
        _add_empty_parts(model, optimizer, slots)
    return Training(
        model=model,
        optimizer=optimizer,
        slots=slots,
        scheduler=engine.lr_scheduler if scheduler is None else scheduler,
        scaler_state=_scaler_state(wrapper),
        set_scaler_state=lambda state: vars(_scaler(wrapper)).update(state),
        counters={name: getattr(engine, name) for name in _COUNTERS},
        set_counters=partial(_set_counters, engine),
        is_between_steps=_is_between_steps(engine),
        replacing_state=partial(_replacing_state, wrapper),
        batch_size=engine.train_batch_size(),
        device=partitions.local_device(),
        copy_masters=partial(_copy_masters, model, wrapper) if slots and slots[0].has_masters else lambda: None,
        can_copy_masters=not _has_swapped(wrapper),
        copies_own_masters=isinstance(wrapper, DeepSpeedZeroOptimizer_Stage3),
        unseen_steps=_unseen_steps(wrapper, optimizer),
        editors=[*_editors(model, wrapper)],
    )


def _editors(model: nn.Module, wrapper: Any) -> Iterator[tuple[Any, Sequence[str]]]:
    """What DeepSpeed's ``safe_set_...`` functions call, and what copies the model's values into the masters."""
    if isinstance(wrapper, DeepSpeedZeroOptimizer_Stage3):
        yield wrapper, ("set_full_hp_param", "set_local_hp_param")
    if hasattr(wrapper, "refresh_fp32_params"):
        yield wrapper, ("refresh_fp32_params",)
    for param in parameters(model):
        if hasattr(param, "set_full_hp_param"):  # stages 1 and 2, and bf16 at stage 0
            yield param, ("set_full_hp_param",)


def _unseen_steps(wrapper: Any, optimizer: Any) -> str:
    """Why DeepSpeed may step without calling the step of `optimizer`; "" if it does not."""
    if wrapper is optimizer or type(wrapper) in (DeepSpeedZeroOptimizer_Stage3, *MASTERED):
        return ""
    return f"{type(wrapper).__name__} may step by code of its own"


def _add_empty_parts(model: nn.Module, optimizer: Any, slots: list[Slot]) -> None:
    """Have the slots name the parameters of which this rank holds nothing: DeepSpeed gives them to no optimizer."""
    params = dict(named_parameters(model))
    empty = [name for name, param in params.items() if is_empty_on_any_rank(param)]
    if empty and len(optimizer.param_groups) > 1:
        raise UnsupportedError(
            f"{', '.join(empty[:8])}: some ranks of tensor parallelism hold nothing of {len(empty)} parameter(s), and "
            "the optimizer's groups do not say which of them these are in. Use one group, no more ranks of tensor "
            "parallelism than key-value heads, or DeepSpeed's own checkpoints."
        )
    known = {member.name for slot in slots for member in slot.members}
    for name in empty:
        if not params[name].numel() and name not in known:
            box = autotp_shard_of(name, params[name]).box
            slots[0] = replace(slots[0], members=[*slots[0].members, Member(name, box, 0, 0, 0)])


def _refuse_data_efficiency(engine: Any) -> None:
    """Raise an UnsupportedError for an engine that saves where its own data pipeline has come to."""
    samples = engine.training_dataloader is not None and engine.curriculum_learning_enabled()
    if samples or engine.random_ltd_enabled():
        what = "samples by curriculum learning" if samples else "drops tokens by random-LTD"
        raise UnsupportedError(
            f"The engine {what} (data_efficiency), and a training state has no place for where that is. Use "
            "DeepSpeed's checkpoints."
        )


def _is_between_steps(engine: Any) -> bool:
    """Whether no gradients are being accumulated, as far as the engine knows."""
    # accelerate and others say before each backward whether a step follows, and call `step` then only: the engine's
    # own count of micro-batches means nothing.
    is_boundary = getattr(engine, "_is_gradient_accumulation_boundary", None)
    if is_boundary is not None:
        return bool(is_boundary)
    counts = getattr(engine, "managed_gradient_accumulation", lambda: True)()
    return not counts or engine.micro_steps % engine.gradient_accumulation_steps() == 0


def _copy_masters(model: nn.Module, wrapper: Any) -> None:
    """Bring new masters into the model's 16-bit parameters, as a step does."""
    if isinstance(wrapper, DeepSpeedZeroOptimizer_Stage3):
        params = dict(named_parameters(model))
        for slot in _stage_3(model, wrapper):
            for name, _, first, start, stop, _ in slot.members:
                params[name].ds_tensor.data[: stop - start].copy_(slot.flat(VALUES)[first : first + stop - start])
    elif hasattr(wrapper, "update_lp_params"):
        wrapper.update_lp_params()
    elif hasattr(wrapper, "optimizer"):  # stage 0: every rank trains all of each parameter
        for param, part, first, start, stop in fragments_of(wrapper):
            param.data.view(-1)[start:stop].copy_(part.detach().view(-1)[first : first + stop - start])


def _has_swapped(wrapper: Any) -> bool:
    """Whether partitions of the model's own values that are trained lie in swap files."""
    groups = wrapper.fp16_groups if isinstance(wrapper, DeepSpeedZeroOptimizer_Stage3) else []
    return any(getattr(param.ds_tensor, "final_location", None) == "nvme" for params in groups for param in params)


def _set_counters(engine: Any, counters: Mapping[str, int]) -> None:
    steps = counters.get(STEPS, 0)
    samples = steps * engine.train_batch_size()
    for name, value in {"global_samples": samples, "skipped_steps": 0, **counters, STEPS: steps}.items():
        if name in _COUNTERS:
            setattr(engine, name, value)


def _scaler(wrapper: Any) -> Any:
    """Return the object that has the numbers of DeepSpeed's loss scaler; None if it scales nothing."""
    config = getattr(wrapper, "loss_scale_config", None)  # stage 0
    if getattr(config, "use_grad_scaling", False):
        return config
    scaler = getattr(wrapper, "loss_scaler", None)
    return scaler if hasattr(scaler, "cur_scale") else None


def _scaler_state(wrapper: Any) -> dict[str, Any] | None:
    """The numbers of the loss scaler; names and dtypes are settings."""
    scaler = _scaler(wrapper)
    if scaler is None:
        return None
    kept = {name: value for name, value in vars(scaler).items() if not isinstance(value, (str, torch.dtype))}
    if odd := [name for name, value in kept.items() if not isinstance(value, (bool, int, float, type(None)))]:
        raise UnsupportedError(
            f"{type(scaler).__name__}.{odd[0]}: expected a number in a loss scaler; found a "
            f"{type(kept[odd[0]]).__name__}, for which a training state has no place. Use DeepSpeed's checkpoints."
        )
    return kept


@contextmanager
def _replacing_state(wrapper: Any) -> Iterator[None]:
    """Inside, no parameter is gathered, and what is gathered afterwards are the new values."""
    for name in ("checkpoint_event_prologue", "checkpoint_event_epilogue"):
        if hasattr(wrapper, name):
            getattr(wrapper, name)()
        if name.endswith("prologue"):
            yield


def _name_of(param: Any, names: Mapping[int, str]) -> str:
    """The own name of `param`, from those of the model's parameters by their ``id``.

    Raises:
        UnsupportedError: it is none of the model's.
    """
    if id(param) not in names:
        shape = tuple(getattr(param, "ds_shape", param.shape))
        raise UnsupportedError(
            f"The engine's optimizer trains a parameter of shape {shape} that is none of the model's: no module "
            "has it as a parameter, so that it has no name in a file. Assign it to a module, or put it into a "
            "ParameterList."
        )
    return names[id(param)]


def _stage_3(model: nn.Module, wrapper: Any) -> Iterator[Slot]:
    """DeepSpeed trains sub-groups of a group's partitions, each as a flat buffer."""
    missing = [f"{type(wrapper).__name__}.{name}" for name in _RELIED_ON if not hasattr(wrapper, name)]
    refuse_unknown_version("deepspeed", missing)
    if getattr(wrapper, "zenflow", False):
        raise UnsupportedError(ZENFLOW)
    names = {id(param): name for name, param in named_parameters(model)}
    sub_groups = zip(wrapper.fp16_groups, wrapper.fp32_partitioned_groups_flat, strict=True)
    for number, (params, flat) in enumerate(sub_groups):
        members = []
        for param in params:
            _, first, _ = wrapper.grad_position[wrapper.get_param_id(param)]
            _, start, stop = partitions.own_range(param)
            members.append(Member(_name_of(param, names), partitions.box_of(param), first, start, stop))
        is_swapped = wrapper._swappable_optimizer_subgroup(number)
        yield Slot(
            wrapper.sub_group_to_group_id[number],
            flat,
            entries_of(wrapper.optimizer, flat),
            members,
            has_masters=True,
            is_swapped=is_swapped,
            opened=partial(_swapped_in, wrapper, number) if is_swapped else nullcontext,
        )


@contextmanager
def _swapped_in(wrapper: Any, number: int) -> Iterator[None]:
    """Inside, the sub-group's masters and states are in memory; changes go to the swap file."""
    wrapper._optimizer_states_and_gradient_swap_in(number)
    try:
        yield
    finally:
        wrapper._optimizer_states_and_gradient_swap_out(number)


def _stages_0_to_2(model: nn.Module, wrapper: Any, coordinator: Coordinator) -> list[Slot]:
    """DeepSpeed trains this rank's part of each group's flat buffer; at stage 0 all of it, or of each parameter."""
    is_muon = any(group.get("use_muon") for group in wrapper.optimizer.param_groups)
    if is_muon and hasattr(wrapper, "real_dp_process_group") and not getattr(wrapper, "cpu_offload", False):
        raise UnsupportedError(
            "Muon keeps the momentum of whole matrices at stages 1 and 2, and not that of this rank's part of them. "
            "Use stage 3, offload the optimizer to the CPU, or DeepSpeed's own checkpoints."
        )
    names = {id(param): name for name, param in named_parameters(model)}
    trained = enumerate(group["params"] for group in wrapper.optimizer.param_groups)
    groups = {id(part): number for number, parts in trained for part in parts}
    members: dict[int, tuple[Any, list[Member]]] = {}
    for param, part, first, start, stop in fragments_of(wrapper):
        is_whole = part.numel() >= param.numel() and not hasattr(wrapper, "real_dp_process_group")
        name = _name_of(param, names)
        box, share = trained_box(name, param, coordinator.rank, coordinator.world_size)
        if is_whole:
            start, stop = share
        member = Member(name, box, first, start, stop, is_whole)
        members.setdefault(id(part), (part, []))[1].append(member)
    known = {member.name for _, of_part in members.values() for member in of_part}
    if moved := [name for param in trained_by(wrapper) if (name := _name_of(param, names)) not in known]:
        raise UnsupportedError(
            f"{', '.join(moved[:8])}: expected parameters that lie in the engine's flat buffers; {len(moved)} have "
            "been given other memory (param.data = ...), so that no step changes them, and the engine still keeps "
            "what it trains for them. Change values in place (param.data.copy_(...)), or use DeepSpeed's own "
            "checkpoints."
        )
    return [
        Slot(groups[key], part, entries_of(wrapper.optimizer, part), of_part, has_masters=True)
        for key, (part, of_part) in members.items()
    ]
