"""The functions of accelerate that save and load a training under FSDP2, inside ``streaming()``.

They save a model first and its optimizer later, by two functions. A state is saved when both are known, or both are
saved by accelerate. Folders that accelerate wrote are loaded by accelerate.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import UnsupportedError
from ..loading.into import load_into
from ..seams.wrappers import is_fsdp2, optimizers_of, unwrapped_optimizer
from ..settings.scope import active_configs
from .callers import Caller, current, forget_state, is_on, load_if_ours, name_state, save, state_in
from .foreign import leave_to


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
        if save_trained(model, optimizer, caller.place(Path(folder), number), caller):
            return None
        save_model()
    saved = original(plugin, accelerator, optimizer, model, folder, number, *args, **kwargs)
    if active_configs():
        forget_state((caller or Caller()).place(Path(folder), number))
    return saved


def save_trained(model: Any, optimizer: Any, place: Path, caller: Caller) -> bool:
    """Save a model and its optimizer into `place`; false if that is left to accelerate (all ranks)."""
    leave, saved = partial(leave_to, "accelerate", optimizer=unwrapped_optimizer(optimizer)), None
    if caller.is_between_steps:
        own = {"scheduler": caller.scheduler_of(optimizer), "batch_size": caller.batch_size, "keep_older": False}
        saved = save(model, place / caller.own_folder, caller, leave, optimizer=optimizer, **own)
    else:
        leave(UnsupportedError("gradients are being accumulated, and they are not part of a state of ours."))
    if saved is not None and caller.own_folder:
        name_state(place, caller.own_folder, saved)
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
            is_ours = (found := state_in(place.parent, place.name)) is not None
            if found is not None:
                load_into(model, str(found[0]))
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
