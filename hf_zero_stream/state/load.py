"""``load_state()``: go on with a training that :func:`.save.save_state` saved, at any number of ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from transformers.utils import logging

from ..bindings import history
from ..bindings.install import shortening
from ..checkpoint.digests import refuse_other_bytes
from ..checkpoint.format import excerpt
from ..checkpoint.urls import UrlPath, checkpoints_at
from ..errors import CheckpointError, ConfigError, UnsupportedError
from ..holdings.introspection import refuse_unknown_shards
from ..holdings.own_names import own_names, own_or_clean
from ..holdings.slots import Training
from ..loading.integration import finish_saves_into
from ..ranks.coordinator import Coordinator, expected_at
from ..ranks.coordinator import meeting as meeting_of_ranks
from ..ranks.rendezvous import LOAD
from ..registry import tool
from ..reports.closing import resuming, tell
from ..reports.text import bytes_text, count_text
from ..saving.beside import Beside, Kept
from ..saving.pending import operation
from ..seams.ds_config import settings_in_force
from ..seams.wrappers import unwrapped
from ..settings import scope
from ..sources.base import is_url
from ..sources.by_path import mounted_by_plugin
from . import schedules
from .base import has_base, refuse_other_base
from .foreign import ForeignState, foreign_state_in
from .forms import drop_options, refuse_lost, set_entries, set_group, set_option
from .plain import restored
from .record import FILE, LATEST, StateRecord, dtype_of, is_tag
from .refusals import refuse_missing_files, refuse_optimizer, refuse_other_training, training_of
from .rng import FILE as RNG_FILE
from .rng import read_ranks, restore_rank
from .values import load_model_values, load_values
from .wholes import groups_for, restore_strides, wholes_for


logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class Resumed:
    """The state that a training goes on from.

    Attributes:
        tag: the name of the state.
        data: what the user gave to ``save_state`` on this rank; on a rank that was not there, what rank 0 was given.
        counters: numbers of steps, samples, ...
        world_size: of the ranks that saved it.
        seconds: that it took on this rank to load it.
        bytes_read: from files, by this rank.
        anonymous_growth_peak: most anonymous host memory of this rank meanwhile, in bytes over what it was before.
    """

    tag: str
    data: Any
    counters: Mapping[str, int]
    world_size: int
    seconds: float = 0.0
    bytes_read: int = 0
    anonymous_growth_peak: int = 0

    def summary(self, rank: str = "this rank") -> str:
        """One line for people to read, with the figures of `rank`."""
        return (
            f"resumed {self.tag}, which {count_text(self.world_size, 'rank')} saved, in {self.seconds:.2f} s; {rank} "
            f"read {bytes_text(self.bytes_read)}, and its memory on the host grew by "
            f"{bytes_text(self.anonymous_growth_peak)}"
        )

    def __str__(self) -> str:
        return self.summary()


@shortening
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
    strict: bool = True,
    beside: Mapping[str, Kept] | None = None,
    hosts: bool = False,
) -> Resumed:
    """Go on from a training state, at any number of ranks and any ZeRO stage, and between ZeRO and FSDP2 (all ranks).

    Weights, masters, moments, steps, the options of each group, scheduler, loss scaler, counters and, for ranks that
    were there, random numbers become those that were saved. Every rank reads the bytes of its own shards.
    Settings are those of :class:`streaming` around the call.

    Args:
        trained, optimizer, scheduler, scaler: what is going to train, as for :func:`hf_zero_stream.save_state`; made
            as for a new training, of the same model.
        folder: what ``save_state`` wrote, or a URL that it wrote to, or DeepSpeed's ``engine.save_checkpoint`` (ZeRO
            stages 1 to 3).
        tag: the name of the state; default: what `latest` says.
        batch_size: as for ``save_state``.
        with_scheduler: load the scheduler's state too.
        with_rng: go on with the random numbers that this rank had.
        strict: raise if the state lacks anything that the model has, or has anything else. If false, what it lacks
            stays as it is. What the optimizer trains must be in the state in any case.
        beside: what is kept beside the model, as for ``save_state``: it gets the values that were saved, also where
            ranks hold other parts than then.
        hosts: `folder` is that of each host, as for ``save_state(hosts=True)``. The newest state of which these hosts
            have all pieces between them is taken, and a warning names newer ones.

    Raises:
        CheckpointError: on all ranks: `folder` has no such state, or it is not sound.
        ConfigError: on all ranks: the state is that of another optimizer, or of one that trained other parameters.
        HfZeroStreamError: on all ranks, in the middle of reading: some values are new; load again.
    """
    load = partial(
        resume,
        trained,
        optimizer=optimizer,
        scheduler=scheduler,
        scaler=scaler,
        tag=tag,
        batch_size=batch_size,
        with_scheduler=with_scheduler,
        with_rng=with_rng,
        strict=strict,
        beside=beside,
    )
    if not hosts:
        with place_of_state(folder) as place:
            return load(place)
    with operation(LOAD):
        newest_on_hosts = tool("newest_on_hosts", "hosts", "load_state(hosts=True)")
        training = training_of(trained, optimizer, scheduler, scaler, batch_size, Coordinator.of_default_group())
        with meeting_of_ranks(LOAD) as coordinator:
            return load(newest_on_hosts(Path(folder), coordinator, training), meeting=coordinator)


@contextmanager
def place_of_state(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """The folder; of a URL, what reads small files by the methods of a ``Path`` that are called for states."""
    if not is_url(folder):
        yield Path(folder)
        return
    with scope.inside():
        with expected_at(LOAD):
            known = checkpoints_at(folder)
            url = known.canonical(str(folder))
        with known.prefetching(url, ()):
            yield cast(Path, UrlPath(url))


def resume(trained: Any, folder: Path, *, meeting: Coordinator | None = None, **how: Any) -> Resumed:
    """Do what :func:`load_state` says; for `how` see :func:`_resumed`.

    `meeting` is the coordinator of a load's meeting that this is a part of.
    """
    with resuming() as figures, operation(LOAD, is_part=meeting is not None):
        resumed = _resumed(trained, folder, meeting or Coordinator.of_default_group(), **how)
    resumed = replace(resumed, **vars(figures))
    if Coordinator.of_default_group().is_main:
        fields = {name: value for name, value in vars(resumed).items() if name != "data"}
        tell("resume", f"{folder}: {resumed.summary('rank 0')}", lambda: {"folder": str(folder), **fields})
    return resumed


def _resumed(
    trained: Any,
    folder: Path,
    coordinator: Coordinator,
    *,
    optimizer: Any = None,
    scheduler: Any = None,
    scaler: Any = None,
    tag: str | None = None,
    batch_size: int | None = None,
    with_scheduler: bool = True,
    with_rng: bool = True,
    strict: bool = True,
    beside: Mapping[str, Kept] | None = None,
    all_as_rank_0: bool = False,
) -> Resumed:
    """Load the state.

    With `all_as_rank_0`, every rank goes on with what rank 0 had, where ranks had things of their own, but for data.
    """
    rank, read_from = 0 if all_as_rank_0 else coordinator.rank, settings_in_force().read_from
    training = training_of(trained, optimizer, scheduler, scaler, batch_size, coordinator)
    refuse_optimizer(training)
    if not training.is_between_steps:
        raise UnsupportedError("load_state: gradients are being accumulated. Load after a step.")
    with coordinator.watched(LOAD), mounted_by_plugin(folder, coordinator):
        with coordinator.reporting():
            if isinstance(folder, UrlPath):
                coordinator.run_on_all(partial(checkpoints_at(folder.url).catch_up, folder.url))
            on_disk, then = None if isinstance(folder, UrlPath) else folder, partial(_found, folder, tag, with_rng)
            place, found = finish_saves_into(on_disk, read_from, coordinator, then)
            names = own_names(training.model)
            found = found.renamed(partial(own_or_clean, names))
            record = coordinator.run_on_all(partial(_record_for, training, found, with_scheduler, place, rank))
            training = training.without_frozen(record.trained)
            _refuse_other_names(beside or {}, record, place)
            apart = Beside.of(training.model, beside or {}, record.keys, coordinator)
            if isinstance(found, StateRecord):
                _refuse_other_files(found, place, coordinator)
                if has_base(training.model, record):
                    refuse_other_base(training.model, record, place, coordinator)
                if with_rng:  # a file that other ranks need not see
                    random_numbers = coordinator.broadcast(partial(read_ranks, place / RNG_FILE))
        with training.replacing_state():
            groups, whole = groups_for(training, record, place), wholes_for(training, record)
            drop_options(training.optimizer, groups)
            set_entries(training.optimizer, training.slots, record.form_of, whole)
            foreign = None if isinstance(found, StateRecord) else found.states_for(training, coordinator)
            load_values(training, place, record, foreign, coordinator, beside=apart, rank=rank, strict=strict)
            rates = _set_rest(training, record)
            for number, recorded in enumerate(groups):  # after the scheduler, which may not set the rate
                set_group(training.optimizer, number, recorded, training.slots)
                if rates is not None:
                    set_option(training.optimizer.param_groups[number], "lr", rates[number])
            restore_strides(training, record)
            if isinstance(found, StateRecord):
                coordinator.run_on_all(partial(refuse_lost, training, record, whole, place))
                if with_rng:
                    restores = partial(restore_rank, place / RNG_FILE, random_numbers, coordinator.rank)
                    has_rank = coordinator.run_on_all(restores)
        history.set_id(training.optimizer, record.training)
    if with_rng and not isinstance(found, StateRecord):
        logger.warning_once(f"{place}: {found.writer} saves no random numbers, so those of all ranks are new.")
    elif with_rng and not has_rank:
        if coordinator.rank in (0, record.world_size):  # one of the ranks that are new says it for all
            logger.warning_once(
                f"{place}: {record.world_size} ranks saved this state, so the random numbers of rank "
                f"{coordinator.rank} and above are new."
            )
    if coordinator.is_main:
        _say_what_follows(training, record, place, coordinator.world_size, all_as_rank_0=all_as_rank_0)
        if isinstance(found, StateRecord):
            _say_what_is_not_there(training, found, with_scheduler, place)
            if left := [key for key in record.beside if key not in (beside or {})]:
                logger.warning(f"{place}: {', '.join(left)} is there too, beside the model; beside= would load it.")
    data = (found.for_rank(coordinator.rank) if isinstance(found, StateRecord) else record).data
    return Resumed(place.name, restored(data), dict(record.counters), record.world_size)


@operation(LOAD, is_part=True)
def load_without_optimizer(
    trained: Any,
    folder: Path,
    tag: str,
    coordinator: Coordinator,
    *,
    strict: bool = True,
    only_values: bool = True,
    scheduler: Any = None,
    with_scheduler: bool = True,
    all_as_rank_0: bool = False,
) -> Any:
    """Load the values of a state into a model or an engine (all ranks, in a meeting); returns its `data`.

    If not `strict`, what the state lacks stays as it is. Unless `only_values` are wanted, counters, loss scaler and,
    `with_scheduler`, the scheduler of an engine go on too.
    """
    place, model = folder / tag, unwrapped(trained)
    with coordinator.reporting():
        refuse_unknown_shards(trained, "training state")
        if isinstance(folder, UrlPath):
            coordinator.run_on_all(partial(checkpoints_at(folder.url).catch_up, folder.url))
        on_disk, then = None if isinstance(folder, UrlPath) else folder, partial(StateRecord.read, place / FILE)
        found = finish_saves_into(on_disk, settings_in_force().read_from, coordinator, then)
    rank = 0 if all_as_rank_0 else coordinator.rank
    record = found.renamed(partial(own_or_clean, own_names(model))).for_rank(rank)
    _refuse_other_files(found, place, coordinator)
    if has_base(model, record):
        refuse_other_base(model, record, place, coordinator)
    load_model_values(model, place, record, coordinator, rank=rank, strict=strict)
    if not only_values and trained.optimizer is not None:
        training = training_of(trained, None, scheduler, None, None, coordinator)
        _set_rest(training, record if with_scheduler else replace(record, scheduler=None))
    return restored(found.for_rank(coordinator.rank).data)


def _refuse_other_files(record: StateRecord, place: Path, coordinator: Coordinator) -> None:
    """Raise a CheckpointError if `verify` asks for all values, and a file is not as it was saved (all ranks).

    Behind a URL nothing is compared: all would have to be sent twice.
    """
    config = settings_in_force()
    if config.verify == "full" and not isinstance(place, UrlPath):
        refuse_other_bytes(record.digests, place, config, coordinator)


def _refuse_other_names(beside: Mapping[str, Kept], record: StateRecord, place: Path) -> None:
    if lacking := [key for key in beside if key not in record.beside]:
        raise ConfigError(
            f"{place}: beside: expected {', '.join(record.beside) or 'nothing'}, as was saved beside the model; got "
            f"{', '.join(lacking)}. Leave out what is not there, and begin it anew."
        )


def _found(folder: Path, tag: str | None, with_rng: bool) -> tuple[Path, StateRecord | ForeignState]:
    """The folder of the state, and what is in it."""
    if tag is None and (foreign := _foreign_state_in(folder)) is not None:
        return folder, foreign
    if tag is None:
        try:
            tag = (folder / LATEST).read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{folder / LATEST}: expected the name of a training state; it cannot be read: {error}. Give a folder "
                "that save_state or DeepSpeed wrote, or a tag."
            ) from error
    if not is_tag(tag):
        raise CheckpointError(f"{folder / LATEST}: expected the name of a folder; found {excerpt(tag)}")
    place = folder / tag
    if (foreign := _foreign_state_in(place)) is not None:  # newer than a state of ours there
        return place, foreign
    record = StateRecord.read(place / FILE)
    refuse_missing_files(place, [RNG_FILE] if with_rng else [])
    return place, record


def _foreign_state_in(folder: Path) -> ForeignState | None:
    """Read another library's state in a folder; behind a URL nothing is listed, and none is found."""
    return None if isinstance(folder, UrlPath) else foreign_state_in(folder)


