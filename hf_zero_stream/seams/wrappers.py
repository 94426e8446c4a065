"""accelerate and the Trainer, which wrap a model and save it; the only module that imports accelerate.

What their functions become inside ``streaming()``, whoever saves gives to :class:`TrainerPatches` and
:func:`accelerator_replacements`.
"""

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
    from accelerate.commands.config.config_args import default_config_file  # with all of accelerate's commands

    return str(default_config_file)


def unwrapped(model: Any) -> Any:
    """The model inside an engine, DistributedDataParallel or what ``torch.compile`` returns, one in another or not."""
    inner = extract_model_from_parallel(model, keep_torch_compile=False)
    return inner if inner is model else unwrapped(inner)


def shares_its_model(engine: Any) -> bool:
    """Whether `engine` is DeepSpeed's, with ZeRO, around a model that transformers can save."""
    stage = getattr(engine, "zero_optimization_stage", lambda: 0)()
    return stage > 0 and isinstance(unwrapped(engine), PreTrainedModel)


def is_of_a_trainer(accelerator: Accelerator) -> bool:
    """Whether a Trainer made `accelerator`, and so others than the caller's own script may ask it for a state dict."""
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    return isinstance(getattr(plugin, "hf_ds_config", None), HfTrainerDeepSpeedConfig)


def saves_by_default(trainer: Any) -> bool:
    """Whether `trainer` has transformers' own way to write a state dict, and no override."""
    return getattr(trainer._save, "__module__", None) == "transformers.trainer"


def accelerator_replacements(**functions: Callable[..., Any]) -> dict[tuple[Any, str], patching.Replacement]:
    """Replacements of the methods of an ``Accelerator`` of these names."""
    return {(Accelerator, name): function for name, function in functions.items()}


class TrainerPatches:
    """Replaces the Trainer's ``save_model`` once somebody has imported the Trainer, which takes seconds.

    Args:
        save_model: called with the original and the arguments.
        others: what is replaced for as long, whether there is a Trainer or not.
    """

    def __init__(self, save_model: Callable[..., Any], others: patching.Patches) -> None:
        self._save_model = save_model
        self._others = others
        self._lock = threading.Lock()
        self._users = 0
        self._patches: patching.Patches | None = None

    def acquire(self) -> None:
        """Begin to replace, now or at the next :meth:`put_in`."""
        self._others.acquire()
        with self._lock:
            self._users += 1
        try:
            self.put_in()
        except BaseException:
            self.release()
            raise

    def put_in(self) -> bool:
        """Replace, if the Trainer has been imported; returns whether that was new.

        Raises:
            VersionError: the Trainer is not one that is known.
        """
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
