"""A scheduler that was stepped once for each rank goes on at the place that the samples seen by then mean."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from hf_zero_stream.errors import ConfigError, UnsupportedError
from hf_zero_stream.state import schedules


def made(make: Callable[[Any], Any]) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    return optimizer, make(optimizer)


def stepped(make: Callable[[Any], Any], steps: int) -> Any:
    optimizer, scheduler = made(make)
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
    return scheduler


LENGTHS: dict[str, Callable[[int], Callable[[Any], Any]]] = {
    "LambdaLR": lambda length: lambda it: lr_scheduler.LambdaLR(it, lambda step: 1 - step / length),
    "CosineAnnealingLR": lambda length: lambda it: lr_scheduler.CosineAnnealingLR(it, length),
    "OneCycleLR": lambda length: lambda it: lr_scheduler.OneCycleLR(it, 1.0, length, cycle_momentum=False),
    "StepLR": lambda length: lambda it: lr_scheduler.StepLR(it, length // 10),
}


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize(("before", "batch"), [(2, 6), (4, 6), (2, 12)])
def test_rates_go_on(name: str, before: int, batch: int) -> None:
    """Saved after 6 steps of 6 samples, with `before` steps of the scheduler each, it goes on with one for each."""
    make = LENGTHS[name]
    saved = {**schedules.recorded(stepped(make(20 * before), 6 * before)), "steps_per_step": before}
    optimizer, scheduler = made(make(20 * 6 // batch))
    schedules.refuse_other(scheduler, saved, 6, batch, "here")
    rates = schedules.restore(scheduler, saved, 6, batch)
    expected = stepped(make(20 * 6 // batch), 6 * 6 // batch)
    assert rates == pytest.approx(expected.get_last_lr(), rel=1e-9)
    optimizer.param_groups[0]["lr"] = rates[0]
    for each in (expected, scheduler):
        each.optimizer.step()
        each.step()
    assert scheduler.get_last_lr() == pytest.approx(expected.get_last_lr(), rel=1e-9)


def test_refused() -> None:
    parts = [lambda it: lr_scheduler.ConstantLR(it), lambda it: lr_scheduler.ExponentialLR(it, 0.9)]

    def sequence(optimizer: Any) -> Any:
        return lr_scheduler.SequentialLR(optimizer, [part(optimizer) for part in parts], [3])

    _, scheduler = made(sequence)
    saved = {"class": "SequentialLR", "state": {}, "steps_per_step": 2}
    with pytest.raises(
        ConfigError, match="stepped 2 times for each step of the optimizer, and is 1 times now.*batch_size"
    ):
        schedules.refuse_other(scheduler, saved, None, 6, "here")
    with pytest.raises(UnsupportedError, match="rates of a SequentialLR follow from all steps before"):
        schedules.refuse_other(scheduler, saved, 6, 6, "here")
    with pytest.raises(ConfigError, match="was a StepLR, and is a SequentialLR now"):
        schedules.refuse_other(scheduler, {**saved, "class": "StepLR"}, 6, 6, "here")
