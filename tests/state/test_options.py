"""What optimizers and schedulers keep in their groups.

- Whatever an optimizer has put into its groups comes back at a resume, or is refused by name.
- A scheduler that was stepped once for each rank goes on at the place that the samples seen by then mean.
"""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import transformers
from torch.optim import lr_scheduler
from transformers.distributed import DistributedConfig

import hf_zero_stream
from hf_zero_stream.errors import CheckpointError, ConfigError, UnsupportedError
from hf_zero_stream.state import schedules
from tests.state.test_changed import load, made, save, train_here
from tests.support.cluster import run_ranks
from tests.support.training_state import state_config, train, train_plain
from tests.support.zoo import Checkpoint


class GroupStepAdam(torch.optim.Optimizer):
    """Counts the steps of a group in an option that its first step makes, as apex's FusedAdam does."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8})

    def counted(self, group: dict[str, Any]) -> Any:
        group["step"] = group["step"] + 1 if "step" in group else 1
        return group["step"]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            step, (first, second) = self.counted(group), group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
                state["exp_avg"].lerp_(param.grad, 1 - first)
                state["exp_avg_sq"].mul_(second).addcmul_(param.grad, param.grad, value=1 - second)
                mean, root = state["exp_avg"] / (1 - first**step), (state["exp_avg_sq"] / (1 - second**step)).sqrt()
                param.sub_(mean / (root + group["eps"]) * group["lr"])


class Capturable(GroupStepAdam):
    """Has options of every kind, and numbers that are tensors: its own steps need their kinds."""

    def counted(self, group: dict[str, Any]) -> Any:
        if "step" not in group:
            group |= {"step": torch.zeros(1, dtype=torch.int64), "window": (1, (2.5, "x")), "seen": [], "best": None}
            group |= {"bound": float("inf"), "mode": "max", "by_size": {3: (4,)}, "scale": torch.tensor(0.5)}
        group["step"].add_(1)
        group["seen"].append(len(group["seen"]))
        assert group["window"][1][1] == "x" and group["by_size"][3] == (4,)
        for param in group["params"]:
            count = self.state[param].setdefault("count", torch.zeros((), dtype=torch.int32))
            count.add_(1)
            self.state[param].setdefault("exp_avg", torch.zeros_like(param))
            self.state[param].setdefault("exp_avg_sq", torch.zeros_like(param))
        return group["step"].item()


OPTIMIZERS: dict[str, type[GroupStepAdam]] = {"a number": GroupStepAdam, "every kind": Capturable}


def engines_group(model: Any) -> list[dict[str, Any]]:
    return [{"params": list(model.parameters())}]


def options(group: dict[str, Any]) -> dict[str, Any]:
    return copy.deepcopy({name: value for name, value in group.items() if name not in ("params", "param_names")})


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_one_rank(zoo_checkpoint: Checkpoint, tmp_path: Path, kind: str) -> None:
    """Options and numbers come back with their kinds, and losses are those of a training that never stopped."""
    model, _ = made(zoo_checkpoint("llama"))
    optimizer = OPTIMIZERS[kind](model.parameters())
    train_here(model, optimizer, range(3))
    save(model, tmp_path, optimizer)
    kept, numbers = options(optimizer.param_groups[0]), dict(optimizer.state[model.lm_head.weight])
    losses = train_here(model, optimizer, range(3, 6))
    model, _ = made(zoo_checkpoint("llama"))
    optimizer = OPTIMIZERS[kind](model.parameters())
    load(model, tmp_path, optimizer)
    found = options(optimizer.param_groups[0])
    assert repr(dict(sorted(found.items()))) == repr(dict(sorted(kept.items())))
    if kind == "every kind":
        count = optimizer.state[model.lm_head.weight]["count"]
        assert count.dtype == numbers["count"].dtype and count.shape == () and count == 3
    assert train_here(model, optimizer, range(3, 6)) == losses


def test_a_step_that_was_not_made_yet(zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """What steps have put into a group goes, as their moments do; what the user has given it stays."""
    model, _ = made(zoo_checkpoint("llama"))
    optimizer = GroupStepAdam(model.parameters())
    save(model, tmp_path, optimizer)
    losses = train_here(model, optimizer, range(3))
    load(model, tmp_path, optimizer)
    assert "step" not in optimizer.param_groups[0]
    assert train_here(model, optimizer, range(3)) == losses
    fresh = GroupStepAdam([{"params": list(model.parameters()), "scale": 0.5}])
    lr_scheduler.StepLR(fresh, 2)
    load(model, tmp_path, fresh)
    assert fresh.param_groups[0]["scale"] == 0.5 and "initial_lr" in fresh.param_groups[0]


def steps_of_homes(folder: Path, target: Path, homes: list[Any], saves: bool, by_engine: bool) -> Any:
    """Losses after two steps and a save, or after a resume; a home is ZeRO's stage, or sizes of ``fsdp``."""
    found = []
    for number, home in enumerate(homes):
        place = target / str(number)
        if isinstance(home, dict):
            with hf_zero_stream.streaming():
                model = transformers.AutoModelForCausalLM.from_pretrained(
                    folder, dtype=torch.float32, distributed_config=DistributedConfig(**home)
                )
            optimizer = GroupStepAdam(engines_group(model))
            training = (model, optimizer, lr_scheduler.ConstantLR(optimizer, 1.0))
            if saves:
                train_plain(*training, range(2))
                hf_zero_stream.save_state(model, place, optimizer=optimizer)
            else:
                hf_zero_stream.load_state(model, place, optimizer=optimizer)
            found.append(train_plain(*training, (2, 3, 4)))
            continue
        config = {**state_config(home, torch.float32)}
        del config["optimizer"], config["scheduler"]
        with hf_zero_stream.streaming():
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, ds_config=config)
            engine, *_ = deepspeed.initialize(
                model=model, optimizer=GroupStepAdam(engines_group(model)), config=config
            )
            if saves:
                train(engine, range(2))
                engine.save_checkpoint(str(place))
            else:
                engine.load_checkpoint(str(place))
        if saves and by_engine:
            engine.save_checkpoint(f"{place} stock")
        found.append(train(engine, (2, 3, 4)))
    return found


