"""States on hosts that the Trainer saves by a callback, and the files that it writes beside weights and optimizer."""

from __future__ import annotations

import os
import tempfile
from copy import deepcopy
from pathlib import Path
from typing import Any
from weakref import ref

import torch
from torch.optim.lr_scheduler import LRScheduler
from transformers import Trainer, TrainerCallback
from transformers import trainer as trainer_module
from transformers.trainer_callback import ExportableState
from transformers.utils import logging

from ...errors import UnsupportedError, require_names
from ...plugin_api import (
    CLIENT,
    LOAD,
    checkpoint_number,
    expected_at,
    is_fsdp2,
    meeting,
    note_steps,
    refuse_url,
    settings_in_force,
    trained_with,
    unwrapped,
)
from .choice import TrainingMark, as_facts, facts_of_model
from .load import newest_of_both
from .shared import SharedState, shared_state


logger = logging.get_logger(__name__)

require_names("transformers", Trainer, "_save_rng_state", "_save_scaler")


def last_checkpoint_in(folder: str) -> str | None:
    """The Trainer's last checkpoint in `folder`, inside ``streaming()`` without those whose save has died."""
    return trainer_module.get_last_checkpoint(folder) if os.path.isdir(folder) else None


def _refuse_unsharded(trainer: Any) -> None:
    if not trainer.is_deepspeed_enabled and not is_fsdp2(trainer.accelerator):
        raise UnsupportedError(
            "states on hosts: expected a Trainer under DeepSpeed or FSDP2; this one shards nothing. Leave them out."
        )


def trained_by(trainer: Any) -> tuple[Any, dict[str, Any]]:
    """What ``save_state`` is given of a Trainer: an engine, or a model and what trains it."""
    scheduler, batch_size = trained_with(trainer)
    if trainer.is_deepspeed_enabled:
        return trainer.model_wrapped, {"scheduler": scheduler}
    return trainer.model, {"optimizer": trainer.optimizer, "scheduler": scheduler, "batch_size": batch_size}


def write_small_files(trainer: Any, folder: Path) -> None:
    """Write what ``Trainer._save_checkpoint`` does beside weights and optimizer: this rank's files, into `folder`."""
    from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME

    trainer._save_rng_state(str(folder))
    trainer._save_scaler(str(folder))
    trainer.store_flos()
    if trainer.args.process_index != 0:
        return
    if not trainer.is_deepspeed_enabled or isinstance(trainer.lr_scheduler, LRScheduler):  # else it is the engine's
        torch.save(trainer.lr_scheduler.state_dict(), folder / SCHEDULER_NAME)
    state = deepcopy(trainer.state)  # stock adds to lists in it at each save
    for each in [*trainer.callback_handler.callbacks, trainer.control]:
        if isinstance(each, ExportableState):
            kept = state.stateful_callbacks.get(type(each).__name__)
            if isinstance(kept, list):
                kept.append(each.state())
            else:
                state.stateful_callbacks[type(each).__name__] = each.state()
    state.save_to_json(str(folder / TRAINER_STATE_NAME))


class SaveOnHosts(TrainerCallback):
    """Saves the training of a Trainer on the hosts; what is there goes at its end, when the result is saved.

    As the Trainer's own checkpoints, a state has what was logged and evaluated in its step.
    """

    def __init__(self, states: Any, trainer: Any, every: int) -> None:
        self.states, self.every, self._trainer = states, every, ref(trainer)
        self._awaited = ""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.every == 0:
            self._awaited = "evaluate" if control.should_evaluate else "log" if control.should_log else "nothing"
            self._save_after("nothing")

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._save_after("log")

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._save_after("evaluate")

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._save_after(self._awaited)  # what was awaited has not come: another callback has changed it

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = self._trainer()
        if trainer is not None and state.global_step >= state.max_steps:
            note_steps(trainer)
            trained, own = trained_by(trainer)
            self.states.note(trained, **own)
            self.states.remove_when_saved(or_weights=True)

    def _save_after(self, event: str) -> None:
        trainer = self._trainer()
        if not self._awaited or event != self._awaited or trainer is None:
            return
        self._awaited = ""
        note_steps(trainer)
        trained, own = trained_by(trainer)
        with tempfile.TemporaryDirectory() as folder:
            write_small_files(trainer, Path(folder))
            files = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
        asynchronous = settings_in_force().asynchronous_save
        self.states.save(trained, data={CLIENT: {}}, files=files, asynchronous=asynchronous, **own)


def attach(states: Any, trainer: Any, every: int) -> str | None:
    """Do what :meth:`.states.HostStates.attach` says."""
    with expected_at(LOAD):
        _refuse_unsharded(trainer)
        refuse_url(trainer.args.output_dir, "states on hosts beside a Trainer's output_dir")
        states.facts = _facts_of(trainer)
    trainer.remove_callback(SaveOnHosts)  # of an earlier call
    trainer.add_callback(SaveOnHosts(states, trainer, every))
    with meeting(LOAD) as coordinator:
        shared = coordinator.broadcast(lambda: last_checkpoint_in(trainer.args.output_dir))

        def look() -> SharedState:
            if shared is None:
                return SharedState()
            return SharedState(checkpoint_number(Path(shared).name) or 0, shared_state(Path(shared)).training)

        # Neither the Trainer nor we know the id of a training that has no optimizer yet.
        found, _ = newest_of_both(states.folder, coordinator, lambda: TrainingMark("", states.facts), look)
    return shared if found is None else str(states.folder / found.name)


_OPTIONS = (
    *("optim", "optim_args", "learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"),
    *("lr_scheduler_type", "seed", "data_seed"),
)
"""The arguments of a Trainer by which its training differs from that of another one, whatever machines it runs on."""


def _facts_of(trainer: Any) -> dict[str, Any]:
    """What tells the training of a Trainer from others before there is an optimizer."""
    options = {name: getattr(trainer.args, name, None) for name in _OPTIONS}
    own = {"output_dir": os.path.realpath(trainer.args.output_dir), "model": facts_of_model(unwrapped(trainer.model))}
    return as_facts({f"Trainer's {name}": getattr(value, "value", value) for name, value in (options | own).items()})


def is_last(checkpoint: Any, output_dir: str) -> bool:
    """Whether this is the Trainer's last checkpoint in `output_dir`, by whatever path."""
    last = last_checkpoint_in(output_dir)
    return last is not None and os.path.realpath(checkpoint) == os.path.realpath(last)
