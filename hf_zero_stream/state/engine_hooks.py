"""What ``engine.save_checkpoint`` and ``engine.load_checkpoint`` of DeepSpeed become inside ``streaming()``.

A folder that DeepSpeed wrote is loaded by DeepSpeed, and a training that we refuse is saved by it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers.utils import logging

from ..errors import ConfigError, UnsupportedError
from ..loading.into import load_into
from ..ranks.coordinator import Coordinator
from ..scope import active_configs
from .callers import Caller, current, in_background, is_on, name_state, state_in
from .load import load_state
from .save import save_state


__all__ = ["REPLACEMENTS", "say_refused"]

logger = logging.get_logger(__name__)

_CLIENT = "client_state"
"""Where our `data` has what the caller gives to the engine."""


def say_refused(error: Exception, whose: str) -> None:
    """Say once, on rank 0, why a training is not saved by us."""
    if Coordinator.of_default_group().is_main:
        logger.warning_once(f"This training is saved by {whose}, in its own format: {error}")


def _save_checkpoint(
    original: Callable[..., Any],
    self: Any,
    save_dir: Any,
    tag: Any = None,
    client_state: Any = None,
    save_latest: bool = True,
    exclude_frozen_parameters: bool = False,
) -> Any:
    if is_on() and save_latest:
        caller = current() or Caller()
        tag = tag or caller.apart or None
        # A tag of the caller's own may be one of several models in the folder: each gets a folder with its weights.
        folder = Path(save_dir) if tag is None else Path(save_dir) / str(tag)
        try:
            saved = save_state(
                self,
                folder,
                scheduler=caller.scheduler_of(self.optimizer),
                data={_CLIENT: client_state or {}},
                with_weights=not caller.has_weights,
                asynchronous=in_background(),
            )
        except (ConfigError, UnsupportedError) as error:  # on all ranks, before anything is written
            say_refused(error, "DeepSpeed")
        else:
            if tag is not None:
                name_state(Path(save_dir), str(tag), saved)
            return True
    return original(self, save_dir, tag, client_state or {}, save_latest, exclude_frozen_parameters)


def _load_checkpoint(
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
    found = state_in(Path(load_dir), tag) if active_configs() and custom_load_fn is None else None
    if found is None:
        flags = (load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only, custom_load_fn)
        return original(self, load_dir, tag, *flags)
    folder, name = found
    if load_module_only or not load_optimizer_states:
        load_into(self, str(folder), strict=load_module_strict)
        return str(folder / name), {}
    caller = current() or Caller()
    scheduler = caller.scheduler_of(self.optimizer)
    # Random numbers are the caller's: the Trainer and accelerate restore them at their own time, and engines never do.
    resumed = load_state(
        self, folder, scheduler=scheduler, tag=name, with_scheduler=load_lr_scheduler_states, with_rng=False
    )
    if load_lr_scheduler_states:
        caller.restored.append(scheduler)
    return str(folder / name), (resumed.data or {}).get(_CLIENT, {})


REPLACEMENTS: dict[str, Any] = {"save_checkpoint": _save_checkpoint, "load_checkpoint": _load_checkpoint}
"""By the names of the engine's methods."""
