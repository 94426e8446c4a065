"""``engine.save_checkpoint`` and ``engine.load_checkpoint`` of DeepSpeed inside ``streaming()``.

A folder that DeepSpeed wrote is loaded by DeepSpeed, but for one of another number of ranks or another kind of stage,
which it cannot load. A training that we refuse is saved by it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from ..bindings.install import is_defined_by, replaced_methods
from ..checkpoint.deepspeed_names import (
    SWAPPED,
    ZERO_2_MODEL,
    entries_of_deepspeed,
    model_parallel_size_of,
    world_size_of,
)
from ..errors import UnsupportedError
from ..holdings.introspection import is_model_parallel, unknown_shards_reason
from ..ranks.coordinator import Coordinator, meeting
from ..ranks.rendezvous import LOAD
from ..registry import tool
from ..saving.arguments import refuse_url
from ..saving.mirrors import fetched, mirrored, url_of
from ..saving.pending import finish_pending, notes_for_later
from ..seams.ds_config import settings_in_force
from ..settings.config import StreamingConfig
from ..settings.scope import active_configs
from ..sources.base import is_url
from .callers import (
    Caller,
    current,
    forget_guard_files,
    has_weights_of_others,
    is_on,
    look_for_state,
    name_in,
    name_state,
    refuse_stocks,
    save,
    trainer_loads_schedulers,
    translated,
)
from .foreign import leave_to
from .load import load_without_optimizer, place_of_state, resume
from .record import CLIENT


def save_checkpoint(
    original: Callable[..., Any],
    self: Any,
    save_dir: Any,
    tag: Any = None,
    client_state: Any = None,
    save_latest: bool = True,
    exclude_frozen_parameters: bool = False,
) -> Any:
    if active_configs() and is_url(save_dir):
        refuse_stocks(save_dir, "engine.save_checkpoint")
        _refuse_hosts(save_dir)
        with mirrored(save_dir) as mirror:
            given = tag, client_state, save_latest, exclude_frozen_parameters
            return save_checkpoint(original, self, str(mirror), *given)
    if save_dir and is_on() and save_latest and not _is_node_local(self) and not _is_replaced(self, original):
        from ..holdings.deepspeed.engine import validate_tag  # there is an engine: DeepSpeed is imported

        by_script, caller = current() is None, current() or Caller()
        tag = None if tag is None else str(tag)
        validate_tag(self, tag or f"global_step{self.global_steps}")
        # A tag of the caller's own may be one of several models in the folder: each gets a folder with its weights.
        folder = Path(save_dir) if tag is None else Path(save_dir) / tag
        how = {
            "scheduler": caller.scheduler_of(self.optimizer),
            "data": {CLIENT: client_state or {}},
            "keep_older": tag is None and by_script,  # what has a place of its own is replaced
            "exclude_frozen": exclude_frozen_parameters,
            # DeepSpeed writes no such files.
            "with_weights": caller.with_weights and not (by_script and has_weights_of_others(folder)),
        }
        with notes_for_later() as note:
            saved = save(self, folder, partial(_leave_to_deepspeed, self), **how)
        if saved is not None:
            if tag is not None:
                name_state(Path(save_dir), tag, saved, bool(self.zero_optimization()))
            note(saved)
            _save_on_hosts(self, Path(save_dir), client_state)
            return True
    refuse_url(url_of(save_dir), "engine.save_checkpoint, where DeepSpeed itself saves,")
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
    flags = (load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only, custom_load_fn)
    if active_configs() and is_url(load_dir):
        _refuse_hosts(load_dir)
        with fetched(load_dir) as mirror:
            return load_checkpoint(original, self, str(mirror), tag, *flags)
    if active_configs() and load_dir and not _asks_for_universal(self, load_dir, tag):
        finish_pending(raises=False)
        with meeting(LOAD) as coordinator, ExitStack() as stack:
            with_optimizer = load_optimizer_states and not load_module_only and _has_optimizer(self)
            takes_all = with_optimizer and custom_load_fn is None
            meant = coordinator.broadcast(lambda: translated(_look(self, Path(load_dir), tag, takes_all)))
            found = None if meant is None else (stack.enter_context(place_of_state(meant[0])), meant[1])
            if (settings := _host_settings()) is not None and tag is None and takes_all:
                state_of_engine = tool("state_of_engine", "hosts", "the setting host_states_every")
                on_hosts = state_of_engine(self, Path(load_dir), found, settings, coordinator)
                found = found if on_hosts is None else (on_hosts, None)
            if found is not None and custom_load_fn is not None:
                raise UnsupportedError(
                    f"{found[0] / str(found[1])}: custom_load_fn takes the model's state dict from DeepSpeed's own "
                    "files, and this state was saved by hf_zero_stream. Leave it out, or load the folder with "
                    "from_pretrained."
                )
            if found is not None and with_optimizer:
                loaded = _load_all(self, *found, coordinator, load_lr_scheduler_states)
                _save_on_hosts(self, Path(load_dir), loaded[1], coordinator)
                return loaded
            if found is not None:
                folder, name = found[0], str(found[1])
                data = load_without_optimizer(
                    self,
                    folder,
                    name,
                    coordinator,
                    strict=load_module_strict,
                    only_values=load_module_only or not _has_optimizer(self),
                    scheduler=(current() or Caller()).scheduler_of(self.optimizer),
                    with_scheduler=load_lr_scheduler_states,
                    all_as_rank_0=_loads_rank_0(self),
                )
                return str(folder / name), (data or {}).get(CLIENT, {})
    refuse_url(url_of(load_dir), "engine.load_checkpoint of no state of ours")
    loaded = original(self, load_dir, tag, *flags)
    if active_configs() and load_dir:
        _save_on_hosts(self, Path(load_dir), loaded[1])
    return loaded


def _host_settings() -> StreamingConfig | None:
    """The settings, if they ask for states on hosts and a script calls the engine; the Trainer has its own way."""
    settings = settings_in_force()
    is_called_by_script = current() is None and not trainer_loads_schedulers.get()
    return settings if settings.host_states_every and is_called_by_script else None


def _refuse_hosts(url: str) -> None:
    """Refuse states on hosts beside those at a URL, of which a resume would not know the newer one."""
    if _host_settings() is not None:
        refuse_url(url, "host_states_every")


def _save_on_hosts(engine: Any, folder: Path, client_state: Any, coordinator: Coordinator | None = None) -> None:
    """If the settings ask for it, have the engine save on its hosts too, from now on (all ranks).

    `coordinator`: of the meeting that ranks are in.
    """
    if (settings := _host_settings()) is not None:
        save_between_steps = tool("save_between_steps", "hosts", "the setting host_states_every")
        save_between_steps(engine, folder, settings, client_state, coordinator)


def _load_all(engine: Any, folder: Path, name: str | None, coordinator: Coordinator, with_schedulers: bool) -> Any:
    """Go on from a state; without a `name`, from a checkpoint of DeepSpeed's (all ranks, in a meeting)."""
    caller = current() or Caller()
    scheduler = caller.scheduler_of(engine.optimizer)
    with_scheduler = with_schedulers and not (trainer_loads_schedulers.get() and engine.lr_scheduler is None)
    # Random numbers are the caller's: the Trainer and accelerate restore them at their own time, and engines never do.
    own = {"scheduler": scheduler, "with_scheduler": with_scheduler, "with_rng": False}
    own["all_as_rank_0"] = _loads_rank_0(engine)
    resumed = resume(engine, folder, tag=name, meeting=coordinator, **own)
    if with_schedulers:
        caller.restored.append(scheduler)
    return str(folder / resumed.tag), (resumed.data or {}).get(CLIENT, {})


