"""The files that the Trainer writes into a checkpoint beside weights and optimizer; and what it trains."""

from __future__ import annotations

import os
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from transformers import Trainer
from transformers import trainer as trainer_module
from transformers.trainer_callback import ExportableState

from ...errors import UnsupportedError, require_names
from ...seams.wrappers import is_fsdp2


require_names("transformers", Trainer, "_save_rng_state", "_save_scaler")


def last_checkpoint_in(folder: str) -> str | None:
    """The Trainer's last checkpoint in `folder`, inside ``streaming()`` without those whose save has died."""
    return trainer_module.get_last_checkpoint(folder) if os.path.isdir(folder) else None


def trained_by(trainer: Any) -> tuple[Any, dict[str, Any]]:
    """What ``save_state`` is given of a Trainer: an engine, or a model and what trains it.

    Raises:
        UnsupportedError: it shards nothing.
    """
    scheduler = trainer.lr_scheduler if isinstance(trainer.lr_scheduler, LRScheduler) else None
    if trainer.is_deepspeed_enabled:
        return trainer.model_wrapped, {"scheduler": scheduler}
    if is_fsdp2(trainer.accelerator):
        args = trainer.args
        batch_size = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        return trainer.model, {"optimizer": trainer.optimizer, "scheduler": scheduler, "batch_size": batch_size}
    raise UnsupportedError("states on hosts: expected a Trainer under DeepSpeed or FSDP2; this one shards nothing.")


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
