"""What we use and replace of accelerate and the Trainer; the only module that imports accelerate."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

from accelerate import Accelerator
from accelerate.utils import extract_model_from_parallel
from transformers import PreTrainedModel
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

from .. import patching
from ..versions import refuse_unknown_version


__all__ = [
    "TrainerPatches",
    "accelerate_config_file",
    "accelerator_replacements",
    "is_of_a_trainer",
    "saves_by_default",
    "shares_its_model",
    "unwrapped",
]


def accelerate_config_file() -> str:
    """Where ``accelerate config`` writes its file."""
    from accelerate.commands.config.config_args import default_config_file  # imports all of accelerate's commands

    return str(default_config_file)


def unwrapped(model: Any) -> Any:
    """The model inside any nesting of engines, DistributedDataParallel and what ``torch.compile`` returns."""
    inner = extract_model_from_parallel(model, keep_torch_compile=False)
    return inner if inner is model else unwrapped(inner)


def shares_its_model(engine: Any) -> bool:
    """Whether `engine` is a DeepSpeed engine with ZeRO, around a transformers model."""
    stage = getattr(engine, "zero_optimization_stage", lambda: 0)()
    return stage > 0 and isinstance(unwrapped(engine), PreTrainedModel)


def is_of_a_trainer(accelerator: Accelerator) -> bool:
    """Whether a Trainer made `accelerator`; then not only the caller's own script asks it for state dicts."""
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    return isinstance(getattr(plugin, "hf_ds_config", None), HfTrainerDeepSpeedConfig)


def saves_by_default(trainer: Any) -> bool:
    """Whether no subclass overrides how `trainer` writes a state dict."""
    return getattr(trainer._save, "__module__", None) == "transformers.trainer"


def accelerator_replacements(**functions: Callable[..., Any]) -> dict[tuple[Any, str], patching.Replacement]:
    """Replacements of the methods of ``Accelerator`` with these names."""
    return {(Accelerator, name): function for name, function in functions.items()}


class TrainerPatches:
    """Replaces the Trainer's ``save_model`` once somebody has imported the Trainer, which takes seconds.

    Args:
        save_model: called with the original and its arguments.
        others: replaced for as long, whether there is a Trainer or not.
    """

    def __init__(self, save_model: Callable[..., Any], others: patching.Patches) -> None:
        self._save_model = save_model
        self._others = others
        self._lock = threading.Lock()
        self._users = 0
        self._patches: patching.Patches | None = None

    def acquire(self) -> None:
        """Replace the function, now or at the next :meth:`put_in` after the Trainer's import."""
        self._others.acquire()
        with self._lock:
            self._users += 1
        try:
            self.put_in()
        except BaseException:
            self.release()
            raise

    def put_in(self) -> bool:
        """Replace the function if the Trainer has been imported; returns whether it was replaced just now."""
        with self._lock:
            trainer = sys.modules.get("transformers.trainer")
            if trainer is None or self._patches is not None or not self._users:
                return False
            refuse_unknown_version("transformers", [] if hasattr(trainer.Trainer, "_save") else ["Trainer._save"])
            self._patches = patching.Patches({(trainer.Trainer, "save_model"): self._save_model})
            self._patches.acquire()
            return True

    def release(self) -> None:
        """Put the original back once every :meth:`acquire` has been released."""
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._patches is not None:
                self._patches.release()
                self._patches = None
        self._others.release()
