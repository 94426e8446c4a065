"""Goes on from a ZeRO checkpoint that DeepSpeed wrote, at any number of ranks and any stage, as from a state of ours.

The folder is a map of bytes (:mod:`.zero_folder`): nothing in it is converted, and no pickle is run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers.utils import logging

from ...errors import ConfigError, UnsupportedError
from ...plugin_api import (
    ADAMS,
    CLIENT,
    VALUES,
    Coordinator,
    Form,
    GroupRecord,
    LazyTensor,
    Load,
    LocalFiles,
    StateRecord,
    Training,
    class_of,
    is_adapted,
    keeps_packing,
    named_buffers,
    named_parameters,
    quantised_names,
)
from .zero_folder import FP32, ZeroFolder, ZeroGroup, read_zero_folder


logger = logging.get_logger(__name__)

_OF_ADAM = {"exp_avg", "exp_avg_sq"}


@dataclass(frozen=True)
class ZeroState:
    """A ZeRO checkpoint, as a :class:`...state.foreign.ForeignState`."""

    zero: ZeroFolder
    writer: str = "DeepSpeed"

    def renamed(self, rename: Callable[[str], str]) -> ZeroState:
        return replace(self, zero=self.zero.renamed(rename))

    def record_for(self, training: Training, with_scheduler: bool) -> StateRecord:
        return _record_of(self.zero, training, with_scheduler)

    def states_for(self, training: Training, coordinator: Coordinator) -> Callable[[Load, Collection[str]], Any]:
        if coordinator.is_main:
            _warn_of_missing(training, self.zero)
        # Quantised weights do not lie in files as they do in memory; a resume has those of the base.
        left_out = quantised_names(training.model) if is_adapted(training.model) else frozenset[str]()
        return partial(_states, self.zero, left_out)


def read_state(folder: Path) -> ZeroState:
    """The checkpoint in the folder of a tag; raises as :func:`.zero_folder.read_zero_folder`."""
    return ZeroState(read_zero_folder(LocalFiles(), folder))


def _record_of(zero: ZeroFolder, training: Training, with_scheduler: bool) -> StateRecord:
    """Return the record of a state of ours; DeepSpeed names neither the optimizer's class nor the scheduler's.

    Raises:
        ConfigError: the optimizer or the scheduler of `training` keeps something else.
        UnsupportedError: modules kept more than parameters and buffers.
    """
    _refuse_module_entries(zero, training)
    _refuse_other_optimizer(zero, training)
    scheduler = _scheduler_record(zero, training) if with_scheduler else None
    scaler = {name: value for name, value in zero.scaler.items() if name in (training.scaler_state or {})}
    groups, forms = _groups_of(zero)
    steps, samples = (zero.counters.get(name, 0) for name in ("global_steps", "global_samples"))
    return StateRecord(
        optimizer=type(training.optimizer).__name__,
        keys=[*zero.keys],
        groups=groups,
        forms=forms,
        scheduler=scheduler,
        scaler=scaler if scaler.keys() == (training.scaler_state or {}).keys() else None,
        counters=zero.counters,
        world_size=zero.world_size,
        batch_size=zero.batch_size or (samples // steps if steps and samples % steps == 0 else None),
        data={CLIENT: zero.client_state},
    )


def _groups_of(zero: ZeroFolder) -> tuple[list[GroupRecord], list[Form]]:
    """The groups, and the different forms of what is kept of their parameters."""
    views = zero.views()
    numbers: dict[str, int] = {}
    forms: list[Form] = []
    groups = []
    for group in zero.groups:
        of_group = []
        for place, name in enumerate(group.parameters):
            form = _form(zero, group, place, name)
            number = numbers.setdefault(repr(form), len(numbers))
            forms += [form] if number == len(forms) else []
            of_group.append(number)
        shapes = [list(views[name].sizes) for name in group.parameters]
        groups.append(GroupRecord(dict(group.options), list(group.parameters), shapes, of_group))
    return groups, forms


def _form(zero: ZeroFolder, group: ZeroGroup, place: int, name: str) -> Form:
    small = {key: values[place] for key, values in group.numbers.items()}
    if None in small.values():  # no step has been made of it
        return Form()
    nothing = {key: None for key, names in group.nothing.items() if name in names}
    return Form(dict.fromkeys(zero.keys, ""), small | nothing)


def _refuse_module_entries(zero: ZeroFolder, training: Training) -> None:
    if keeps_packing(training.model):
        return
    model = training.model
    named = [*named_parameters(model, remove_duplicate=False), *named_buffers(model, remove_duplicate=False)]
    known = {name for name, _ in named}
    if unknown := [name for name in zero.beside if name not in known]:
        raise UnsupportedError(
            f"{zero.path}: {len(unknown)} entries of modules are neither parameters nor buffers: "
            f"{', '.join(unknown[:8])}. Go on with as many ranks as before, by DeepSpeed itself, which restores them."
        )


def _refuse_other_optimizer(zero: ZeroFolder, training: Training) -> None:
    """Raise a ConfigError unless what the optimizer keeps, and the options of its groups, are those of its class."""
    kind = type(training.optimizer).__name__
    if kind in ADAMS:
        expected = _OF_ADAM | ({"max_exp_avg_sq"} if training.optimizer.defaults.get("amsgrad") else set())
        if not zero.keys or set(zero.keys) == expected:
            return
        found = f"keeps {', '.join(zero.keys)} of each element, and {kind} {', '.join(sorted(expected))}"
    else:
        mine, theirs = (
            {name for name in options if name not in ("params", "param_names")}
            for options in (training.optimizer.param_groups[0], zero.groups[0].options)
        )
        if mine == theirs - ({"step"} - mine):  # some make it in their first step
            return
        found = f"has groups with {', '.join(sorted(theirs - mine)) or 'fewer options'}, and {kind} with others"
    saved = f"a {zero.kind}" if zero.kind else "another optimizer"
    raise ConfigError(f"{zero.path}: it was saved with {saved}, which {found}. Use the same optimizer.")


def _scheduler_record(zero: ZeroFolder, training: Training) -> Mapping[str, Any] | None:
    if training.scheduler is None or zero.scheduler is None:
        return None
    leave_out = "Use the same, or pass with_scheduler=False and set the new one yourself."
    if isinstance(zero.scheduler, str):
        raise ConfigError(f"{zero.path}: the scheduler's state cannot be taken over: {zero.scheduler}. {leave_out}")
    mine = set(training.scheduler.state_dict())
    if different := sorted(mine ^ zero.scheduler.keys(), key=str):
        raise ConfigError(
            f"{zero.path}: the scheduler was not a {class_of(training.scheduler)}, as it is now: only one of them "
            f"keeps {', '.join(map(str, different[:8]))}. {leave_out}"
        )
    return {"class": class_of(training.scheduler), "state": zero.scheduler}


def _states(
    zero: ZeroFolder, left_out: AbstractSet[str], load: Load, keys: Collection[str]
) -> dict[str, dict[str, LazyTensor]]:
    """The lazy states `keys` of all parameters; values are those of all that the model has but what is `left_out`."""
    first = load.checkpoint.add(zero.shards)
    untrained = {**zero.frozen(first), **zero.buffers(first)}
    of_keys = {key: {**zero.views(FP32 if key == VALUES else key, first)} for key in keys}
    of_keys[VALUES] |= {name: view for name, view in untrained.items() if name not in left_out}
    return {
        key: {name: LazyTensor.of(view, load.checkpoint.materialise) for name, view in views.items()}
        for key, views in of_keys.items()
    }


def _warn_of_missing(training: Training, zero: ZeroFolder) -> None:
    known = {*zero.views(), *zero.frozen(), *zero.shared}
    unknown = [name for name, _ in named_parameters(training.model) if name not in known]
    if unknown and is_adapted(training.model):
        logger.warning(
            f"{zero.path}: DeepSpeed was told to leave out what is not trained, so it has no values for "
            f"{len(unknown)} parameters of the base, among them {unknown[0]}. They stay as they are: nothing shows "
            "whether they are those that the adapters were trained with."
        )
    elif unknown:
        logger.warning(
            f"{zero.path}: it has no values for {len(unknown)} parameters, among them {unknown[0]}, which is not "
            "trained either. They stay as they are."
        )
    if zero.left_out:
        logger.warning(
            f"{zero.path}: of what was given as client_state, {', '.join(map(repr, zero.left_out[:8]))} cannot be had "
            "without running a pickle. Set it yourself."
        )
