"""``load_state()``: go on with a training that :func:`.save.save_state` saved, at any number of ranks."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

from ..checkpoint.zero_folder import ZeroFolder, is_zero_folder, read_zero_folder
from ..config import StreamingConfig
from ..destinations.deepspeed.marks import has_partition
from ..destinations.slots import MASTER, Slot, SlotMemory, make_entries
from ..destinations.training import Training
from ..engine.load import Load
from ..errors import CheckpointError, ConfigError, UnsupportedError
from ..loading.dry_load import lazily_loaded
from ..loading.integration import finish_saves_into
from ..loading.into import load_some_into
from ..ranks.coordinator import Coordinator, expected_at
from ..ranks.rendezvous import LOAD
from ..reports.memory import collector_paused
from ..saving.pending import finish_pending
from ..seams.adapted import is_adapted
from ..sources.local import LocalFiles
from . import adapters, schedules
from .record import FILE, LATEST, GroupRecord, StateRecord, restored, shard_of_key
from .refusals import refuse_missing_files, refuse_optimizer, refuse_other_training
from .rng import FILE as RNG_FILE
from .rng import restore_rank
from .trained import training_of
from .zero_source import load_zero, record_of, swapped_masters


__all__ = ["Resumed", "load_state"]

logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class Resumed:
    """What a training goes on from.

    Attributes:
        tag: the name of the state.
        data: what the user gave to ``save_state``.
        counters: numbers of steps, samples, ...
        world_size: of the ranks that saved it.
    """

    tag: str
    data: Any
    counters: Mapping[str, int]
    world_size: int


def load_state(
    trained: Any,
    folder: str | os.PathLike[str],
    *,
    optimizer: Any = None,
    scheduler: Any = None,
    scaler: Any = None,
    tag: str | None = None,
    batch_size: int | None = None,
    with_scheduler: bool = True,
    with_rng: bool = True,
    config: StreamingConfig | None = None,
) -> Resumed:
    """Go on from a training state, at any number of ranks and any ZeRO stage, and between ZeRO and FSDP2 (all ranks).

    Weights, masters, moments, steps, the options of each group, scheduler, loss scaler, counters and, for ranks that
    were there, random numbers become those that were saved. Every rank reads the bytes of its own shards.

    Args:
        trained, optimizer, scheduler, scaler: what is going to train, as for :func:`hf_zero_stream.save_state`; made
            as for a new training, of the same model with the same groups.
        folder: what ``save_state`` wrote, or DeepSpeed's ``engine.save_checkpoint`` (ZeRO stages 1 to 3).
        tag: the name of the state; default: what `latest` says.
        batch_size: as for ``save_state``.
        with_scheduler: load the scheduler's state too.
        with_rng: go on with the random numbers that this rank had.
        config: our settings; default: from the environment.

    Raises:
        CheckpointError: on all ranks: `folder` has no such state, or it is not sound.
        ConfigError: on all ranks: the state is that of another optimizer, or of other groups.
        HfZeroStreamError: on all ranks, in the middle of reading: some values are new; load again.
    """
    finish_pending()
    folder = Path(folder)
    coordinator = Coordinator.of_default_group()
    with expected_at(LOAD):
        settings = StreamingConfig.resolve(config, {})
        training = training_of(trained, optimizer, scheduler, scaler, batch_size, coordinator)
        refuse_optimizer(training.optimizer)
        if is_adapted(training.model):
            adapters.refuse_unreachable(training)
        if not training.is_between_steps:
            raise UnsupportedError("load_state: gradients are being accumulated. Load after a step.")
    with coordinator.watched(LOAD), coordinator.reporting():
        finish_saves_into(folder, settings.read_from, coordinator)
        place, found = coordinator.broadcast(partial(_found, folder, tag))
        if isinstance(found, ZeroFolder) and is_adapted(training.model):
            raise UnsupportedError(
                f"{place}: a ZeRO checkpoint of adapters. Load it by engine.load_checkpoint, at that number of ranks."
            )
        record = coordinator.run_on_all(partial(_record_of, found, training, with_scheduler))
        coordinator.run_on_all(partial(refuse_other_training, training, record, place))
    with training.changing():
        make_entries(training.slots, [key for key in record.keys if key != MASTER])
        if isinstance(found, ZeroFolder):
            load_zero(training, found, settings, coordinator)
        elif is_adapted(training.model):
            _load_adapted(training, place, record.keys, settings, coordinator)
            training.copy_masters()
        else:
            _load_weights(training, folder, place, record, config)
            if keys := [key for key in record.keys if key != MASTER or swapped_masters(training)]:
                _load_keys(training, place, keys, settings, coordinator)
        rates = _set_rest(training, record)
        for number, recorded in enumerate(record.groups):  # after the scheduler, which may not set the learning rate
            of_group = [slot for slot in training.slots if slot.group == number]
            _set_group(training.optimizer, number, recorded, of_group)
            if rates is not None:
                _set_option(training.optimizer.param_groups[number], "lr", rates[number])
    if with_rng and isinstance(found, ZeroFolder):
        logger.warning_once(f"{place}: DeepSpeed saves no random numbers, so those of all ranks are new.")
    elif with_rng and not restore_rank(place / RNG_FILE, coordinator.rank):
        logger.warning_once(
            f"{place}: rank {coordinator.rank} was not there when the state was saved ({record.world_size} ranks), so "
            "its random numbers are new."
        )
    _say_what_follows(training, record, coordinator)
    return Resumed(place.name, restored(record.data), dict(record.counters), record.world_size)


def _found(folder: Path, tag: str | None) -> tuple[Path, StateRecord | ZeroFolder]:
    """The folder of the state, and what is in it."""
    if tag is None and is_zero_folder(folder):
        return folder, read_zero_folder(LocalFiles(), folder)
    if tag is None:
        try:
            tag = (folder / LATEST).read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{folder / LATEST}: expected the name of a training state; it cannot be read: {error}. Give a folder "
                "that save_state or DeepSpeed wrote, or a tag."
            ) from error
    if not tag or Path(tag).name != tag:
        raise CheckpointError(f"{folder / LATEST}: expected the name of a folder; found {tag!r}")
    place = folder / tag
    if not (place / FILE).exists() and is_zero_folder(place):
        return place, read_zero_folder(LocalFiles(), place)
    record = StateRecord.read(place / FILE)
    refuse_missing_files(place, record.keys)
    return place, record


def _record_of(found: StateRecord | ZeroFolder, training: Training, with_scheduler: bool) -> StateRecord:
    if isinstance(found, ZeroFolder):
        return record_of(found, training, with_scheduler)
    return found if with_scheduler else replace(found, scheduler=None)


def _load_weights(
    training: Training, folder: Path, place: Path, record: StateRecord, config: StreamingConfig | None
) -> None:
    """Masters in memory, and weights; from the weights' own files what has no master, or one in a swap file."""
    swapped = swapped_masters(training)
    is_apart = MASTER in record.keys
    in_memory = {name for group in record.groups for name in group.parameters if name not in swapped and is_apart}
    model = training.model
    if any(name not in in_memory for name, _ in model.named_parameters()) or _has_saved_buffers(model):
        load_some_into(training.live, str(folder), in_memory, config=config, with_masters=not swapped)
    if in_memory:
        load_some_into(
            training.live, str(place), swapped, config=config, strict=False, needed=in_memory, variant=MASTER
        )


