"""The context of a hook: accelerate and the Trainer, while they save or load, know what the hook does not."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from transformers.utils import logging

from ..checkpoint.deepspeed_names import entries_of_deepspeed, remove_guard_files
from ..errors import CheckpointError, ConfigError, UnsupportedError
from ..ranks.coordinator import Coordinator, meeting
from ..ranks.rendezvous import LOAD, SAVE
from ..reports.save import SaveReport
from ..saving.arguments import refuse_url
from ..saving.mirrors import url_of
from ..saving.pending import PendingSave, finish_pending
from ..saving.publication import finish_interrupted, has_only_unfinished, mark_unfinished
from ..seams.ds_config import settings_in_force
from ..settings.log import NOTICE
from ..settings.scope import active_configs, set_in_context
from .foreign import write_guard_files
from .load import load_without_optimizer, place_of_state, resume
from .record import FILE, LATEST, write_latest
from .save import save_state
from .tensors import has_other_weights


logger = logging.get_logger(__name__)


@dataclass(eq=False)
class Caller:
    """One save or load of a whole training.

    Attributes:
        scheduler_of: the scheduler that belongs to an optimizer; None if the caller keeps that itself.
        place: the folder for the state of the model of a number, below the one that the caller gives.
        batch_size: samples in a step of all ranks; None if it is not known.
        is_between_steps: False in the middle of accumulating gradients.
        with_weights: False where the caller writes weights itself.
        waiting: the stock functions that save models of which the optimizer has not come yet, by number.
        restored: schedulers that a load has restored.
        loaded: models that a load has filled, with what trains them, by number.
    """

    scheduler_of: Callable[[Any], Any] = lambda optimizer: None
    place: Callable[[Path, int], Path] = lambda folder, number: folder
    batch_size: int | None = None
    is_between_steps: bool = True
    with_weights: bool = True
    waiting: dict[int, Callable[[], Any]] = field(default_factory=dict)
    restored: list[Any] = field(default_factory=list)
    loaded: set[int] = field(default_factory=set)


_caller: ContextVar[Caller | None] = ContextVar("hf_zero_stream_caller", default=None)

trainer_loads_schedulers: ContextVar[bool] = ContextVar("hf_zero_stream_trainer_loads_schedulers", default=False)
"""Whether a Trainer is running, which loads itself the schedulers that are not an engine's."""


def current() -> Caller | None:
    """The caller of the running hook."""
    return _caller.get()


@contextmanager
def entered(caller: Caller) -> Iterator[Caller]:
    """Inside, `caller` calls. Models whose optimizer never came are saved at the end, in the stock way."""
    with set_in_context(_caller, caller):
        yield caller
        while caller.waiting:
            caller.waiting.popitem()[1]()


def is_on() -> bool:
    """Whether trainings are saved by us: inside ``streaming()``, if its settings do not say otherwise."""
    return bool(active_configs()) and settings_in_force().training_state


def refuse_stocks(url: Any, what: str) -> None:
    """Raise an UrlError if what `what` saves to or loads from `url` is left to stock, by the settings."""
    if not is_on():
        refuse_url(url, f"{what}, with training_state=False,")


def state_in(folder: Path, tag: Any = None) -> tuple[Path, str] | None:
    """The folder of a state of ours that `folder` and `tag` mean, and its name there; None if it is none (all ranks).

    Raises:
        CheckpointError: on all ranks: the folder `tag` holds nothing but a save that has died.
    """
    with _meant(folder, tag) as (found, _):
        return found


@contextmanager
def _meant(folder: Path, tag: Any) -> Iterator[tuple[tuple[Path, str] | None, Coordinator]]:
    """What :func:`look_for_state` finds on rank 0, inside the meeting of a load (all ranks)."""
    finish_pending(raises=False)
    with meeting(LOAD) as coordinator:
        found = coordinator.broadcast(lambda: translated(look_for_state(folder, tag)))
        if found is None:
            yield None, coordinator
            return
        with place_of_state(found[0]) as place:
            yield (place, found[1]), coordinator


def translated(found: tuple[Path, Any] | None) -> tuple[Path | str, Any] | None:
    """What has been found in a mirror of a URL, as it is there."""
    return None if found is None else (url_of(found[0]) or found[0], found[1])


def look_for_state(folder: Path, tag: Any) -> tuple[Path, str] | None:
    """Look for what :func:`state_in` gives, on rank 0."""
    finish_interrupted(folder)
    name = name_in(folder, tag)
    if not name:
        return None
    finish_interrupted(folder / name)
    if entries_of_deepspeed(folder / name):  # newer than a state of ours there, which would have replaced them
        return None
    if (folder / name / FILE).exists():
        return folder, name
    inner = _latest(folder / name)
    if inner and (folder / name / inner / FILE).exists():
        return folder / name, inner
    if tag is not None and has_only_unfinished(folder / name):
        raise CheckpointError(
            f"{folder / name}: its save was interrupted, and nothing else is there. Load the checkpoint before it, "
            "and remove this one."
        )
    return None


