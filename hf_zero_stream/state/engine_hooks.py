"""What ``engine.save_checkpoint`` and ``engine.load_checkpoint`` of DeepSpeed become inside ``streaming()``.

A folder that DeepSpeed wrote is loaded by DeepSpeed, but for one of another number of ranks or another kind of stage,
which it cannot load. A training that we refuse is saved by it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers.utils import logging

from ..bindings.install import is_defined_by, replaced_methods
from ..errors import ConfigError, UnsupportedError
from ..holdings.model_parallel import is_model_parallel, unknown_shards_reason
from ..ranks.coordinator import Coordinator
from ..settings.scope import active_configs
from .callers import (
    Caller,
    current,
    forget_guard_files,
    has_other_weights,
    in_background,
    is_on,
    name_state,
    of_parts_in,
    other_zero_in,
    state_in,
)
from .elsewhere import refuse_lost_elsewhere
from .load import load_state, load_without_optimizer
from .record import CLIENT
from .save import save_state


logger = logging.get_logger(__name__)


def say_refused(error: Exception, whose: str) -> None:
    """Say once, on rank 0, why a training is not saved by us."""
    if Coordinator.of_default_group().is_main:
        logger.warning_once(f"This training is saved by {whose}, in its own format: {error}")


def save_checkpoint(
    original: Callable[..., Any],
    self: Any,
    save_dir: Any,
    tag: Any = None,
    client_state: Any = None,
    save_latest: bool = True,
    exclude_frozen_parameters: bool = False,
) -> Any:
    if save_dir and is_on() and save_latest and not _is_node_local(self) and not _is_replaced(self, original):
        from ..holdings.deepspeed.engine_training import validate_tag  # there is an engine: DeepSpeed is imported

        by_script, caller = current() is None, current() or Caller()
        tag = (caller.apart or None) if tag is None else str(tag)
        validate_tag(self, tag or f"global_step{self.global_steps}")
        # A model that somebody has saved into the folder stays there: DeepSpeed writes no such files.
        if by_script and tag is None and has_other_weights(Path(save_dir)):
            tag = f"global_step{self.global_steps}"
        # A tag of the caller's own may be one of several models in the folder: each gets a folder with its weights.
        folder = Path(save_dir) if tag is None else Path(save_dir) / tag
        try:
            if by_script and tag is not None and has_other_weights(folder):
                raise UnsupportedError(f"a model is in {folder} that was not saved with a training state")
            saved = save_state(
                self,
                folder,
                scheduler=caller.scheduler_of(self.optimizer),
                data={CLIENT: client_state or {}},
                with_weights=not caller.has_weights,
                keep_older=tag is None and by_script,  # what has a place of its own is replaced
                asynchronous=in_background(),
            )
        except (ConfigError, UnsupportedError) as error:  # on all ranks, before anything is written
            _leave_to_deepspeed(self, error)
        else:
            if tag is not None:
                name_state(Path(save_dir), tag, saved, bool(self.zero_optimization()))
            return True
    if active_configs() and save_dir:  # else it is DeepSpeed's error
        forget_guard_files(Path(save_dir) / (f"global_step{self.global_steps}" if tag is None else str(tag)))
    return original(self, save_dir, tag, client_state or {}, save_latest, exclude_frozen_parameters)


def load_checkpoint(
    original: Callable[..., Any],
    self: Any,
    load_dir: Any,
    tag: Any = None,
    load_module_strict: bool = True,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    load_module_only: bool = False,
    custom_load_fn: Any = None,
) -> Any:
    found: tuple[Path, str | None] | None = None
    with_optimizer = load_optimizer_states and not load_module_only and _has_optimizer(self)
    if active_configs() and load_dir and not _asks_for_universal(self, load_dir, tag):
        found = state_in(Path(load_dir), tag)
        if found is not None and custom_load_fn is not None:
            raise UnsupportedError(
                f"{found[0] / str(found[1])}: custom_load_fn takes the model's state dict from DeepSpeed's own files, "
                "and this state was saved by hf_zero_stream. Leave it out, or load the folder with from_pretrained."
            )
        takes_all = with_optimizer and custom_load_fn is None
        if found is None and takes_all and _is_other_zero(self, Path(load_dir), tag):
            found = Path(load_dir), None if tag is None else str(tag)
    if found is None:
        flags = (load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only, custom_load_fn)
        return original(self, load_dir, tag, *flags)
    folder, name = found
    caller = current() or Caller()
    scheduler = caller.scheduler_of(self.optimizer)
    if name is not None and not with_optimizer:
        data = load_without_optimizer(
            self,
            folder,
            name,
            strict=load_module_strict,
            only_weights=load_module_only or not _has_optimizer(self),
            scheduler=scheduler,
            with_scheduler=load_lr_scheduler_states,
        )
        return str(folder / name), (data or {}).get(CLIENT, {})
    with_scheduler = load_lr_scheduler_states and not (caller.loads_schedulers and self.lr_scheduler is None)
    # Random numbers are the caller's: the Trainer and accelerate restore them at their own time, and engines never do.
    resumed = load_state(self, folder, scheduler=scheduler, tag=name, with_scheduler=with_scheduler, with_rng=False)
    if load_lr_scheduler_states:
        caller.restored.append(scheduler)
    return str(folder / resumed.tag), (resumed.data or {}).get(CLIENT, {})


def _leave_to_deepspeed(engine: Any, error: Exception) -> None:
    """Say why DeepSpeed saves a training; raises where its own load would not bring it back (all ranks).

    With `offload_optimizer` on NVMe, ``load_checkpoint`` copies swap files alone, and returns normally: weights and
    what the optimizer keeps of its steps stay as the new process has them.
    """
    if engine.zero_nvme_offload_optimizer():
        raise UnsupportedError(
            f"{error} A checkpoint of DeepSpeed's own is no way out here: with offload_optimizer on NVMe its "
            "load_checkpoint leaves weights and the optimizer's steps as a new process has them. Offload to the CPU, "
            "or save the weights alone, with save_pretrained."
        ) from error
    if _has_optimizer(engine):
        refuse_lost_elsewhere(getattr(engine.optimizer, "optimizer", engine.optimizer), error, "DeepSpeed")
    say_refused(error, "DeepSpeed")


def _is_node_local(engine: Any) -> bool:
    """Whether each node is to keep files of its own, which are no folder that all ranks share; says so."""
    if engine.use_node_local_storage():
        _leave_to_deepspeed(engine, UnsupportedError("the config has use_node_local_storage."))
        return True
    return False


def _is_replaced(engine: Any, save_checkpoint: Callable[..., Any]) -> bool:
    """Whether somebody has put a method of theirs in place of those by which the engine saves; says so."""
    own = sys.modules["deepspeed.runtime.engine"].DeepSpeedEngine
    others = replaced_methods(own, engine, "module_state_dict", "save_checkpoint", "_save_zero_checkpoint")
    others += [] if is_defined_by(own, save_checkpoint) else ["save_checkpoint"]
    if others:
        _leave_to_deepspeed(engine, UnsupportedError(f"the engine's {' and '.join(others)} is not DeepSpeed's own."))
    return bool(others)


def _has_optimizer(engine: Any) -> bool:
    """Whether the engine trains: else it has none, or one of DeepSpeed's that stands in for it."""
    return hasattr(getattr(engine.optimizer, "optimizer", engine.optimizer), "state")


def _asks_for_universal(engine: Any, load_dir: Any, tag: Any) -> bool:
    return tag is None and engine.load_universal_checkpoint() and (Path(load_dir) / "latest_universal").is_file()


def _is_other_zero(engine: Any, load_dir: Path, tag: Any) -> bool:
    """Whether `load_dir` is a ZeRO checkpoint that DeepSpeed cannot load into this engine, and we can (all ranks)."""
    if not engine.zero_optimization() or engine.load_universal_checkpoint() or unknown_shards_reason(engine):
        return False
    if is_model_parallel(engine) and of_parts_in(load_dir, tag):
        return False
    shards_parameters = engine.zero_optimization_partition_weights()
    return other_zero_in(load_dir, tag, engine.seq_dp_world_size, shards_parameters)
