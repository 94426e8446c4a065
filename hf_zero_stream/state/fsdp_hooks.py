"""What accelerate and the Trainer call to save and load a training under FSDP2, inside ``streaming()``.

They save a model first and its optimizer later, by two functions. A state is saved when both are known, or both are
saved by accelerate. Folders that accelerate wrote are loaded by accelerate.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import ConfigError, UnsupportedError
from ..loading.into import load_into
from ..seams.wrappers import is_fsdp2, optimizers_of, unwrapped_optimizer
from ..settings.scope import active_configs
from .callers import Caller, current, forget_state, in_background, is_on, load_found, name_state, state_in
from .elsewhere import refuse_lost_elsewhere
from .engine_hooks import say_refused
from .save import save_state


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
    save = partial(original, plugin, accelerator, model, folder, number, *args, **kwargs)
    caller = current()
    if caller is None or not is_on() or not is_fsdp2(accelerator) or number >= len(optimizers_of(accelerator)):
        return save()
    caller.waiting[number] = save
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
        place = caller.place(Path(folder), number)
        try:
            if not caller.is_between_steps:
                raise UnsupportedError("gradients are being accumulated, and they are not part of a state of ours.")
            saved = save_state(
                model,
                place / caller.apart,
                optimizer=optimizer,
                scheduler=caller.scheduler_of(optimizer),
                batch_size=caller.batch_size,
                with_weights=not caller.has_weights,
                keep_older=False,
                asynchronous=in_background(),
            )
        except (ConfigError, UnsupportedError) as error:  # on all ranks, before anything is written
            refuse_lost_elsewhere(unwrapped_optimizer(optimizer), error, "accelerate")
            say_refused(error, "accelerate")
            save_model()
        else:
            if caller.apart:
                name_state(place, caller.apart, saved)
            return None
    saved = original(plugin, accelerator, optimizer, model, folder, number, *args, **kwargs)
    if active_configs():
        forget_state((caller or Caller()).place(Path(folder), number))
    return saved


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
    found, caller = _found(accelerator, folder, number)
    if found is None:
        return original(plugin, accelerator, model, folder, number, *args, **kwargs)
    optimizers = optimizers_of(accelerator)
    if number >= len(optimizers):
        load_into(model, str(found[0]))
        return None
    if not caller.is_between_steps:
        raise UnsupportedError("load_state: gradients are being accumulated. Load after a step.")
    optimizer = optimizers[number]
    scheduler = caller.scheduler_of(optimizer)
    load_found(model, found, caller, optimizer, scheduler)
    caller.restored.append(scheduler)
    return None


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
    found, _ = _found(accelerator, folder, number)
    if found is None:  # else it was loaded with the model
        return original(plugin, accelerator, optimizer, model, folder, number, *args, **kwargs)
    return None


def _found(accelerator: Any, folder: Any, number: int) -> tuple[tuple[Path, str] | None, Caller]:
    """The state of ours that is to be loaded, if there is one, and who loads it."""
    caller = current()
    if caller is None or not active_configs() or not is_fsdp2(accelerator):
        return None, Caller()
    place = caller.place(Path(folder), number)
    return state_in(place.parent, place.name), caller