HOMES = [3, 2, 1, 0, {"fsdp_size": 2}]


@pytest.mark.slow
def test_homes(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = zoo_checkpoint("llama")
    saved = run_ranks(2, steps_of_homes, folder, tmp_path, HOMES, True, False, timeout=200)
    assert run_ranks(2, steps_of_homes, folder, tmp_path, HOMES, False, False, timeout=200) == saved
    for number, home in enumerate(HOMES):
        (record,) = (tmp_path / str(number)).glob("*/training_state.json")
        assert json.loads(record.read_text())["groups"][0]["options"]["step"] == 2, home


def steps_after(folder: Path, source: Path, stage: int) -> int:
    config = {**state_config(stage, torch.float32)}
    del config["optimizer"], config["scheduler"]
    with hf_zero_stream.streaming():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, ds_config=config)
        engine, *_ = deepspeed.initialize(model=model, optimizer=GroupStepAdam(engines_group(model)), config=config)
        engine.load_checkpoint(str(source))
    return int(engine.optimizer.optimizer.param_groups[0]["step"])


@pytest.mark.slow
def test_from_deepspeeds_own_folders(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """At another number of ranks, where we read them."""
    folder = zoo_checkpoint("llama")
    run_ranks(2, steps_of_homes, folder, tmp_path, [3, 1], True, True)
    for number, stage in enumerate((3, 1)):
        assert run_ranks(3, steps_after, folder, tmp_path / f"{number} stock", stage) == [2] * 3


# --------------------------------------------------------------------------------------------- Adams of other makers


def adam_of(name: str, module: str, **defaults: Any) -> Callable[[Any], torch.optim.Optimizer]:
    """An Adam with the options of DeepSpeed's, of the class and module of these names."""
    made = type(name, (torch.optim.Optimizer,), {"__module__": module, "adam_w_mode": defaults.pop("mode", True)})
    return lambda params: made(
        params, {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, **defaults}
    )


FUSED = adam_of("FusedAdam", "deepspeed.ops.adam.fused_adam", bias_correction=True)
CPU = adam_of("DeepSpeedCPUAdam", "deepspeed.ops.adam.cpu_adam", bias_correction=True, amsgrad=False)
UNCORRECTED = adam_of("FusedAdam", "deepspeed.ops.adam.fused_adam", bias_correction=False)
APEX = adam_of("FusedAdam", "apex.optimizers.fused_adam", bias_correction=True)
L2 = adam_of("DeepSpeedCPUAdam", "deepspeed.ops.adam.cpu_adam", bias_correction=True, amsgrad=False, mode=False)


def adamw(**options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1, **options)


PAIRS: dict[str, tuple[Any, Any, str]] = {
    "maximize": (adamw(maximize=True), FUSED, "maximize was True .*FusedAdam has no such option"),
    "maximize now": (FUSED, adamw(maximize=True), "maximize was False .*the saved one has no such option"),
    "no correction": (UNCORRECTED, adamw(), "bias_correction was False .*AdamW has no such option"),
    "no correction now": (adamw(), UNCORRECTED, "bias_correction was True .*the saved one has no such option"),
    "decoupled": (adamw(), L2, "weight decay was AdamW's.*Make it with adam_w_mode=True"),
    "L2": (lambda it: torch.optim.Adam(it, weight_decay=0.1), FUSED, "was Adam's.*Make it with adam_w_mode=False"),
    "steps of a group now": (adamw(), APEX, "counted the steps of each parameter, and FusedAdam counts those of a"),
    "fused": (adamw(), FUSED, ""),
    "CPU": (adamw(foreach=True), CPU, ""),
    "torch's": (FUSED, adamw(), ""),
    "fused and CPU": (FUSED, CPU, ""),
    "Adam": (adamw(maximize=True), lambda it: torch.optim.Adam(it), ""),
}


@pytest.mark.parametrize("name", PAIRS)
def test_adams_go_on_in_each_other(zoo_checkpoint: Checkpoint, tmp_path: Path, name: str) -> None:
    """If the other one would make the same steps; and options that it does not know are not put into its groups."""
    before, after, expected = PAIRS[name]
    model, _ = made(zoo_checkpoint("llama"))
    optimizer = before(engines_group(model))
    optimizer.param_groups[0]["mine"] = ("a", 1)
    if type(optimizer).__module__.startswith("torch."):
        train_here(model, optimizer, [0])
    save(model, tmp_path, optimizer)
    other = after(engines_group(model))
    known = {*other.param_groups[0], "mine"}
    if expected:
        with pytest.raises(ConfigError, match=expected):
            load(model, tmp_path, other)
    else:
        load(model, tmp_path, other)
        assert {*other.param_groups[0]} == known and other.param_groups[0]["mine"] == ("a", 1)
        assert all(
            other.param_groups[0][it] == optimizer.param_groups[0][it] for it in ("lr", "betas", "weight_decay")
        )


def test_steps_of_a_group_are_not_lost_by_another_adam(zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    model, _ = made(zoo_checkpoint("llama"))
    optimizer = type("FusedAdam", (GroupStepAdam,), {})(model.parameters())
    train_here(model, optimizer, [0])
    save(model, tmp_path, optimizer)
    with pytest.raises(ConfigError, match="counted the steps of a group, and AdamW counts those of each parameter"):
        load(model, tmp_path, torch.optim.AdamW(model.parameters()))


# ------------------------------------------------------------------------------------------------------- no place for


def test_a_state_beside_the_parameters(zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """What is kept under a name, or in a state dict of the optimizer's own, is not left out in silence."""

    class Named(GroupStepAdam):
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "history": [1]}

    model, optimizer = made(zoo_checkpoint("llama"))
    for other, name in ((Named(model.parameters()), "history"), (optimizer, "global_state")):
        if other is optimizer:
            optimizer.state["global_state"]["step"] = 3  # type: ignore[index]
        with pytest.raises(UnsupportedError, match=f"keeps {name} beside its groups"):
            save(model, tmp_path, other)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "value",
    [
        3,
        {},
        {"value": 1, "dtype": "load", "shape": [], "on_host": True},
        {"value": "x", "dtype": "int64", "shape": []},
    ],
    ids=repr,
)
def test_options_from_anywhere(zoo_checkpoint: Checkpoint, tmp_path: Path, value: Any) -> None:
    model, optimizer = made(zoo_checkpoint("llama"))
    save(model, tmp_path, optimizer)
    path = next(tmp_path.glob("*/training_state.json"))
    record = json.loads(path.read_text())
    record["groups"][0]["options"]["mine"] = {"(tensor)": value}
    path.write_text(json.dumps(record))
    with pytest.raises(CheckpointError, match="the option mine .*: expected a tensor of one element"):
        load(model, tmp_path, optimizer)


def test_schedulers_keep_their_kinds(zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    model, optimizer = made(zoo_checkpoint("llama"))
    scheduler = lr_scheduler.MultiStepLR(optimizer, [1, 3, 3])
    save(model, tmp_path, optimizer, scheduler=scheduler)
    other = lr_scheduler.MultiStepLR(optimizer, [2])
    load(model, tmp_path, optimizer, scheduler=other)
    assert other.milestones == scheduler.milestones and type(other.milestones) is type(scheduler.milestones)


def stepping(make: Callable[[Any], Any]) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    return optimizer, make(optimizer)


def stepped(make: Callable[[Any], Any], steps: int) -> Any:
    optimizer, scheduler = stepping(make)
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
    optimizer, scheduler = stepping(make(20 * 6 // batch))
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

    _, scheduler = stepping(sequence)
    saved = {"class": "SequentialLR", "state": {}, "steps_per_step": 2}
    with pytest.raises(
        ConfigError, match="stepped 2 times for each step of the optimizer, and is 1 times now.*batch_size"
    ):
        schedules.refuse_other(scheduler, saved, None, 6, "here")
    with pytest.raises(UnsupportedError, match="rates of a SequentialLR follow from all steps before"):
        schedules.refuse_other(scheduler, saved, 6, 6, "here")
    with pytest.raises(ConfigError, match="was a StepLR, and is a SequentialLR now"):
        schedules.refuse_other(scheduler, {**saved, "class": "StepLR"}, 6, 6, "here")
