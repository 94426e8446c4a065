"""The ways of accelerate and the Trainer to save and resume a training, inside ``streaming()``.

Under DeepSpeed accelerate and the Trainer call the engine (see :mod:`.engine_hooks`), under FSDP2 functions of
accelerate's, which are replaced at the end of this file. The beginning is what neither can know: which scheduler
belongs to the training, and whether the weights are saved already.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from transformers.utils import logging

from ..bindings import history
from ..bindings.install import override_methods
from ..errors import UnsupportedError
from ..holdings.introspection import is_adapted
from ..ranks.coordinator import expected_at
from ..ranks.rendezvous import LOAD
from ..registry import tool
from ..saving.mirrors import fetched, mirrored, url_of
from ..saving.pending import after_pending, finish_pending, notes_for_later
from ..saving.publication import is_unfinished
from ..seams.ds_config import settings_in_force
from ..seams.wrappers import (
    batch_size_of,
    checkpoint_number,
    is_fsdp2,
    note_trainer,
    optimizers_of,
    scheduler_of,
    scheduler_state_in,
    schedulers_of,
    trainer_state_in,
    unwrapped,
    unwrapped_optimizer,
    without_restored_schedulers,
)
from ..settings.config import announced_local_rank
from ..settings.scope import active_configs, set_in_context
from ..sources.base import is_url
from . import trainers_at_urls
from .callers import (
    Caller,
    current,
    entered,
    forget_state,
    is_on,
    load_if_ours,
    load_values_if_ours,
    refuse_stocks,
    save,
    state_in,
    trainer_loads_schedulers,
    when_saved,
)
from .foreign import leave_to, write_guard_files


logger = logging.get_logger(__name__)


# ------------------------------------------------------------------------------------------------------ accelerate


def _of_accelerator(accelerator: Any) -> Caller:
    def place(folder: Path, number: int) -> Path:
        return folder / (f"pytorch_model_{number}" if number else "pytorch_model")  # as under DeepSpeed

    mine = partial(scheduler_of, schedulers_of(accelerator))
    is_between_steps = bool(accelerator.sync_gradients)
    return Caller(mine, place, batch_size=batch_size_of(accelerator), is_between_steps=is_between_steps)


def save_state_of_accelerator(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    if not active_configs():
        return original(self, *args, **kwargs)
    if is_url(url := args[0] if args else kwargs.pop("output_dir", None)):
        refuse_stocks(url, "accelerator.save_state")
        with mirrored(url) as folder:
            save_state_of_accelerator(original, self, str(folder), *args[1:], **kwargs)
        return url
    if not args:
        args = (url,)
    if settings_in_force().host_states_every and not trainer_loads_schedulers.get() and self.is_main_process:
        logger.warning_once(
            "host_states_every: accelerator.save_state saves nothing on hosts, because the script alone knows its "
            "place in the data at each step. Call HostStates.save(engine or model, data=...) in its loop."
        )
    finish_pending()  # before accelerate removes older checkpoints
    with entered(_of_accelerator(self)):
        return original(self, *args, **kwargs)


def load_state_of_accelerator(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    if not active_configs():
        return original(self, *args, **kwargs)
    if is_url(url := args[0] if args else kwargs.get("input_dir")):
        kwargs.pop("input_dir", None)
        with fetched(str(url)) as folder:
            return load_state_of_accelerator(original, self, str(folder), *args[1:], **kwargs)
    finish_pending(raises=False)
    with entered(_of_accelerator(self)) as caller, without_restored_schedulers(self, caller.restored):
        return original(self, *args, **kwargs)


# ------------------------------------------------------------------------------------------------------ the Trainer


def trainer_train(
    original: Callable[..., Any], self: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """``Trainer.train``; after it, no save is under way."""
    if not active_configs():
        return original(self, resume_from_checkpoint, *args, **kwargs)
    finish_pending(raises=False)
    note_trainer(self)
    if (settings := settings_in_force()).host_states_every:
        with expected_at(LOAD):
            checkpoint_by_settings = tool("checkpoint_by_settings", "hosts", "the setting host_states_every")
        resume_from_checkpoint = checkpoint_by_settings(self, resume_from_checkpoint, settings)
    if resume_from_checkpoint is True:
        find = trainers_at_urls.newest if is_url(self.args.output_dir) else _last_checkpoint
        resume_from_checkpoint = find(self.args.output_dir)
    with set_in_context(trainer_loads_schedulers, True), ExitStack() as stack:
        if is_url(resume_from_checkpoint):
            resume_from_checkpoint = trainers_at_urls.fetched_checkpoint(resume_from_checkpoint, stack)
        result = original(self, resume_from_checkpoint, *args, **kwargs)
        self.state.best_model_checkpoint = url_of(best := self.state.best_model_checkpoint) or best
    finish_pending()
    return result


def trainer_save(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """``Trainer._save_checkpoint``: saves the model, then the rest; uploads the folder, and removes older ones."""
    if active_configs() and is_url(self.args.output_dir) and url_of(self._get_output_dir(None)) is None:
        refuse_stocks(self.args.output_dir, "the Trainer")
        return trainers_at_urls.save(partial(trainer_save, original, self, *args, **kwargs), self)
    if not is_on():
        return original(self, *args, **kwargs)
    finish_pending()
    push, rotate = self._push_from_checkpoint, getattr(self, "_rotate_checkpoints", original)  # the latter before 5.2

    def push_complete(folder: Any) -> None:
        finish_pending()
        push(folder)

    own = {"_push_from_checkpoint": push_complete, "_rotate_checkpoints": partial(rotate_checkpoints, rotate)}
    with override_methods(self, **own):
        result = original(self, *args, **kwargs)
    if self.args.save_total_limit == 1 and self.args.metric_for_best_model is not None:
        finish_pending()  # at the end of such a training the Trainer removes the last checkpoint, or the one before
    return result


def trainer_save_rest(original: Callable[..., Any], self: Any, output_dir: Any) -> None:
    """``Trainer._save_optimizer_and_scheduler``."""
    if not is_on():
        original(self, output_dir)
        return
    caller = _of_trainer(self)
    caller.with_weights = False  # the Trainer has saved them
    note_steps(self)
    if not is_fsdp2(self.accelerator):
        with entered(caller):
            original(self, output_dir)
    elif save_trained(self.model, self.optimizer, Path(output_dir), 0, caller):
        if self.args.should_save:  # as stock does beside the optimizer
            torch.save(self.lr_scheduler.state_dict(), scheduler_state_in(Path(output_dir)))
    else:
        original(self, output_dir)
        forget_state(Path(output_dir), Path(output_dir))


def note_steps(trainer: Any) -> None:
    """Have the optimizer of a Trainer know how many steps that has counted; an engine counts its own."""
    if not trainer.is_deepspeed_enabled:
        optimizer = unwrapped_optimizer(trainer.optimizer)
        history.set_steps(optimizer, max(history.steps_of(optimizer), trainer.state.global_step))


def _of_trainer(trainer: Any) -> Caller:
    scheduler, batch_size = trained_with(trainer)
    return Caller(scheduler_of=lambda optimizer: scheduler, batch_size=batch_size)


def trained_with(trainer: Any) -> tuple[Any, int]:
    """The scheduler of a Trainer, None if a DeepSpeed config has it; and samples in a step of all ranks."""
    args = trainer.args
    scheduler = trainer.lr_scheduler if isinstance(trainer.lr_scheduler, LRScheduler) else None
    return scheduler, args.train_batch_size * args.gradient_accumulation_steps * args.world_size


def trainer_load_model(original: Callable[..., Any], self: Any, resume_from_checkpoint: Any, model: Any = None) -> Any:
    """``Trainer._load_from_checkpoint``; under FSDP2 the optimizer is there by now, and is loaded with the model."""
    if not is_fsdp2(self.accelerator):
        # The Trainer refuses the names of guard files without FSDP; and all comes with the optimizer.
        is_ours = active_configs() and state_in(Path(resume_from_checkpoint)) is not None
        return None if is_ours else original(self, resume_from_checkpoint, model)
    if model is None or not _load_all(self, model, resume_from_checkpoint):
        return original(self, resume_from_checkpoint, model)
    self._hf_zero_stream_resumed = resume_from_checkpoint
    return None


def trainer_load_rest(original: Callable[..., Any], self: Any, checkpoint: Any) -> Any:
    """``Trainer._load_optimizer_and_scheduler``, which the Trainer calls next."""
    resumed = vars(self).pop("_hf_zero_stream_resumed", None)
    if resumed is not None and resumed == checkpoint:
        return None
    # Else it is a model that FSDP2 does not shard.
    if self.is_deepspeed_enabled or not _load_all(self, self.model, checkpoint):
        return original(self, checkpoint)
    return None


def _load_all(trainer: Any, model: Any, checkpoint: Any) -> bool:
    """Load all but the random numbers, which the Trainer restores after the data were shuffled; False: not ours."""
    if checkpoint is None or not active_configs():
        return False
    return load_if_ours(model, Path(checkpoint), None, _of_trainer(trainer), trainer.optimizer, trainer.lr_scheduler)


def trainer_load_best(original: Callable[..., Any], self: Any) -> Any:
    """``Trainer._load_best_model``; under DeepSpeed it ends in the engine's function."""
    finish_pending(raises=False)  # also before the Trainer looks what is in the folder
    best = self.state.best_model_checkpoint
    if active_configs() and is_url(best):
        with fetched(best) as folder:
            self.state.best_model_checkpoint = str(folder)
            try:
                return trainer_load_best(original, self)
            finally:
                self.state.best_model_checkpoint = best
    if best is None or not active_configs() or not is_fsdp2(self.accelerator):
        return original(self)
    if is_adapted(unwrapped(self.model)):
        return None if _load_all(self, self.model, best) else original(self)
    return None if load_values_if_ours(self.model, Path(best), None) else original(self)