def _loads_rank_0(engine: Any) -> bool:
    """Whether DeepSpeed's own load gives all ranks the buffers, the scheduler and the client state of rank 0."""
    return not engine.zero_optimization_partition_weights()


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
    optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)
    leave_to("DeepSpeed", error, optimizer if _has_optimizer(engine) else None)


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


def _look(engine: Any, folder: Path, tag: Any, takes_all: bool) -> tuple[Path, str | None] | None:
    """On rank 0: the state of ours that `folder` and `tag` mean, or the ZeRO checkpoint that DeepSpeed cannot load."""
    found = look_for_state(folder, tag)
    if found is None and takes_all and _is_other_zero(engine, folder, name_in(folder, tag)):
        return folder, None if tag is None else str(tag)
    return found


def _is_other_zero(engine: Any, folder: Path, name: str) -> bool:
    """Whether `name` in `folder` is a ZeRO checkpoint that DeepSpeed cannot load into this engine, and we can.

    It loads those of as many ranks as there are, and of a stage that shards parameters as its own does. Of those with
    swap files it loads no moments, in silence (0.19.8).
    """
    place = folder / name
    if (
        not name
        or not engine.zero_optimization()
        or engine.load_universal_checkpoint()
        or unknown_shards_reason(engine)
    ):
        return False
    if not (saved := world_size_of(place)) or (is_model_parallel(engine) and model_parallel_size_of(place) > 1):
        return False
    shards_parameters = engine.zero_optimization_partition_weights()
    is_other_stage = (ZERO_2_MODEL in entries_of_deepspeed(place)) == shards_parameters
    return saved != engine.seq_dp_world_size or is_other_stage or (place / SWAPPED).exists()
