"""Checks what ``save_state`` and ``load_state`` are given, and compares a state with it before it is read."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence, Sized
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..checkpoint.format import excerpt
from ..checkpoint.state_folder import files_of
from ..errors import CheckpointError, ConfigError, UnsupportedError
from ..holdings.introspection import is_packed
from ..holdings.own_names import named_buffers, named_parameters
from ..holdings.slots import Training, training_of_model
from ..ranks.coordinator import Coordinator
from ..seams.wrappers import unwrapped, unwrapped_optimizer
from . import schedules
from .base import quantised_modules
from .forms import ADAMS, OF_SOME_ADAMS, options_of, refuse_unlike, refuse_unsound
from .record import GroupRecord, StateRecord
from .wholes import groups_for, refuse_other_parts


_AT_ONCE = 32
"""Files that are looked for at the same time."""

_KEEP_A_PHASE = ("OnebitAdam", "OnebitLamb", "ZeroOneAdam")
"""DeepSpeed's optimizers (before 0.19) that keep outside of their state whether they compress yet."""

_ELSE = "Use an optimizer like AdamW, or the checkpoints of DeepSpeed or accelerate."


def refuse_optimizer(training: Training) -> None:
    """Raise an UnsupportedError for an optimizer that keeps what a state has no place for, as far as can be told."""
    optimizer = training.optimizer
    kind = type(optimizer).__name__
    if kind in _KEEP_A_PHASE:
        raise UnsupportedError(f"{kind} keeps the phase of its compression outside of its state. {_ELSE}")
    if not isinstance(optimizer, torch.optim.Optimizer) or not hasattr(optimizer, "_optimizer_state_dict_pre_hooks"):
        raise UnsupportedError(
            f"{kind} is none that torch.optim.Optimizer.__init__ has made, so that it is not known what it keeps, and "
            f"where its state dict comes from. {_ELSE}"
        )
    inside = [name for name, it in vars(optimizer).items() if isinstance(it, torch.optim.Optimizer)]
    if apart := [name for name in inside if getattr(optimizer, name).state is not optimizer.state]:
        raise UnsupportedError(
            f"{kind} keeps an optimizer inside ({apart[0]}), whose state is not its own: a training state would lack "
            f"it. {_ELSE}"
        )
    trained = {id(slot.values) for slot in training.slots}
    more = [
        f"a state of a tensor of shape {tuple(key.shape)} that is in none of its groups"
        if isinstance(key, torch.Tensor)
        else str(key)
        for key, kept in optimizer.state.items()
        if id(key) not in trained and kept != {}
    ]
    if more := [*more, *(_only_in_state_dict(training) if _has_own_state_dict(optimizer) else ())]:
        raise UnsupportedError(
            f"{kind} keeps {', '.join(sorted(more)[:8])} beside its groups and the state of its parameters, and a "
            f"training state has no place for it. {_ELSE}"
        )


def _has_own_state_dict(optimizer: Any) -> bool:
    stock = torch.optim.Optimizer.state_dict
    hooks = (*optimizer._optimizer_state_dict_post_hooks, *optimizer._optimizer_state_dict_pre_hooks)
    return type(optimizer).state_dict is not stock or "state_dict" in vars(optimizer) or bool(hooks)


def _only_in_state_dict(training: Training) -> list[str]:
    """The names of what a ``state_dict()`` of the optimizer's own has, and its groups and its state have not.

    Raises:
        UnsupportedError: it fails, so that this cannot be known.
    """
    optimizer = training.optimizer
    kept = [entries for entries in optimizer.state.values() if isinstance(entries, dict)]
    live = {name for entries in (*kept, *optimizer.param_groups) for name in entries}
    try:
        with _with_parameters(training):
            found = optimizer.state_dict()
        entries = [*found["state"].values(), *found["param_groups"]]
        names = {name for each in entries for name in _leaves(each, live)}
    except Exception as error:
        raise UnsupportedError(
            f"{type(optimizer).__name__}.state_dict(), which is not torch's, has failed, so that what it adds is not "
            f"known: {type(error).__name__}: {error}. {_ELSE}"
        ) from error
    return [*(found.keys() - {"state", "param_groups"}), *(names - live - {"params", "param_names"})]


def _leaves(entries: Mapping[Any, Any], live: AbstractSet[Any]) -> Iterator[str]:
    """The names in `entries`; of dicts that hold what is `live` one level deeper (bitsandbytes), those in it."""
    for name, value in entries.items():
        if name not in live and isinstance(value, dict) and value.keys() <= live:
            yield from value
        else:
            yield str(name)


