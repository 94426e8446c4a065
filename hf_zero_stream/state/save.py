"""``save_state()``: weights, and everything else that training needs to go on, by all ranks; nothing is gathered.

The folder is a checkpoint for ``from_pretrained``, as ``save_pretrained`` writes it, with two more entries::

    latest                                  the name of the folder below, in one line
    global_step12/training_state.json       see record.py
    global_step12/model.fp32-*.safetensors, model.exp_avg-*.safetensors, ...
    global_step12/rng.safetensors

States have the names, shapes and shards that the weights have. `latest` gets its new content last. Until then a resume
finds the state that was there before.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..checkpoint.safetensors import NotedShard
from ..destinations.slots import elementwise_keys, holdings_of
from ..destinations.training import STEPS, Training
from ..errors import ConfigError, UnsupportedError
from ..ranks.coordinator import Coordinator, expected_at
from ..ranks.rendezvous import SAVE
from ..reports.save import SaveReport
from ..saving.planned import Alike
from ..saving.save import Save
from ..seams.saving import index_name, lay_out_pretrained
from . import schedules
from .record import FILE, LATEST, GroupRecord, StateRecord, numbers_of, plain, shard_of_key, write_latest
from .refusals import refuse_optimizer
from .rng import FILE as RNG_FILE
from .rng import RandomStates
from .trained import training_of


__all__ = ["save_state"]


def save_state(
    trained: Any,
    folder: str | os.PathLike[str],
    *,
    optimizer: Any = None,
    scheduler: Any = None,
    scaler: Any = None,
    tag: str | None = None,
    data: Any = None,
    batch_size: int | None = None,
    with_weights: bool = True,
    **kwargs: Any,
) -> SaveReport:
    """Save the weights and the training state of a model, such that any number of ranks can go on (all ranks).

    Every rank writes the bytes that it holds. Nothing is pickled.

    Args:
        trained: a DeepSpeed engine, at any ZeRO stage; or a transformers model, whole or sharded by DTensor (FSDP2,
            tensor parallelism), which `optimizer` trains.
        folder: where to save. `latest` there names the newest state; older ones stay.
        optimizer, scheduler, scaler: what trains a model that is not in an engine; an engine has its own.
        tag: the name of the state's folder; default: ``global_step`` and the number of steps.
        data: anything that JSON can hold and that you will need, such as the position in the data.
        batch_size: samples in a step of all ranks, of a model that is not in an engine; needed to go on with another
            number of ranks in a scheduler that accelerate steps once for each rank.
        with_weights: save the weights too; False if `folder` has those of this very step already.
        kwargs: as for :func:`hf_zero_stream.save_pretrained`: ``write_from``, ``max_shard_size``, ``verify``, ...

    Returns:
        What every rank did when it saved the weights, or without them the states.

    Raises:
        UnsupportedError: the optimizer's state is not elementwise, or gradients are being accumulated.
        SaveError: on all ranks, if a file cannot be written on any.

    Example:
        >>> hf_zero_stream.save_state(engine, "checkpoints", data={"epoch": 3, "batch": 1200})
    """
    folder = Path(folder)
    coordinator = Coordinator.of_default_group()
    with expected_at(SAVE):
        training = training_of(trained, optimizer, scheduler, scaler, batch_size, coordinator)
        refuse_optimizer(training.optimizer)
        if not training.is_between_steps:
            raise UnsupportedError(
                "save_state: gradients are being accumulated, and they are not part of the state. Save after a step."
            )
        keys = elementwise_keys(training.slots)
        record = _record(training, keys, plain(data, "data"), coordinator.world_size)
        tag = tag or f"global_step{training.counters[STEPS]}"
        if Path(tag).name != tag:
            raise ConfigError(f"tag: expected the name of a folder; got {tag!r}")
    with coordinator.watched(SAVE), coordinator.reporting():
        place = folder / coordinator.broadcast(partial(_free_name, folder, tag))
    report = _save_states(training, place, keys, kwargs)
    with coordinator.watched(SAVE), coordinator.reporting():
        states = RandomStates.gathered(coordinator)
        coordinator.run_on_main(partial(_write_record, place, record, states))
        if not with_weights:
            coordinator.run_on_main(partial(write_latest, folder, place.name))
            return report
    return _save_weights(training, folder, place.name, coordinator, kwargs)


def _save_states(training: Training, place: Path, keys: Sequence[str], kwargs: Mapping[str, Any]) -> SaveReport:
    if not keys:
        return SaveReport(folder=str(place), files=(), ranks=(), verified=False, materialised={})
    first, *others = (
        Alike(
            partial(holdings_of, training.slots, key),
            partial(_lay_out_state, training.model, key, kwargs),
            index_name(key),
            partial(shard_of_key, first=keys[0], key=key),
        )
        for key in keys
    )
    return Save(training.model, place, held=first.held, **kwargs).run(first.lay_out, first.index_name, others)


def _record(training: Training, keys: list[str], data: Any, world_size: int) -> StateRecord:
    groups = []
    for number, group in enumerate(training.optimizer.param_groups):
        slots = [slot for slot in training.slots if slot.group == number]
        options = {name: value for name, value in group.items() if name not in ("params", "param_names")}
        members = [member for slot in slots for member in slot.members]
        names, shapes = [member.name for member in members], [list(member.box.shape) for member in members]
        groups.append(
            GroupRecord(plain(options, f"group {number} of the optimizer"), names, numbers_of(slots), shapes)
        )
    scheduler = training.scheduler
    return StateRecord(
        optimizer=type(training.optimizer).__name__,
        keys=keys,
        groups=groups,
        scheduler=None if scheduler is None else schedules.recorded(scheduler),
        scaler=None if training.scaler_state is None else plain(training.scaler_state, "loss scaler"),
        counters=dict(training.counters),
        world_size=world_size,
        batch_size=training.batch_size,
        data=data,
    )


def _free_name(folder: Path, tag: str) -> str:
    """`tag`, or that with a number if a state has this name: it must stay complete until there is another."""
    names = [tag, *(f"{tag}.{number}" for number in range(1, 1000))]
    for name in names:
        if not (folder / name / FILE).exists():
            shutil.rmtree(folder / name, ignore_errors=True)  # an incomplete one
            return name
    raise ConfigError(f"{folder / tag}: there are a thousand states of this name")


def _lay_out_state(model: Any, key: str, kwargs: Mapping[str, Any], folder: Path, parameters: Any) -> list[NotedShard]:
    entries = parameters.entries()
    noted = lay_out_pretrained(
        model,
        folder,
        dict(entries),
        entries,
        parameters.numel,
        None,
        own_code=False,
        variant=key,
        max_shard_size=kwargs.get("max_shard_size", "5GB"),
    )
    for path in folder.iterdir():  # the config, which is beside the weights
        if path.name != index_name(key):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return noted


def _write_record(place: Path, record: StateRecord, states: RandomStates) -> None:
    place.mkdir(parents=True, exist_ok=True)  # of an optimizer without elementwise states
    states.write(place / RNG_FILE)
    draft = place / f"{FILE}.draft"
    draft.write_text(record.to_json(), encoding="utf-8")
    with open(draft, "rb") as file:
        os.fsync(file.fileno())
    os.replace(draft, place / FILE)


def _save_weights(
    training: Training, folder: Path, tag: str, coordinator: Coordinator, kwargs: Mapping[str, Any]
) -> SaveReport:
    """Save the weights, and with them the name of the state that they belong to."""
    save = Save(training.model, folder, **kwargs)
    lay_out: Callable[..., list[NotedShard]] = save.lay_out_pretrained

    def with_name(temporary: Path, parameters: Any) -> list[NotedShard]:
        noted = lay_out(temporary, parameters)
        (temporary / LATEST).write_text(tag, encoding="utf-8")
        return noted

    return save.run(with_name, index_name(kwargs.get("variant")))
