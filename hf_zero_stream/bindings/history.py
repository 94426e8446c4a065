"""What an optimizer does not keep of its training: which one it is, and how many steps were made.

The id of a training is random, made at its first save, and kept through resumes. Steps are counted here because not
every optimizer counts its own; torch announces each, but not those that a loss scaler skips.
"""

from __future__ import annotations

import uuid
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..settings.config import is_disabled


_ID, _STEPS = "_hf_zero_stream_training", "_hf_zero_stream_steps"
"""The attributes of an optimizer."""


def id_of(optimizer: Any, *, makes: bool = False) -> str:
    """The id of the training of `optimizer`; if there is none, a new one if it `makes` one, else ""."""
    return str(vars(optimizer).get(_ID, "")) or (uuid.uuid4().hex[:16] if makes else "")


def set_id(optimizer: Any, training: str) -> None:
    """Have this optimizer go on with the training of this id; "" leaves it with its own."""
    if training:
        vars(optimizer)[_ID] = training


def steps_of(optimizer: Any) -> int:
    """How many steps were made, with those before the last resume."""
    return int(vars(optimizer).get(_STEPS, 0))


def set_steps(optimizer: Any, steps: int) -> None:
    vars(optimizer)[_STEPS] = steps


@torch._disable_dynamo  # as torch.compiler.disable, but imports torch._dynamo at the first step, and not here
def _count(optimizer: Any, args: Any, kwargs: Any) -> None:
    del args, kwargs
    set_steps(optimizer, steps_of(optimizer) + 1)


if not is_disabled():
    register_optimizer_step_post_hook(_count)