def rotate_checkpoints(original: Callable[..., Any], *args: Any, output_dir: Any, **kwargs: Any) -> None:
    """Older checkpoints go when the newest one is complete, and stay if it fails.

    They also stay beside one of a later step whose save has failed or died: it would count as one of those to keep.
    """

    def rotate() -> None:
        later = [path for path in _checkpoints_in(output_dir)[-1:] if not _is_complete(path)]
        if not later:
            original(*args, output_dir=output_dir, **kwargs)
            return
        logger.warning(f"{later[0]}: its save was interrupted or has failed; until it is whole, none is removed.")

    if url_of(output_dir) is None:  # what is there is removed by :mod:`.trainers_at_urls`
        after_pending(rotate)


def _checkpoints_in(output_dir: Any) -> list[Path]:
    """The folders of a Trainer's checkpoints, in the order of their steps."""
    folders = [path for path in Path(output_dir).iterdir() if path.is_dir()]
    numbers = sorted((number, path) for path in folders if (number := checkpoint_number(path.name)) is not None)
    return [path for _, path in numbers]


def _last_checkpoint(output_dir: Any) -> str:
    """The checkpoint that ``resume_from_checkpoint=True`` means: the newest whose save has neither died nor failed."""
    checkpoints = _checkpoints_in(output_dir)
    complete = [path for path in checkpoints if _is_complete(path)]
    if not complete:
        raise ValueError(f"No valid checkpoint found in output directory ({output_dir})")  # transformers' words
    if complete[-1] != checkpoints[-1] and announced_local_rank() == 0:
        logger.warning(
            f"{checkpoints[-1]}: its save was interrupted or has failed; the checkpoint before it is taken."
        )
    return str(complete[-1])


