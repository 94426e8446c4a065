"""What a DeepSpeed engine trains, at any ZeRO stage: slots, scheduler, scaler, counters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch import nn

from ...errors import UnsupportedError
from ...ranks.coordinator import Coordinator
from ..introspection import autotp_shards, refuse_unknown_shards
from ..own_names import named_parameters, parameters
from ..slots import STEPS, VALUES, Slot, Training, slots_of_parameters
from . import partitions
from .kept_elsewhere import refuse_kept_elsewhere
from .masters import STAGES_0_TO_2, fragments_of, slots_of_masters, trained_by


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
    refuse_kept_elsewhere(engine)
    if wrapper is optimizer:
        slots = slots_of_parameters(model, optimizer, coordinator)
    else:
        names = {id(param): name for name, param in named_parameters(model)}
        slots = slots_of_masters(wrapper, names, coordinator.rank, coordinator.world_size)
        _refuse_out_of_reach(wrapper, names, slots)
    if engine.autotp_size() > 1:
        autotp_shards().add_empty_parts(model, optimizer, slots)
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
        copy_masters=_copying_masters(model, wrapper, slots),
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
    if wrapper is optimizer or type(wrapper) in (DeepSpeedZeroOptimizer_Stage3, *STAGES_0_TO_2):
        return ""
    return f"{type(wrapper).__name__} may step by code of its own"


def _is_between_steps(engine: Any) -> bool:
    """Whether no gradients are being accumulated, as far as the engine knows."""
    # accelerate and others say before each backward whether a step follows, and call `step` then only: the engine's
    # own count of micro-batches means nothing.
    is_boundary = getattr(engine, "_is_gradient_accumulation_boundary", None)
    if is_boundary is not None:
        return bool(is_boundary)
    counts = getattr(engine, "managed_gradient_accumulation", lambda: True)()
    return not counts or engine.micro_steps % engine.gradient_accumulation_steps() == 0


def _copying_masters(model: nn.Module, wrapper: Any, slots: Sequence[Slot]) -> Callable[[], object] | None:
    """What brings new masters into the model's 16-bit parameters, as a step does."""
    is_stage_3 = isinstance(wrapper, DeepSpeedZeroOptimizer_Stage3)
    params = dict(named_parameters(model))

    def to_partitions() -> None:
        for slot in slots:
            for name, _, first, start, stop, _ in slot.members:
                params[name].ds_tensor.data[: stop - start].copy_(slot.flat(VALUES)[first : first + stop - start])

    def to_parameters() -> None:  # at stage 0 every rank trains all of each parameter
        for param, part, first, start, stop in fragments_of(wrapper):
            param.data.view(-1)[start:stop].copy_(part.detach().view(-1)[first : first + stop - start])

    if not (slots and slots[0].has_masters):
        return lambda: None
    if is_stage_3:
        partitions_of = (param.ds_tensor for of_group in wrapper.fp16_groups for param in of_group)
        is_swapped = any(getattr(each, "final_location", None) == "nvme" for each in partitions_of)
        return None if is_swapped or any(slot.is_swapped for slot in slots) else to_partitions
    update: Callable[[], object] | None = getattr(wrapper, "update_lp_params", None)
    return update or to_parameters


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


def _refuse_out_of_reach(wrapper: Any, names: Mapping[int, str], slots: Sequence[Slot]) -> None:
    """Raise an UnsupportedError if a state cannot have all that a DeepSpeed optimizer trains and keeps."""
    is_stage_3 = isinstance(wrapper, DeepSpeedZeroOptimizer_Stage3)
    trained = [*(chain.from_iterable(wrapper.fp16_groups) if is_stage_3 else trained_by(wrapper))]
    for param in trained:
        if id(param) not in names:
            shape = tuple(getattr(param, "ds_shape", param.shape))
            raise UnsupportedError(
                f"The engine's optimizer trains a parameter of shape {shape} that is none of the model's: no module "
                "has it as a parameter, so that it has no name in a file. Assign it to a module, or put it into a "
                "ParameterList."
            )
    known = {member.name for slot in slots for member in slot.members}
    if moved := [name for param in trained if (name := names[id(param)]) not in known]:
        raise UnsupportedError(
            f"{', '.join(moved[:8])}: expected parameters that lie in the engine's flat buffers; {len(moved)} have "
            "been given other memory (param.data = ...), so that no step changes them, and the engine still keeps "
            "what it trains for them. Change values in place (param.data.copy_(...)), or use DeepSpeed's own "
            "checkpoints."
        )
    is_muon = any(group.get("use_muon") for group in wrapper.optimizer.param_groups)
    if is_muon and hasattr(wrapper, "real_dp_process_group") and not getattr(wrapper, "cpu_offload", False):
        raise UnsupportedError(
            "Muon keeps the momentum of whole matrices at stages 1 and 2, and not that of this rank's part of them. "
            "Use stage 3, offload the optimizer to the CPU, or DeepSpeed's own checkpoints."
        )