def name_in(folder: Path, tag: Any) -> str:
    """The name of the checkpoint in `folder` that `tag` means, or the newest; "" if there is none."""
    return str(tag) if tag is not None else _latest(folder)


def load_if_ours(trained: Any, folder: Path, tag: Any, caller: Caller, optimizer: Any, scheduler: Any) -> bool:
    """Go on from the state of ours that `folder` and `tag` mean; returns False if it is none (all ranks).

    Random numbers stay: callers restore them at their own time.
    """
    with _meant(folder, tag) as (found, coordinator):
        if found is None:
            return False
        if not caller.is_between_steps:
            raise UnsupportedError("load_state: gradients are being accumulated. Load after a step.")
        own = {"optimizer": optimizer, "scheduler": scheduler, "batch_size": caller.batch_size}
        resume(trained, found[0], tag=found[1], with_rng=False, meeting=coordinator, **own)
    return True


def load_values_if_ours(model: Any, folder: Path, tag: Any) -> bool:
    """Give `model` the values of the state of ours that is meant; returns False if it is none (all ranks)."""
    with _meant(folder, tag) as (found, coordinator):
        if found is not None:
            load_without_optimizer(model, *found, coordinator)
    return found is not None


def save(
    trained: Any, folder: Path, leave: Callable[[Exception], None], **kwargs: Any
) -> SaveReport | PendingSave | None:
    """Save a state as the settings ask for (all ranks); None if we refuse to, which `leave` is told.

    If it fails in the background, the folder is marked: the caller writes beside it, and sees no error.
    """
    place = url_of(folder) or folder
    try:
        saved = save_state(trained, place, asynchronous=settings_in_force().asynchronous_save, **kwargs)
    except (ConfigError, UnsupportedError) as error:  # on all ranks, before anything is written
        if place is not folder:  # stock writes to no URL
            raise
        leave(error)
        return None
    if place is not folder:
        folder.mkdir(parents=True, exist_ok=True)  # for what is written beside
    if Coordinator.of_default_group().is_main:
        _say_whose()
        if isinstance(saved, PendingSave):
            saved.otherwise(partial(mark_unfinished, folder))
    return saved


@functools.cache  # once in a run
def _say_whose() -> None:
    logger.log(
        NOTICE,
        "The training states of this run are hf_zero_stream's, in place of DeepSpeed's or accelerate's: resume them "
        "inside streaming() or under `hf-zero-stream run`, at any number of ranks. training_state=False, or "
        "`hf-zero-stream run --stock-states`, leaves them to DeepSpeed and accelerate.",
    )


def name_state(folder: Path, tag: str, saved: SaveReport | PendingSave, has_zero: bool = False) -> None:
    """Say in `folder` that its newest state is the one in its folder `tag`, once that is `saved` (all ranks).

    `has_zero`: DeepSpeed's engine has saved it, with ZeRO.
    """

    def name() -> None:
        if has_zero:
            write_guard_files(folder, tag)
        write_latest(folder, tag)

    when_saved(saved, name)


def when_saved(saved: SaveReport | PendingSave, work: Callable[[], object]) -> None:
    """Do `work` on rank 0 once a state is `saved` (all ranks)."""
    coordinator = Coordinator.of_default_group()
    if isinstance(saved, PendingSave):
        if coordinator.is_main:
            saved.then(work)
        return
    with meeting(SAVE, "what lies beside a training state", coordinator):
        coordinator.run_on_main(work)


def has_weights_of_others(folder: Path) -> bool:
    """Whether a model's files are in `folder` that were not saved with the newest state of ours there (all ranks).

    They stay, and rank 0 says so.
    """
    finish_pending()
    with meeting(SAVE, "what is in the folder of a training state") as coordinator:
        found = coordinator.broadcast(lambda: has_other_weights(folder, _latest(folder)))
    if found and coordinator.is_main:
        logger.warning_once(
            f"{folder}: a model is there that was not saved with a training state. It stays as it is, and states are "
            "saved there without weights: a resume needs none."
        )
    return found


def forget_state(place: Path, folder: Path) -> None:
    """Have nobody find a state of ours in `place` any more, where accelerate has saved a newer one into `folder`.

    All ranks call it.
    """

    def forget() -> None:
        (place / LATEST).unlink(missing_ok=True)
        remove_guard_files(folder)

    with meeting(SAVE, "what is in the folder of a training state") as coordinator:
        coordinator.run_on_main(forget)


def forget_guard_files(place: Path) -> None:
    """Remove guard files (:mod:`..checkpoint.deepspeed_names`) from `place`, where DeepSpeed saves (all ranks)."""
    with meeting(SAVE, "what is in the folder of a training state") as coordinator:
        coordinator.run_on_main(partial(remove_guard_files, place))


def _latest(folder: Path) -> str:
    path = folder / LATEST
    return path.read_text(encoding="utf-8").strip() if path.is_file() else ""
