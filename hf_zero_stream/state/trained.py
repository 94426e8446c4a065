"""What ``save_state`` and ``load_state`` are given, as a :class:`..destinations.training.Training`."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from torch import nn

from ..destinations.training import Training, training_of_model
from ..errors import ConfigError
from ..ranks.coordinator import Coordinator
from ..seams.wrappers import unwrapped, unwrapped_optimizer


def training_of(
    trained: Any, optimizer: Any, scheduler: Any, scaler: Any, batch_size: int | None, coordinator: Coordinator
) -> Training:
    """For the arguments see :func:`.save.save_state`; raises a ConfigError if they do not fit together."""
    model = unwrapped(trained)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"expected a model or an engine around one; got {type(trained).__name__}")
    if "deepspeed" in sys.modules:
        from ..destinations.deepspeed.engine_training import is_engine, training_of_engine

        if is_engine(trained):
            if optimizer is not None or scaler is not None or batch_size is not None:
                raise ConfigError("optimizer, scaler, batch_size: an engine has its own; leave them out")
            return training_of_engine(trained, model, scheduler, coordinator)
    if optimizer is None:
        raise ConfigError(
            f"optimizer: expected the optimizer that trains this {type(model).__name__}; got None. Pass optimizer=, "
            "or the DeepSpeed engine in place of the model."
        )
    training = training_of_model(model, unwrapped_optimizer(optimizer), scheduler, scaler, coordinator)
    return replace(training, batch_size=batch_size)
