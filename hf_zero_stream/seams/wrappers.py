"""Uses of accelerate and the Trainer, and functions in place of theirs; the only module that imports accelerate."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState
from accelerate.utils import extract_model_from_parallel, fsdp_utils
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig
from transformers.utils import logging

from ..bindings.install import is_defined_by, is_replaced, override_methods, replaced_methods
from ..holdings.introspection import is_sharded, unknown_shards_reason


logger = logging.get_logger(__name__)


def accelerate_config_file() -> str:
    """Return the path of the file that ``accelerate config`` writes."""
    from accelerate.commands.config.config_args import default_config_file  # imports all of accelerate's commands

    return str(default_config_file)


def unwrapped(model: Any) -> Any:
    """The model inside any nesting of engines, DistributedDataParallel and what ``torch.compile`` returns."""
    if isinstance(model, PreTrainedModel) and "_orig_mod" not in vars(model):
        return model  # accelerate would look up installed packages, which takes some milliseconds
    inner = extract_model_from_parallel(model, keep_torch_compile=False)
    return inner if inner is model else unwrapped(inner)


def unwrapped_optimizer(optimizer: Any) -> Any:
    """The optimizer inside what ``accelerator.prepare`` made of it."""
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer


def unwrapped_scheduler(scheduler: Any) -> Any:
    """The scheduler inside what ``accelerator.prepare`` made of it."""
    return scheduler.scheduler if isinstance(scheduler, AcceleratedScheduler) else scheduler


def _is_engine_scheduler(scheduler: Any) -> bool:
    """Whether it is accelerate's wrapper of a DeepSpeed engine's scheduler; accelerate has it where DeepSpeed is."""
    wrapper = getattr(accelerate.utils, "DeepSpeedSchedulerWrapper", None)
    return wrapper is not None and isinstance(scheduler, wrapper)


def _steps_with_accelerate(scheduler: Any) -> bool:
    return isinstance(scheduler, AcceleratedScheduler) and not _is_engine_scheduler(scheduler)


def steps_per_step(scheduler: Any) -> int:
    """Return the number of steps that `scheduler` makes for each step of the optimizer."""
    counts_ranks = _steps_with_accelerate(scheduler)
    if not counts_ranks or scheduler.split_batches or not scheduler.step_with_optimizer:
        return 1
    return int(AcceleratorState().num_processes)


def schedulers_of(accelerator: Accelerator) -> Sequence[Any]:
    """The schedulers that `accelerator` has prepared."""
    return tuple(accelerator._schedulers)


def scheduler_of(schedulers: Sequence[Any], optimizer: Any) -> Any:
    """The only one of `optimizer` among `schedulers` that accelerate steps and saves itself; else None."""
    inner = unwrapped_optimizer(optimizer)
    found = [
        scheduler
        for scheduler in schedulers
        if _steps_with_accelerate(scheduler)
        and any(getattr(each, "optimizer", each) is inner for each in scheduler.optimizers)
    ]
    return found[0] if len(found) == 1 else None


def optimizers_of(accelerator: Accelerator) -> Sequence[Any]:
    """The optimizers that `accelerator` has prepared, the one of each model at the model's place."""
    return accelerator._optimizers


def without_restored_schedulers(accelerator: Accelerator, restored: Sequence[Any]) -> AbstractContextManager[None]:
    """Inside, accelerate restores no scheduler that is in the list `restored` by then."""

    def placeholder(scheduler: Any) -> Any:
        def load_state_dict(state: Any) -> None:
            if not any(scheduler is each for each in restored):
                scheduler.load_state_dict(state)

        return SimpleNamespace(load_state_dict=load_state_dict)

    schedulers = [each if _is_engine_scheduler(each) else placeholder(each) for each in accelerator._schedulers]
    return override_methods(accelerator, _schedulers=schedulers)


def batch_size_of(accelerator: Accelerator) -> int | None:
    """The samples in a step of all ranks, if the data loaders that `accelerator` has prepared agree about it."""
    sizes = {getattr(loader, "total_batch_size", None) for loader in accelerator._dataloaders}
    size = sizes.pop() if len(sizes) == 1 else None
    return None if size is None else int(size) * accelerator.gradient_accumulation_steps


