"""Steps are counted for optimizers that do not: states have names of their own, and go on counting after a resume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import hf_zero_stream
from hf_zero_stream.state.record import FILE, StateRecord


class Signs(torch.optim.Optimizer):
    """An optimizer that keeps nothing, as SGD and some Lions do."""

    def __init__(self, params: object, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(param.grad.sign(), alpha=group["lr"])


def made(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    return model, (Signs if kind == "Signs" else getattr(torch.optim, kind))(model.parameters(), lr=0.01)


def backward(model: nn.Module, optimizer: torch.optim.Optimizer, factor: float = 1.0) -> None:
    optimizer.zero_grad()
    (model(torch.ones(2, 4)).square().sum() * factor).backward()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        backward(model, optimizer)
        optimizer.step()


def saved(folder: Path) -> list[str]:
    return sorted(path.parent.name for path in folder.glob(f"*/{FILE}"))


@pytest.mark.parametrize("kind", ["SGD", "Signs", "AdamW"])
def test_names_and_counts(tmp_path: Path, kind: str) -> None:
    """A second save does not replace the first one; a resume goes on from the count, and keeps the training's id."""
    model, optimizer = made(kind)
    for _ in range(2):
        train(model, optimizer, 3)
        hf_zero_stream.save_state(model, tmp_path, optimizer=optimizer)
    assert saved(tmp_path) == ["global_step3", "global_step6"]
    again, its_optimizer = made(kind)
    resumed = hf_zero_stream.load_state(again, tmp_path, optimizer=its_optimizer)
    assert (resumed.tag, resumed.counters["global_steps"]) == ("global_step6", 6)
    train(again, its_optimizer, 1)
    hf_zero_stream.save_state(again, tmp_path, optimizer=its_optimizer)
    assert saved(tmp_path) == ["global_step3", "global_step6", "global_step7"]
    ids = {StateRecord.read(tmp_path / name / FILE).training for name in saved(tmp_path)}
    assert len(ids) == 1 and ids != {""}
    other, its_own = made(kind)
    train(other, its_own, 1)
    hf_zero_stream.save_state(other, tmp_path / "other", optimizer=its_own)
    assert StateRecord.read(tmp_path / "other" / "global_step1" / FILE).training not in ids


def test_a_step_that_a_scaler_skips(tmp_path: Path) -> None:
    model, optimizer = made("SGD")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for factor in (1.0, float("inf"), 1.0):
        backward(model, optimizer, factor)
        for param in model.parameters():
            param.grad.mul_(scaler.get_scale())
        scaler.scale(torch.ones(()))  # makes its scale
        scaler.step(optimizer)
        scaler.update()
    hf_zero_stream.save_state(model, tmp_path, optimizer=optimizer, scaler=scaler)
    assert saved(tmp_path) == ["global_step2"]


def test_a_compiled_step(tmp_path: Path) -> None:
    torch.compiler.reset()
    model, optimizer = made("SGD")
    step = torch.compile(optimizer.step, backend="eager")
    for _ in range(3):
        backward(model, optimizer)
        step()
    hf_zero_stream.save_state(model, tmp_path, optimizer=optimizer)
    assert saved(tmp_path) == ["global_step3"]