def _record_for(
    training: Training, found: StateRecord | ForeignState, with_scheduler: bool, place: Path, rank: int
) -> StateRecord:
    """The record of what was `found`, which can go on in `training` as that of `rank`."""
    if isinstance(found, StateRecord):
        record = found.for_rank(rank)
        record = record if with_scheduler else replace(record, scheduler=None)
    else:
        record = found.record_for(training, with_scheduler)
    refuse_other_training(training, record, place)
    return record


def _set_rest(training: Training, record: StateRecord) -> list[float] | None:
    """Returns the learning rates of the groups, if they are not those that were saved."""
    rates = None
    if training.scheduler is not None and record.scheduler is not None:
        rates = schedules.restore(training.scheduler, record.scheduler, record.batch_size, training.batch_size)
    if _is_same_scaler(training, record):
        training.set_scaler_state(restored(record.scaler))
    training.set_counters(record.counters)
    return rates


def _is_same_scaler(training: Training, record: StateRecord) -> bool:
    """Whether the loss scaler keeps what the saved one kept: one that is switched off, or static, keeps less."""
    mine, saved = training.scaler_state, record.scaler
    return mine is not None and saved is not None and mine.keys() == saved.keys()


def _say_what_follows(
    training: Training, record: StateRecord, place: Path, world_size: int, *, all_as_rank_0: bool
) -> None:
    is_other = world_size != record.world_size
    apart = [name for name in record.of_ranks if name != "data" or is_other]
    apart += [f"the buffer {name}" for name in record.buffers]
    if apart and (is_other or all_as_rank_0):
        what = (
            "Each rank gets those of its number, a new one rank 0's. Gather before you save what has to be shared out."
        )
        if all_as_rank_0:
            what = "All get rank 0's, as from DeepSpeed's own checkpoints at ZeRO stages 0 to 2; data are each rank's."
        logger.warning(
            f"{place}: {record.world_size} ranks saved different values of {', '.join(apart[:8])} ({len(apart)} in "
            f"all), and there are {world_size} now. {what}"
        )
    if record.batch_size not in (None, training.batch_size) and training.batch_size is not None:
        logger.warning(
            f"load_state: a step had {record.batch_size} samples on {record.world_size} ranks, and has "
            f"{training.batch_size} now. Steps that are skipped to come to the same place in the data are other "
            "samples: keep the global batch the same, or give save_state the position in the data."
        )
    mine = dtype_of(training.slots)
    if record.dtype == "float32" and mine in ("bfloat16", "float16"):
        logger.warning(
            f"{place}: values and moments that were trained in float32 are rounded to {mine}, in which they are "
            "trained now."
        )


def _say_what_is_not_there(training: Training, record: StateRecord, with_scheduler: bool, place: Path) -> None:
    """Warn of schedulers and scalers that were not saved, or are not given now: they would begin anew in silence."""
    if with_scheduler and (record.scheduler is None) != (training.scheduler is None):
        logger.warning(
            f"{place}: the state of a scheduler is in it, and no scheduler was given to load it into."
            if training.scheduler is None
            else f"{place}: no scheduler was saved; the present one stays where it is."
        )
    mine = training.scaler_state or {}
    if mine.get("dynamic", mine) and not _is_same_scaler(training, record):  # a static scale is a setting
        logger.warning(f"{place}: no such loss scaler was saved; the present one stays as it is.")
