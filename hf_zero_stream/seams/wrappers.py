"""What we use and replace of accelerate and the Trainer; the only module that imports accelerate."""

from __future__ import annotations

import sys
from typing import Any

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import extract_model_from_parallel
from transformers import PreTrainedModel
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

from ..errors import refuse_unknown_version
from ..patching import Replacement


__all__ = [
    "accelerate_config_file",
    "accelerator_replacements",
    "is_of_a_trainer",
    "saves_by_default",
    "shares_its_model",
    "trainer_replacements",
    "unwrapped",
    "unwrapped_optimizer",
]


def accelerate_config_file() -> str:
    """Where ``accelerate config`` writes its file."""
    from accelerate.commands.config.config_args import default_config_file  # imports all of accelerate's commands

    return str(default_config_file)


def unwrapped(model: Any) -> Any:
    """The model inside any nesting of engines, DistributedDataParallel and what ``torch.compile`` returns."""
    inner = extract_model_from_parallel(model, keep_torch_compile=False)
    return inner if inner is model else unwrapped(inner)


def unwrapped_optimizer(optimizer: Any) -> Any:
    """The optimizer inside what ``accelerator.prepare`` made of it."""
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer


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


def accelerator_replacements(**functions: Replacement) -> dict[tuple[Any, str], Replacement]:
    """Replacements of the methods of ``Accelerator`` with these names."""
    return {(Accelerator, name): function for name, function in functions.items()}


def trainer_replacements(**functions: Replacement) -> dict[tuple[Any, str], Replacement]:
    """The same of the Trainer's methods; none until somebody has imported the Trainer, which takes seconds."""
    trainer = sys.modules.get("transformers.trainer")
    if trainer is None:
        return {}
    refuse_unknown_version("transformers", [] if hasattr(trainer.Trainer, "_save") else ["Trainer._save"])
    return {(trainer.Trainer, name): function for name, function in functions.items()}