def _has_saved_buffers(model: nn.Module) -> bool:
    return any(set(module._buffers) - module._non_persistent_buffers_set for module in model.modules())


@collector_paused()
def _load_keys(
    training: Training, place: Path, keys: Sequence[str], settings: StreamingConfig, coordinator: Coordinator
) -> None:
    """Load elementwise states, one after the other; what is laid out as the one before is read by its plan."""
    hides_zero3 = any(map(has_partition, training.model.parameters()))
    with coordinator.watched(LOAD), coordinator.reporting():
        planned: tuple[str, SlotMemory, Load] | None = None
        for key in keys:
            slots = [slot for slot in training.slots if key != MASTER or slot.is_swapped]
            destination = SlotMemory(
                slots, key, training.device, hides_zero3=hides_zero3, prepare=training.prepare_lazy
            )
            load = Load(settings, {}, coordinator, destination)
            with closing(load), torch.no_grad():
                if planned is not None and key != MASTER:
                    first, memory, of_first = planned
                    files = [shard_of_key(path, first, key) for path in of_first.files]
                    are_there = coordinator.broadcast(partial(_exist, files))
                    if are_there and load.place_like(of_first, memory.batches_of(key), files):
                        continue
                arguments = {"dtype": torch.float32, "config": copy.deepcopy(training.model.config), "variant": key}
                load.place(*lazily_loaded(str(place), load, type(training.model), is_quiet=True, **arguments))
                planned = planned if key == MASTER else (key, destination, load)


