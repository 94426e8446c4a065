"""Schedulers of learning rates: what is saved of them, and where one goes on at another number of ranks.

accelerate steps a scheduler as many times at each step of the optimizer as there are ranks (unless it splits batches):
the scripts that it is made for count the batches of one rank. So its position depends on the number of ranks.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from ..errors import ConfigError, UnsupportedError
from ..seams.wrappers import steps_per_step, unwrapped_scheduler
from .plain import plain, restored


_PER_STEP = "steps_per_step"

_CLOSED_FORMS = (LambdaLR, OneCycleLR)
"""Their ``get_lr`` computes from the position alone, as others' ``_get_closed_form_lr`` does."""


def class_of(scheduler: Any) -> str:
    """The class of a scheduler, or of that inside what ``accelerator.prepare`` made of it."""
    return type(unwrapped_scheduler(scheduler)).__name__


def recorded(scheduler: Any) -> dict[str, Any]:
    """Record `scheduler`; raises an UnsupportedError if its state is not plain data."""
    state = plain(scheduler.state_dict(), "scheduler")
    return {"class": class_of(scheduler), "state": state, _PER_STEP: steps_per_step(scheduler)}


def refuse_other(
    scheduler: Any, record: Mapping[str, Any], saved_batch: int | None, batch: int | None, where: str
) -> None:
    """Raise if `scheduler` cannot go on where that of `record` was; the global batches may be unknown.

    Raises:
        ConfigError: it is of another class, or it counts the batches of ranks and the global batch is not known.
        UnsupportedError: its learning rates do not follow from a position alone, which is another one now.
    """
    without = "pass with_scheduler=False and set the new one yourself"
    if (kind := class_of(scheduler)) != record["class"]:
        raise ConfigError(
            f"{where}: the scheduler was a {record['class']}, and is a {kind} now. Use the same, or {without}."
        )
    before, now = record.get(_PER_STEP, 1), steps_per_step(scheduler)
    if before == now:
        return
    what = f"{where}: the scheduler was stepped {before} times for each step of the optimizer, and is {now} times now"
    if saved_batch is None or batch is None:
        raise ConfigError(
            f"{what}, so its position depends on the number of samples in a step, which is not known. Give save_state "
            f"and load_state batch_size, have accelerator.prepare make the data loader, or {without}."
        )
    inner = unwrapped_scheduler(scheduler)
    if not isinstance(inner, _CLOSED_FORMS) and not hasattr(inner, "_get_closed_form_lr"):
        raise UnsupportedError(
            f"{what}. The learning rates of a {kind} follow from all steps before, and not from a position, which "
            f"could be changed. Keep the number of ranks, use split_batches=True from the beginning, or {without}."
        )


def restore(
    scheduler: Any, record: Mapping[str, Any], saved_batch: int | None, batch: int | None
) -> list[float] | None:
    """Have `scheduler` go on from a `record`; for the batches see :func:`refuse_other`.

    Returns the learning rates of the groups if the position had to be changed: the scheduler's own constants, such as
    its length, are then those of the new training, made for the new number of ranks.
    """
    before, now = record.get(_PER_STEP, 1), steps_per_step(scheduler)
    state = restored(record["state"])
    if before == now:
        mine = scheduler.state_dict()
        scheduler.load_state_dict({name: _of_the_kind(mine.get(name), value) for name, value in state.items()})
        return None
    assert saved_batch is not None and batch is not None
    inner = unwrapped_scheduler(scheduler)
    # A step counts its samples in batches of one rank: `saved_batch / before` samples each, and `batch / now`.
    position = round(state["last_epoch"] * now * saved_batch / (before * batch))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, that a position should not be given
        inner.step(position)
    inner._step_count = position + 1  # accelerate steps a OneCycleLR until this is its length
    return [float(rate) for rate in inner.get_last_lr()]


def _of_the_kind(mine: Any, value: Any) -> Any:
    """`value` as the scheduler itself keeps it: JSON has neither tuples nor the counter of MultiStepLR."""
    is_same = (isinstance(mine, tuple) and isinstance(value, list)) or (
        isinstance(mine, Counter) and isinstance(value, dict)
    )
    return type(mine)(value) if is_same else value
