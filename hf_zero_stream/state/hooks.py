"""What DeepSpeed's own ways to save and resume a training become inside ``streaming()``.

The Trainer's checkpoints and accelerate's ``save_state`` and ``load_state`` end in ``engine.save_checkpoint`` and
``engine.load_checkpoint``. A folder that DeepSpeed wrote is loaded by DeepSpeed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers.utils import logging

from ..config import StreamingConfig
from ..errors import ConfigError, UnsupportedError
from ..loading.into import load_into
from ..patching import Patches
from ..scope import active_configs, current_config
from ..seams import found_config
from ..seams.wrappers import accelerator_replacements
from .load import load_state
from .record import FILE, LATEST
from .save import save_state


__all__ = ["patches", "replace_engine"]

logger = logging.get_logger(__name__)

_CLIENT = "client_state"
"""Where our `data` has what the caller gives to the engine."""


def _save_checkpoint(
    original: Callable[..., Any],
    self: Any,
    save_dir: Any,
    tag: Any = None,
    client_state: Any = None,
    save_latest: bool = True,
    exclude_frozen_parameters: bool = False,
) -> Any:
    if _is_on() and save_latest:
        # A tag of the caller's own may be one of several models in the folder: each gets a folder with its weights.
        folder = Path(save_dir) if tag is None else Path(save_dir) / str(tag)
        try:
            save_state(self, folder, data={_CLIENT: client_state or {}})
        except (ConfigError, UnsupportedError) as error:  # on all ranks, before anything is written
            logger.warning_once(f"This training is saved by DeepSpeed, in its own format: {error}")
        else:
            if tag is not None and self.global_rank == 0:
                (Path(save_dir) / LATEST).write_text(str(tag), encoding="utf-8")
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
    found = _state_in(Path(load_dir), tag) if active_configs() and custom_load_fn is None else None
    if found is None:
        flags = (load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only, custom_load_fn)
        return original(self, load_dir, tag, *flags)
    folder, name = found
    if load_module_only or not load_optimizer_states:
        load_into(self, str(folder), strict=load_module_strict)
        return str(folder / name), {}
    resumed = load_state(self, folder, tag=name, with_scheduler=load_lr_scheduler_states)
    return str(folder / name), (resumed.data or {}).get(_CLIENT, {})


def _state_in(load_dir: Path, tag: Any) -> tuple[Path, str] | None:
    """The folder of a state of ours that `load_dir` and `tag` mean, and its name there; None if it is none."""
    name = str(tag) if tag is not None else _latest(load_dir)
    if name and (load_dir / name / FILE).exists():
        return load_dir, name
    inner = _latest(load_dir / name) if name else ""
    return (load_dir / name, inner) if inner and (load_dir / name / inner / FILE).exists() else None


def _latest(folder: Path) -> str:
    path = folder / LATEST
    return path.read_text(encoding="utf-8").strip() if os.path.isfile(path) else ""


def _is_on() -> bool:
    return bool(active_configs()) and StreamingConfig.resolve(current_config(), found_config()[0]).training_state


def _with_engine(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Accelerate's own functions, which call the engine's: it may have been imported only now."""
    replace_engine()
    return original(self, *args, **kwargs)


patches = Patches(accelerator_replacements(prepare=_with_engine, save_state=_with_engine, load_state=_with_engine))


def replace_engine() -> None:
    """Replace the functions of DeepSpeed's engine too if it has been imported."""
    engine = sys.modules.get("deepspeed.runtime.engine")
    if engine is not None and hasattr(engine, "DeepSpeedEngine"):
        functions: dict[str, Any] = {"save_checkpoint": _save_checkpoint, "load_checkpoint": _load_checkpoint}
        patches.add({(engine.DeepSpeedEngine, name): function for name, function in functions.items()})