@contextmanager
def _with_parameters(training: Training) -> Iterator[None]:
    """Inside, the optimizer's groups have what they train: DeepSpeed's stage 3 takes it out between steps."""
    groups = training.optimizer.param_groups
    kept = [group["params"] for group in groups]
    try:
        for number, group in enumerate(groups):
            group["params"] = kept[number] or [slot.values for slot in training.slots if slot.group == number]
        yield
    finally:
        for group, params in zip(groups, kept, strict=True):
            group["params"] = params


def refuse_module_entries(model: nn.Module) -> None:
    """Raise an UnsupportedError if a state dict of `model` has anything but parameters and buffers.

    That is what ``get_extra_state`` of a module returns, or what code of its own adds; scales of FP8 layers, for
    instance. Quantised layers add how their weights are packed; these are frozen, and the checkpoint has them.
    """
    quantised = tuple(f"{prefix}." for prefix, _ in quantised_modules(model))
    known: set[Any] = set()
    for named in (
        named_parameters(model, remove_duplicate=False, by_own_names=False),
        named_buffers(model, remove_duplicate=False, by_own_names=False),
    ):
        for name, tensor in named:
            known |= {name, id(tensor)}
    entries = model.state_dict(keep_vars=True).items()
    unknown = [
        key
        for key, value in entries
        if key not in known and id(value) not in known and not _is_empty(value) and not key.startswith(quantised)
    ]
    if unknown:
        raise UnsupportedError(
            f"{type(model).__name__}.state_dict() has {len(unknown)} entries that are neither parameters nor buffers: "
            f"{', '.join(unknown[:8])}. A training state has no place for them. Keep them in buffers, or use the "
            "checkpoints of DeepSpeed or accelerate."
        )


def keeps_packing(model: nn.Module) -> bool:
    """Whether quantised layers of `model` add how their weights are packed to a state dict."""
    return is_packed(model) or getattr(model, "hf_quantizer", None) is not None