def _is_complete(checkpoint: Path) -> bool:
    """Whether the Trainer has written all of a checkpoint, and the last file whole."""
    try:
        json.loads(trainer_state_in(checkpoint).read_bytes())
    except (OSError, ValueError):
        return False
    return not is_unfinished(checkpoint)


def save_fsdp_model(
    original: Callable[..., Any],
    plugin: Any,
    accelerator: Any,
    model: Any,
    folder: Any,
    number: int = 0,
    *args: Any,
    **kwargs: Any,
) -> Any:
    save_model = partial(original, plugin, accelerator, model, folder, number, *args, **kwargs)
    caller = current()
    if caller is None or not is_on() or not is_fsdp2(accelerator) or number >= len(optimizers_of(accelerator)):
        return save_model()
    caller.waiting[number] = save_model
    return None


def save_fsdp_optimizer(
    original: Callable[..., Any],
    plugin: Any,
    accelerator: Any,
    optimizer: Any,
    model: Any,
    folder: Any,
    number: int = 0,
    *args: Any,
    **kwargs: Any,
) -> Any:
    caller = current()
    save_model = None if caller is None else caller.waiting.pop(number, None)
    if caller is not None and save_model is not None:
        if save_trained(model, optimizer, Path(folder), number, caller):
            return None
        save_model()
    saved = original(plugin, accelerator, optimizer, model, folder, number, *args, **kwargs)
    if active_configs():
        forget_state((caller or Caller()).place(Path(folder), number), Path(folder))
    return saved


