"""Optimizers beside a save in the background: their own methods that change values wait, as do compiled steps.

One that keeps something where torch's optimizers do not is refused by name, before anything is written.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

import hf_zero_stream
from hf_zero_stream.errors import UnsupportedError
from tests.state.test_snapshots import SHARDS, held_save, tree
from tests.support.training_state import plain_training, train_plain
from tests.support.zoo import make_checkpoint


class Averaging(torch.optim.SGD):
    """Is evaluated with averages, as schedule-free ones are; and steps in two halves, as SAM does."""

    @torch.no_grad()
    def eval(self) -> None:
        for param, kept in self.state.items():
            param.lerp_(kept["momentum_buffer"], 0.5)

    def first_step(self) -> None:
        self._move(0.1)

    def second_step(self) -> None:
        self._move(-0.1)
        self.step()

    @torch.no_grad()
    def _move(self, by: float) -> None:
        for param in self.state:
            param.add_(by)


class InTwo(torch.optim.Optimizer):
    """Steps by an optimizer inside, which has its groups, and the state."""

    def __init__(self, inner: torch.optim.Optimizer, *, is_made: bool) -> None:
        self.inner = inner
        if is_made:
            super().__init__(inner.param_groups, inner.defaults)
        else:
            self.param_groups, self.state, self.defaults = inner.param_groups, inner.state, inner.defaults

    def step(self, closure: Any = None) -> None:
        self.inner.step()


def trained(tmp_path: Path) -> tuple[Any, Averaging]:
    model, _, scheduler = plain_training(make_checkpoint("llama", tmp_path / "model", torch.float32), None)
    optimizer = Averaging(model.parameters(), lr=1e-2, momentum=0.9)
    train_plain(model, optimizer, scheduler, (0, 1))
    return model, optimizer


@pytest.mark.parametrize("calls", [["eval"], ["first_step", "second_step"]], ids=str)
@pytest.mark.sample(2)
def test_own_methods(tmp_path: Path, calls: list[str]) -> None:
    model, optimizer = trained(tmp_path)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    hf_zero_stream.save_state(model, tmp_path / "waited", optimizer=optimizer, **SHARDS)
    with held_save(tmp_path / "background", model, optimizer=optimizer) as pending:
        before = model.model.norm.weight.detach().clone()
        for name in calls:
            getattr(optimizer, name)()
        assert not torch.equal(before, model.model.norm.weight)
    pending.wait()
    assert tree(tmp_path / "background") == tree(tmp_path / "waited")
    assert not {*vars(optimizer)} & {"eval", "first_step", "second_step"}, "nothing is left on it"


def test_averages_that_are_swapped_in(tmp_path: Path) -> None:
    model, optimizer = trained(tmp_path)
    averaged = {name: value * 0.9 for name, value in model.state_dict().items()}
    hf_zero_stream.save_state(model, tmp_path / "waited", optimizer=optimizer, **SHARDS)
    with held_save(tmp_path / "background", model, optimizer=optimizer) as pending:
        model.load_state_dict(averaged)
        assert torch.equal(model.model.norm.weight, averaged["model.norm.weight"])
    pending.wait()
    assert tree(tmp_path / "background") == tree(tmp_path / "waited")


@pytest.mark.parametrize("is_compiled_before", [True, False])
@pytest.mark.sample(1)
def test_a_compiled_step(tmp_path: Path, is_compiled_before: bool) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01))
    step = torch.compile(optimizer.step, backend="aot_eager")
    for number in range(3):
        if number == 2:
            hf_zero_stream.save_state(model, tmp_path / "waited", optimizer=optimizer, max_shard_size="20KB")
            writing = held_save(tmp_path / "background", model, optimizer=optimizer)
            pending = writing.__enter__()
        optimizer.zero_grad()
        model(torch.ones(2, 64)).sum().backward()
        (step if is_compiled_before or number == 2 else optimizer.step)()
    writing.__exit__(None, None, None)
    pending.wait()
    same = [name for name in tree(tmp_path / "waited") if "training_state" in name or "rng" in name]
    hf_zero_stream.load_state(model, tmp_path / "background", optimizer=optimizer)
    loaded = [param.detach().clone() for param in model.parameters()]
    hf_zero_stream.load_state(model, tmp_path / "waited", optimizer=optimizer)
    assert same and all(torch.equal(*both) for both in zip(loaded, model.parameters(), strict=True))


@pytest.mark.parametrize("is_made", [True, False])
def test_an_optimizer_inside_another(tmp_path: Path, is_made: bool) -> None:
    model, inner = trained(tmp_path)
    optimizer = InTwo(inner, is_made=is_made)
    why = (
        "InTwo keeps an optimizer inside" if is_made else "InTwo is none that torch.optim.Optimizer.__init__ has made"
    )
    for asynchronous in (False, True):
        with pytest.raises(UnsupportedError, match=why):
            hf_zero_stream.save_state(model, tmp_path / "state", optimizer=optimizer, asynchronous=asynchronous)
    assert not (tmp_path / "state").exists()


class Empty(torch.nn.Module):
    """Has a parameter without elements, as some models of LeViT do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.empty = torch.nn.Linear(6, 6), torch.nn.Parameter(torch.empty(0, 4))


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_parameter_without_elements(tmp_path: Path, asynchronous: bool) -> None:
    """A new training, which has no moments yet, goes on with it; the state may be saved before the first step, too."""
    made = [(model, torch.optim.AdamW(model.parameters())) for model in (Empty(), Empty())]
    (model, optimizer), (new, other) = made
    hf_zero_stream.save_state(model, tmp_path / "new", optimizer=optimizer, asynchronous=asynchronous)
    (model.layer(torch.ones(2, 6)).sum() + model.empty.sum()).backward()
    optimizer.step()
    hf_zero_stream.save_state(model, tmp_path / "state", optimizer=optimizer, asynchronous=asynchronous)
    hf_zero_stream.load_state(new, tmp_path / "state", optimizer=other)
    assert torch.equal(new.layer.weight, model.layer.weight)
    assert other.state[new.empty]["exp_avg"].shape == (0, 4) and other.state[new.empty]["step"] == 1
    files = [*(tmp_path / "state").rglob("*.safetensors"), *(tmp_path / "state").rglob("*.json")]
    assert {path.stat().st_mode & 0o777 for path in files} == {files[-1].stat().st_mode & 0o777}, "rng's too"