def _is_empty(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 0
    return value is None or (isinstance(value, Sized) and not len(value))


def refuse_other_training(training: Training, record: StateRecord, place: Path) -> None:
    """Raise before anything is read if a state cannot go on in `training`.

    Raises:
        ConfigError: the optimizer keeps something else, or trains other parameters in its groups.
        CheckpointError: parameters had other shapes.
        UnsupportedError: see :func:`.schedules.refuse_other`.
    """
    kind = type(training.optimizer).__name__
    if kind != record.optimizer and not {kind, record.optimizer} <= ADAMS:
        raise ConfigError(f"{place}: the state of {record.optimizer} cannot go on in {kind}. Use the same optimizer.")
    if training.scheduler is not None and record.scheduler is not None:
        schedules.refuse_other(
            training.scheduler, record.scheduler, record.batch_size, training.batch_size, str(place)
        )
    training = training.without_frozen(record.trained)
    groups, slots = training.optimizer.param_groups, training.slots
    if len(groups) != len(record.groups) and training.scheduler is not None and record.scheduler is not None:
        raise ConfigError(
            f"{place}: the optimizer had {len(record.groups)} groups, and has {len(groups)} now, and the scheduler "
            "keeps rates of each. Make as many groups, or pass with_scheduler=False and set the new one yourself."
        )
    shapes = {member.name: list(member.box.shape) for slot in slots for member in slot.members}
    if different := sorted(shapes.keys() ^ record.trained):
        raise ConfigError(
            f"{place}: the optimizer trained {len(record.trained)} parameters, and trains {len(shapes)} now. Only one "
            f"of the two has {', '.join(different[:8])}. Train the same."
        )
    saved = (zip(each.parameters, each.shapes, strict=True) for each in record.groups)
    for name, shape in chain.from_iterable(saved):
        if list(shape) != shapes[name]:
            raise CheckpointError(
                f"{place}: {name} had shape {list(shape)} when the state was saved, and has {shapes[name]} now. "
                "Go on with the model that was trained."
            )
    for number, recorded in enumerate(groups_for(training, record, place)):
        has_step = any("step" in record.forms[form].small for form in recorded.forms)
        _refuse_other_amsgrad(kind, groups[number], recorded, number, place)
        if kind in ADAMS:
            _refuse_other_adam(training.optimizer, groups[number], recorded, number, place, has_step=has_step)
        _refuse_other_options(groups[number], recorded, number, place)
    refuse_unsound(record.forms, place)
    refuse_unlike(slots, record.form_of, place)
    refuse_other_parts(training, record, place)


def _refuse_other_amsgrad(
    kind: str, group: Mapping[str, Any], recorded: GroupRecord, number: int, place: Path
) -> None:
    """Raise a ConfigError if only one of the two optimizers can keep the third moment that `amsgrad` needs."""
    can_keep = "amsgrad" in group and kind != "DeepSpeedCPUAdam"
    mine, saved = bool(can_keep and group["amsgrad"]), bool(recorded.options.get("amsgrad"))
    if (saved and not can_keep) or (mine and "amsgrad" not in recorded.options):
        with_it, without = ("the saved one", kind) if saved else (kind, "the saved one")
        raise ConfigError(
            f"{place}: group {number} of the optimizer: {with_it} keeps a third moment, max_exp_avg_sq (amsgrad), and "
            f"{without} has none. Use the same optimizer."
        )


def _refuse_other_adam(
    optimizer: Any, group: Mapping[str, Any], recorded: GroupRecord, number: int, place: Path, *, has_step: bool
) -> None:
    """Raise a ConfigError if an Adam of another maker would make other steps of the same options."""
    kind, where = type(optimizer).__name__, f"{place}: group {number} of the optimizer"
    saved = options_of(recorded)
    for name, without in OF_SOME_ADAMS.items():
        mine, theirs = (bool(options.get(name, without)) for options in (group, saved))
        if mine != theirs and not (name in group and name in saved):
            lacks = "the saved one" if name in group else kind
            raise ConfigError(
                f"{where}: {name} was {theirs} in the training that was saved, and is {mine} now; {lacks} has no such "
                "option. Use the same optimizer."
            )
    decoupled, mode = saved.get("decoupled_weight_decay"), getattr(optimizer, "adam_w_mode", None)
    if None not in (decoupled, mode) and bool(decoupled) != bool(mode) and saved.get("weight_decay"):
        raise ConfigError(
            f"{where}: its weight decay was {'AdamW' if decoupled else 'Adam'}'s, and adam_w_mode={bool(mode)} of "
            f"{kind} is the other. Make it with adam_w_mode={bool(decoupled)}."
        )
    counts_alone = type(optimizer).__module__.partition(".")[0] in ("torch", "deepspeed")
    if counts_alone and saved.get("step") and not has_step:
        raise ConfigError(
            f"{where}: the saved optimizer counted the steps of a group, and {kind} counts those of each parameter. "
            "Use the same optimizer."
        )
    if not counts_alone and kind == "FusedAdam" and has_step and not saved.get("step"):
        raise ConfigError(
            f"{where}: the saved optimizer counted the steps of each parameter, and {kind} counts those of a group. "
            "Use the same optimizer."
        )


def _refuse_other_options(group: Mapping[str, Any], recorded: GroupRecord, number: int, place: Path) -> None:
    """Raise a CheckpointError if an option is of another kind than the optimizer's own."""
    for name, value in options_of(recorded).items():
        mine = group.get(name)
        if mine is None or value is None:
            continue
        is_number = isinstance(value, (bool, int, float, torch.Tensor))
        if isinstance(mine, tuple):
            is_sound = isinstance(value, (list, tuple)) and len(value) == len(mine)
        elif isinstance(mine, list):  # which steps may have made longer
            is_sound = isinstance(value, (list, tuple))
        else:
            is_sound = is_number if isinstance(mine, (bool, int, float, torch.Tensor)) else not is_number
        if not is_sound:
            raise CheckpointError(
                f"{place}: group {number} of the optimizer: {name}: expected something like {excerpt(mine)}; found "
                f"{excerpt(value)}. Go on with the optimizer that was saved."
            )


def refuse_missing_files(place: Path, others: Sequence[str]) -> None:
    """Raise a CheckpointError if a file of the state in `place`, or one of `others`, is not there."""
    files = [*files_of(place), *(place / name for name in others)]
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        there = [threads.submit(copy_context().run, path.is_file) for path in files]
    missing = [path for path, is_there in zip(files, there, strict=True) if not is_there.result()]
    if missing:
        raise CheckpointError(
            f"{missing[0]}: this file of the training state is gone ({len(missing)} in all). Copy the whole folder "
            "again, or go on from an older state."
        )


def training_of(
    trained: Any, optimizer: Any, scheduler: Any, scaler: Any, batch_size: int | None, coordinator: Coordinator
) -> Training:
    """For the arguments see :func:`.save.save_state`; raises a ConfigError if they do not fit together."""
    model = unwrapped(trained)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"expected a model or an engine around one; got {type(trained).__name__}")
    if "deepspeed" in sys.modules:
        from ..holdings.deepspeed.engine import is_engine, training_of_engine

        if is_engine(trained):
            if optimizer is not None or scaler is not None or batch_size is not None:
                raise ConfigError("optimizer, scaler, batch_size: an engine has its own; leave them out")
            return training_of_engine(trained, model, scheduler, coordinator)
    if optimizer is None:
        raise ConfigError(
            f"optimizer: expected the optimizer that trains this {type(model).__name__}; got None. Pass optimizer=, "
            "or the DeepSpeed engine in place of the model."
        )
    training = training_of_model(model, unwrapped_optimizer(optimizer), scheduler, scaler, coordinator)
    return replace(training, batch_size=batch_size)