def save_trained(model: Any, optimizer: Any, folder: Path, number: int, caller: Caller) -> bool:
    """Save a model, by its `number`, and its optimizer into `folder`; false if accelerate is to do so (all ranks)."""
    place = caller.place(folder, number)
    leave, saved = partial(leave_to, "accelerate", optimizer=unwrapped_optimizer(optimizer)), None
    if caller.is_between_steps:
        own = {"scheduler": caller.scheduler_of(optimizer), "batch_size": caller.batch_size, "keep_older": False}
        own["with_weights"] = caller.with_weights
        with notes_for_later() as note:
            saved = save(model, place, leave, optimizer=optimizer, **own)
    else:
        leave(UnsupportedError("gradients are being accumulated, and they are not part of a state of ours."))
    if saved is not None:
        when_saved(saved, partial(write_guard_files, folder, number))
        note(saved)
    return saved is not None


def load_fsdp_model(
    original: Callable[..., Any],
    plugin: Any,
    accelerator: Any,
    model: Any,
    folder: Any,
    number: int = 0,
    *args: Any,
    **kwargs: Any,
) -> Any:
    caller, is_ours = current(), False
    if caller is not None and active_configs() and is_fsdp2(accelerator):
        place, optimizers = caller.place(Path(folder), number), optimizers_of(accelerator)
        if number >= len(optimizers):
            is_ours = load_values_if_ours(model, place.parent, place.name)
        else:
            optimizer, scheduler = optimizers[number], caller.scheduler_of(optimizers[number])
            is_ours = load_if_ours(model, place.parent, place.name, caller, optimizer, scheduler)
            if is_ours:
                caller.restored.append(scheduler)
                caller.loaded.add(number)
    return None if is_ours else original(plugin, accelerator, model, folder, number, *args, **kwargs)


def load_fsdp_optimizer(
    original: Callable[..., Any],
    plugin: Any,
    accelerator: Any,
    optimizer: Any,
    model: Any,
    folder: Any,
    number: int = 0,
    *args: Any,
    **kwargs: Any,
) -> Any:
    caller = current()
    if caller is not None and number in caller.loaded:  # with the model
        return None
    return original(plugin, accelerator, optimizer, model, folder, number, *args, **kwargs)