def is_fsdp2(accelerator: Accelerator) -> bool:
    return bool(getattr(accelerator, "is_fsdp2", False))


def has_sharded_model(engine: Any) -> bool:
    """Whether `engine` is a DeepSpeed engine with ZeRO around a transformers model, or such a model of DTensors.

    Not one of which only DeepSpeed knows what ranks hold; rank 0 says so.
    """
    model = unwrapped(engine)
    if not isinstance(model, PreTrainedModel):
        return False
    if why := unknown_shards_reason(engine):
        if dist.get_rank() == 0:
            logger.warning_once(f"Saves of this {type(model).__name__} are left to DeepSpeed and accelerate: {why}.")
        return False
    return getattr(engine, "zero_optimization_stage", lambda: 0)() > 0 or is_sharded(model)


_OF_TRAINER = "_hf_zero_stream_of_trainer"
"""The attribute of a Trainer's accelerator."""


def note_trainer(trainer: Any) -> None:
    """Note that the accelerator of `trainer`, which is going to train, is a Trainer's."""
    vars(trainer.accelerator)[_OF_TRAINER] = True


def belongs_to_trainer(accelerator: Accelerator, model: PreTrainedModel) -> bool:
    """Whether a Trainer made `accelerator`; then not only the caller's own script asks it for state dicts.

    A Trainer leaves its mark on the plugin for DeepSpeed. Of one that has trained outside of ``streaming()``, `model`
    tells: before it trains under FSDP2, a Trainer has ``generate``, if there is one, count as a forward method.
    """
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    if isinstance(getattr(plugin, "hf_ds_config", None), HfTrainerDeepSpeedConfig) or _OF_TRAINER in vars(accelerator):
        return True
    return "transformers.trainer" in sys.modules and ("generate" in vars(model) or not hasattr(model, "generate"))


def saves_by_default(trainer: Any) -> bool:
    """Whether nobody overrides how `trainer` gets a state dict and writes it, in a subclass or on an object.

    And whether it gets a lazy one: accelerate may be of a version whose saves are left to it.
    """
    own = sys.modules["transformers.trainer"].Trainer
    is_lazy = is_replaced(Accelerator.get_state_dict)
    others = [*replaced_methods(own, trainer, "_save"), *replaced_methods_of(trainer.accelerator)]
    return is_lazy and not others


def replaced_methods_of(accelerator: Accelerator) -> list[str]:
    """Return the names of those methods by which `accelerator` saves models that somebody has replaced."""
    return replaced_methods(Accelerator, accelerator, "get_state_dict", "save")


def is_defined_by_accelerate(method: Any) -> bool:
    """Whether `method` is what accelerate defines for an ``Accelerator``, and nothing that was put in its place."""
    return is_defined_by(Accelerator, method)


def is_defined_by_trainer(method: Any) -> bool:
    """Whether `method` is what transformers defines for a ``Trainer``, and nothing that was put in its place."""
    return is_defined_by(sys.modules["transformers.trainer"].Trainer, method)


def ignored_by_fsdp2(accelerator: Accelerator, model: nn.Module) -> set[torch.Tensor]:
    """The parameters that `accelerator` has FSDP2 leave alone; they are on its device afterwards."""
    ignored = accelerator.state.fsdp_plugin.ignored_modules
    return set(fsdp_utils.get_parameters_from_modules(ignored, model, accelerator.device))


def checkpoint_number(name: str) -> int | None:
    """The step of the Trainer's checkpoint in a folder of this name; None if it is no such folder."""
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR  # it imports PEFT, and with it bitsandbytes

    number = name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")
    return int(number) if number != name and number.isdecimal() else None


def trainer_state_in(checkpoint: Path) -> Path:
    """The file that the Trainer writes last into a checkpoint."""
    from transformers.trainer import TRAINER_STATE_NAME

    return checkpoint / TRAINER_STATE_NAME


def scheduler_state_in(checkpoint: Path) -> Path:
    """The file that the Trainer writes the state of its scheduler into."""
    from transformers.trainer import SCHEDULER_NAME

    return checkpoint / SCHEDULER_NAME