def _load_adapted(
    training: Training, place: Path, keys: Sequence[str], settings: StreamingConfig, coordinator: Coordinator
) -> None:
    """Load what is trained of a PEFT model, and its states."""
    with coordinator.watched(LOAD), coordinator.reporting():
        for key in keys:
            load = Load(settings, {}, coordinator, SlotMemory(training.slots, key, training.device, hides_zero3=False))
            with closing(load), torch.no_grad():
                load.place(adapters.opened_state(load, place, key), set(), set())


def _exist(files: Sequence[str]) -> bool:
    return all(map(os.path.exists, files))


def _set_group(optimizer: Any, number: int, recorded: GroupRecord, slots: Sequence[Slot]) -> None:
    group = optimizer.param_groups[number]
    for name, value in restored(recorded.options).items():
        if name not in group:
            continue
        _set_option(group, name, value)
    positions = {name: position for position, name in enumerate(recorded.parameters)}
    for slot in slots:
        for key, values in recorded.numbers.items():
            of_slot = [values[positions[it.name]] if isinstance(values, list) else values for it in slot.members]
            if any(value != of_slot[0] for value in of_slot):
                raise ConfigError(
                    f"group {number} of the optimizer: {key} differs between {slot.members[0].name} and others, which "
                    "are trained as one tensor now. Go on in the kind of training that saved the state."
                )
            if of_slot[0] is None:  # it had never been trained
                slot.entries.clear()
                break
            slot.entries[key] = _number_like(slot.entries.get(key), of_slot[0], optimizer, group, slot)


def _set_option(group: dict[str, Any], name: str, value: Any) -> None:
    if isinstance(group[name], torch.Tensor):
        group[name].fill_(value)
    else:
        group[name] = tuple(value) if isinstance(group[name], tuple) else value


def _number_like(old: Any, value: Any, optimizer: Any, group: Any, slot: Slot) -> Any:
    """`value` as the optimizer keeps such a number; a new tensor for each slot."""
    if isinstance(old, torch.Tensor):
        return torch.full_like(old, value)
    if old is not None or not type(optimizer).__module__.startswith("torch.optim"):
        return type(value)(value) if old is None else type(old)(value)
    on_device = group.get("capturable") or group.get("fused")
    return torch.tensor(float(value), dtype=torch.float32, device=slot.values.device if on_device else None)


def _set_rest(training: Training, record: StateRecord) -> list[float] | None:
    """Returns the learning rates of the groups, if they are not those that were saved."""
    rates = None
    if training.scheduler is not None and record.scheduler is not None:
        rates = schedules.restore(training.scheduler, record.scheduler, record.batch_size, training.batch_size)
    if training.scaler_state is not None and record.scaler is not None:
        training.set_scaler_state(restored(record.scaler))
    training.set_counters(record.counters)
    return rates


def _say_what_follows(training: Training, record: StateRecord, coordinator: Coordinator) -> None:
    if not coordinator.is_main or record.batch_size in (None, training.batch_size) or training.batch_size is None:
        return
    logger.warning(
        f"load_state: a step had {record.batch_size} samples on {record.world_size} ranks, and has "
        f"{training.batch_size} now. Steps that are skipped to come to the same place in the data are other samples: "
        "keep the global batch the same, or give save_state the position in the data."
    )
