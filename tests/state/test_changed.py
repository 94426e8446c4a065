"""A state and what goes on from it do not fit, or something in between has changed: nothing is lost in silence."""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.optim import lr_scheduler

import hf_zero_stream
from hf_zero_stream.checkpoint.formats import UNFINISHED
from hf_zero_stream.errors import CheckpointError, ConfigError, SaveError, UnsupportedError
from hf_zero_stream.state import load as loading
from hf_zero_stream.state.plain import restored
from hf_zero_stream.state.record import StateRecord
from tests.support.cluster import run_ranks
from tests.support.training_state import all_in_one_group, engine_of, state_config, train
from tests.support.trainings import Training, tokens_of
from tests.support.zoo import Checkpoint


def made(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[Any, torch.optim.Optimizer]:
    """A model and its AdamW."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train_here(model: Any, optimizer: Any, steps: Sequence[int], all_since: int = 0) -> list[float]:
    """Losses of steps; before step `all_since` only the embeddings have gradients."""
    training, losses = Training(model, optimizer), []
    for step in steps:
        if step < all_since:
            loss = model.get_input_embeddings()(tokens_of(step)["input_ids"]).square().mean()
        else:
            loss = model(**tokens_of(step)).loss
        losses.append(training.step(loss))
    return losses


def save(model: Any, folder: Path, optimizer: Any, **kwargs: Any) -> None:
    hf_zero_stream.save_state(model, folder, optimizer=optimizer, **kwargs)


def load(model: Any, folder: Path, optimizer: Any, **kwargs: Any) -> Any:
    return hf_zero_stream.load_state(model, folder, optimizer=optimizer, **kwargs)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is warned of."""
    found: list[str] = []
    monkeypatch.setattr(loading.logger, "warning", found.append)
    return found


# ------------------------------------------------------------------------------------------------- weights and states


def values_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def same(model: Any, expected: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(param, expected[name]) for name, param in model.named_parameters())


@pytest.mark.parametrize("trains", ["all", "a few rows"])
def test_no_resume_reads_the_weights_beside_it(zoo_checkpoint: Checkpoint, tmp_path: Path, trains: str) -> None:
    """Those of a newer state, those that were saved alone, or none."""
    model, optimizer = made(zoo_checkpoint("llama"))
    if trains == "a few rows":  # of the embeddings, as where a vocabulary is extended
        optimizer = torch.optim.AdamW(model.get_input_embeddings().parameters(), lr=1e-2, weight_decay=0.0)
    states = {}
    for number in (2, 4):
        train_here(model, optimizer, range(number - 2, number), all_since=9 if trains == "a few rows" else 0)
        save(model, tmp_path, optimizer)
        states[f"global_step{number}"] = values_of(model)
    for change in (lambda: None, lambda: model.save_pretrained(tmp_path), (tmp_path / "model.safetensors").unlink):
        change()
        for tag, expected in states.items():
            train_here(model, optimizer, [4])
            load(model, tmp_path, optimizer, tag=tag)
            assert same(model, expected), tag


@pytest.mark.parametrize("saved_before", [False, True])
def test_a_state_alone(zoo_checkpoint: Checkpoint, tmp_path: Path, saved_before: bool) -> None:
    model, optimizer = made(zoo_checkpoint("llama"))
    train_here(model, optimizer, range(2))
    if saved_before:
        save(model, tmp_path / "before", optimizer)
    save(model, tmp_path / "alone", optimizer, with_weights=False)
    assert sorted(path.name for path in (tmp_path / "alone").iterdir()) == ["global_step2", "latest"]
    before = values_of(model)
    new, its_optimizer = made(zoo_checkpoint("llama"))
    load(new, tmp_path / "alone", its_optimizer)
    assert same(new, before)


def test_a_state_is_not_rounded_with_the_weights(zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    model, optimizer = made(zoo_checkpoint("llama"))
    train_here(model, optimizer, range(2))
    save(model, tmp_path, optimizer, dtype=torch.bfloat16)
    before = values_of(model)
    train_here(model, optimizer, [4])
    load(model, tmp_path, optimizer)
    assert same(model, before)
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path).dtype == torch.bfloat16


def test_another_optimizer_of_the_same_model(zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """States in several shards: each index names its own."""
    model, _ = made(zoo_checkpoint("llama"))
    for kind in (torch.optim.Adam, torch.optim.Adamax):
        optimizer = kind(model.parameters(), lr=1e-3)
        train_here(model, optimizer, range(2))
        save(model, tmp_path, optimizer, max_shard_size="40KB", tag="last", keep_older=False)
        before = values_of(model)
        train_here(model, optimizer, [4])
        load(model, tmp_path, optimizer)
        assert same(model, before)


def save_by_engine(folder: Path, target: Path) -> list[Any]:
    """Saves at steps 2 and 4 into one folder, and what is loaded of the older one without its optimizer."""
    engine = engine_of(folder, state_config(3), all_in_one_group)
    found = []
    with hf_zero_stream.streaming():
        for steps in (range(2), range(2, 4)):
            train(engine, steps)
            engine.save_checkpoint(str(target / "all"), client_state={"steps": steps[-1] + 1})
            engine.save_checkpoint(str(target / "best"), tag="best")
            found.append(losses_without_steps(engine))
        for kwargs in ({"load_optimizer_states": False}, {"load_module_only": True}):
            engine = engine_of(folder, state_config(3), all_in_one_group)
            for tag in ("global_step2", "global_step4"):
                _, client_state = engine.load_checkpoint(str(target / "all"), tag=tag, **kwargs)
                found.append(losses_without_steps(engine))
                found.append((client_state, engine.global_steps, engine.lr_scheduler.last_batch_iteration))
    return found


def losses_without_steps(engine: Any) -> float:
    engine.eval()
    with torch.no_grad():
        tokens = torch.arange(5, 15).view(1, -1)
        return float(engine(input_ids=tokens, labels=tokens).loss)


@pytest.mark.slow
def test_engine_without_its_optimizer(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """As DeepSpeed: the weights of the tag that is named, counters and the scheduler, what the client gave."""
    for found in run_ranks(2, save_by_engine, zoo_checkpoint("llama"), tmp_path):
        older, newer, *loaded = found
        assert older != newer and loaded[::2] == [older, newer] * 2
        assert loaded[1::2] == [
            ({"steps": 2}, 2, 1),
            ({"steps": 4}, 4, 3),
            ({"steps": 2}, 0, -1),
            ({"steps": 4}, 0, -1),
        ]
    assert sorted(path.name for path in (tmp_path / "all").glob("global_step*")) == ["global_step2", "global_step4"]
    assert [path.name for path in (tmp_path / "best").glob("*/global_step*")] == ["global_step4"], "replaced"


def test_older_states_go_when_the_new_one_is_complete(zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    model, optimizer = made(zoo_checkpoint("llama"))
    for number in range(3):
        train_here(model, optimizer, [number])
        save(model, tmp_path, optimizer, tag="last", keep_older=False, asynchronous=number == 2)
    hf_zero_stream.load_state(model, tmp_path, optimizer=optimizer)  # waits
    assert (tmp_path / "latest").read_text() == "last"
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["last"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_name_means_what_was_saved_last_under_it(
    zoo_checkpoint: Checkpoint, tmp_path: Path, asynchronous: bool
) -> None:
    """Whatever else is in the folder stays: other states, and a folder of this name that is no state."""
    model, optimizer = made(zoo_checkpoint("llama"))
    (tmp_path / "best").mkdir(parents=True)
    (tmp_path / "best" / "notes").write_text("mine")
    for number, tag in enumerate(("again", "other", "best", "again")):
        train_here(model, optimizer, [number])
        save(model, tmp_path, optimizer, tag=tag, data=number, asynchronous=asynchronous)
    for tag in ("again", None):
        assert hf_zero_stream.load_state(model, tmp_path, optimizer=optimizer, tag=tag).data == 3
    names = {path.name for path in tmp_path.iterdir() if path.is_dir()}
    assert names == {"again", "other", "best", "best.1"} and (tmp_path / "best" / "notes").exists()


def test_a_list_of_renames_reaches_nothing_elsewhere(zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """A folder from anywhere may have what looks like an interrupted save."""
    model, optimizer = made(zoo_checkpoint("llama"))
    save(model, tmp_path / "state", optimizer)
    kept = tmp_path / "kept"
    kept.write_text("mine")
    left = tmp_path / "state" / f"{UNFINISHED}0"
    left.mkdir()
    for order in (
        {"renames": [], "removes": ["../kept"]},
        {"renames": ["../../kept"], "removes": []},
        {"renames": [], "removes": [str(kept)]},
        {"renames": [], "removes_first": ["..", 3], "removes": []},
        [],
    ):
        (left / "renames.json").write_text(json.dumps(order))
        with pytest.raises(SaveError, match="expected (names of files|the list of an interrupted save)"):
            load(model, tmp_path / "state", optimizer)
        assert kept.read_text() == "mine"


# ------------------------------------------------------------------------------------------- parameters and optimizers

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.5),
    "AdamW, fused": lambda params: torch.optim.AdamW(params, lr=1e-2, amsgrad=True, maximize=True, fused=True),
    "Adam": lambda params: torch.optim.Adam(params, lr=torch.tensor(1e-2), foreach=False),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2, initial_accumulator_value=0.3),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=1e-2),
    "ASGD": lambda params: torch.optim.ASGD(params, lr=1e-2, t0=2),
    "Rprop": lambda params: torch.optim.Rprop(params, lr=1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_that_had_no_gradient_yet(zoo_checkpoint: Checkpoint, tmp_path: Path, name: str) -> None:
    """They begin as in a training that never stopped: the first momentum of SGD is the gradient, undampened."""
    losses = []
    for is_again in (False, True):
        model, _ = made(zoo_checkpoint("llama"))
        optimizer = OPTIMIZERS[name](model.parameters())
        if is_again:
            train_here(model, optimizer, [9])  # what the optimizer has by now must go
            load(model, tmp_path, optimizer)
        else:
            train_here(model, optimizer, range(2), all_since=2)
            save(model, tmp_path, optimizer)
        losses.append(train_here(model, optimizer, range(2, 6), all_since=3))
    assert losses[0] == losses[1]


class FusedAdam(torch.optim.Optimizer):
    """Has the options that DeepSpeed's has: no `amsgrad`."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0})


class DeepSpeedCPUAdam(FusedAdam):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.param_groups[0]["amsgrad"] = False


def test_a_third_moment_is_not_lost(zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Between Adams of several makers, of which not all have amsgrad."""
    model, _ = made(zoo_checkpoint("llama"))
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    train_here(model, optimizer, [0])
    save(model, tmp_path / "with", optimizer)
    save(model, tmp_path / "without", FusedAdam(model.parameters()))
    before = [param.clone() for param in model.parameters()]
    for kind in (FusedAdam, DeepSpeedCPUAdam):
        with pytest.raises(
            ConfigError, match=f"the saved one keeps .* max_exp_avg_sq .*, and {kind.__name__} has non"
        ):
            load(model, tmp_path / "with", kind(model.parameters()))
    with pytest.raises(ConfigError, match="AdamW keeps .* max_exp_avg_sq .*, and the saved one has none"):
        load(model, tmp_path / "without", optimizer)
    assert all(map(torch.equal, model.parameters(), before))
    plain = torch.optim.Adam(model.parameters())
    load(model, tmp_path / "with", plain)
    kept = plain.state[model.lm_head.weight]["max_exp_avg_sq"]
    assert torch.equal(kept, optimizer.state[model.lm_head.weight]["max_exp_avg_sq"]) and kept.any()


def test_adam_does_not_turn_adamw_into_itself(zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """As in torch's own ``load_state_dict``."""
    model, _ = made(zoo_checkpoint("llama"))
    save(model, tmp_path, torch.optim.Adam(model.parameters(), weight_decay=0.3))
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    load(model, tmp_path, optimizer)
    assert optimizer.param_groups[0]["weight_decay"] == 0.3 and optimizer.param_groups[0]["decoupled_weight_decay"]


def test_back_to_the_beginning(zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    model, optimizer = made(zoo_checkpoint("llama"))
    save(model, tmp_path, optimizer)
    losses = train_here(model, optimizer, range(3))
    load(model, tmp_path, optimizer)
    assert train_here(model, optimizer, range(3)) == losses


@pytest.mark.parametrize("thaws", ["before", "after"])
def test_frozen_for_a_while(zoo_checkpoint: Checkpoint, tmp_path: Path, thaws: str) -> None:
    """A parameter that is frozen when the state is saved keeps the moments of the steps before."""
    model, optimizer = made(zoo_checkpoint("llama"))
    train_here(model, optimizer, range(2))
    model.lm_head.weight.requires_grad_(False)
    train_here(model, optimizer, [2])
    save(model, tmp_path, optimizer)
    model.lm_head.weight.requires_grad_(True)
    losses = train_here(model, optimizer, (3, 4))
    model, optimizer = made(zoo_checkpoint("llama"))
    model.lm_head.weight.requires_grad_(thaws == "before")
    load(model, tmp_path, optimizer)
    model.lm_head.weight.requires_grad_(True)
    assert train_here(model, optimizer, (3, 4)) == losses


def test_a_group_that_is_not_trained_yet_keeps_its_rate(zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """A scheduler may compute the next rate from it, and does so when the group thaws."""

    def begun() -> Any:
        model, _ = made(zoo_checkpoint("llama"))
        head = model.lm_head.weight
        model.model.requires_grad_(False)
        optimizer = torch.optim.AdamW([{"params": model.model.parameters()}, {"params": [head]}], lr=1e-2)
        return model, optimizer, lr_scheduler.ExponentialLR(optimizer, 0.5)

    model, optimizer, scheduler = begun()
    for step in range(3):
        train_here(model, optimizer, [step])
        scheduler.step()
    save(model, tmp_path, optimizer, scheduler=scheduler)
    resumed, restored, rates = begun()
    load(resumed, tmp_path, restored, scheduler=rates)
    assert [group["lr"] for group in restored.param_groups] == [1e-2 / 8, 1e-2 / 8]
    losses = []
    for each, own, schedule in ((model, optimizer, scheduler), (resumed, restored, rates)):
        each.requires_grad_(True)
        losses.append([train_here(each, own, [step]) for step in (3, 4) for _ in [schedule.step()]])
    assert losses[0] == losses[1]


def test_another_order_of_parameters(zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    model, optimizer = made(zoo_checkpoint("llama"))
    train_here(model, optimizer, range(2))
    save(model, tmp_path, optimizer)
    losses = train_here(model, optimizer, (2, 3))
    model, _ = made(zoo_checkpoint("llama"))
    optimizer = torch.optim.AdamW([*model.parameters()][::-1], lr=1e-2)
    load(model, tmp_path, optimizer)
    assert train_here(model, optimizer, (2, 3)) == losses


@pytest.mark.parametrize("has_stepped", [False, True])
def test_another_order_of_elements(tmp_path: Path, has_stepped: bool) -> None:
    """In ``channels_last`` moments do not lie one element after the other, and are read all the same."""

    def begun(memory_format: torch.memory_format) -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(0)
        config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=3)
        model: Any = transformers.ResNetForImageClassification(config).train()
        model = model.to(memory_format=memory_format)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(model: Any, optimizer: torch.optim.Optimizer, number: int) -> Any:
        images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(number))
        loss = model(pixel_values=images, labels=torch.arange(4) % 3).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    model, optimizer = begun(torch.contiguous_format)
    step(model, optimizer, 0)
    save(model, tmp_path, optimizer)
    losses = [step(model, optimizer, number) for number in (1, 2)]
    model, optimizer = begun(torch.channels_last)
    if has_stepped:
        step(model, optimizer, 3)
    load(model, tmp_path, optimizer)
    assert [step(model, optimizer, number) for number in (1, 2)] == pytest.approx(losses, abs=1e-5)


def test_rounding_is_said(zoo_checkpoint: Checkpoint, tmp_path: Path, said: list[str]) -> None:
    model, optimizer = made(zoo_checkpoint("llama"))
    train_here(model, optimizer, range(2))
    save(model, tmp_path, optimizer)
    load(*(given := made(zoo_checkpoint("llama"), torch.bfloat16))[:1], tmp_path, given[1])
    assert len(said) == 1 and "are rounded to bfloat16" in said[0]


def test_schedulers_and_scalers_that_are_missing_are_named(
    zoo_checkpoint: Checkpoint, tmp_path: Path, said: list[str]
) -> None:
    model, optimizer = made(zoo_checkpoint("llama"))
    scheduler = lr_scheduler.StepLR(optimizer, 2)
    off, on = torch.amp.GradScaler("cpu", enabled=False), torch.amp.GradScaler("cpu")
    save(model, tmp_path / "with", optimizer, scheduler=scheduler, scaler=on)
    save(model, tmp_path / "without", optimizer, scaler=off)
    load(model, tmp_path / "with", optimizer, scheduler=scheduler, scaler=on)
    load(model, tmp_path / "without", optimizer, scaler=off)
    assert said == []
    load(model, tmp_path / "with", optimizer, scaler=off)
    load(model, tmp_path / "without", optimizer, scheduler=scheduler, scaler=on)
    expected = ("no scheduler was given to load it into", "no scheduler was saved", "no such loss scaler was saved")
    assert len(said) == 3 and all(text in found for text, found in zip(expected, said, strict=True))
    load(model, tmp_path / "with", optimizer, with_scheduler=False)
    assert len(said) == 3


def in_groups(model: Any, *groups: tuple[Callable[[str], bool], float]) -> torch.optim.Optimizer:
    """An AdamW with a group for the parameters whose names are of each kind, with its weight decay."""
    named = [*model.named_parameters()]
    return torch.optim.AdamW(
        [
            {"params": [param for name, param in named if is_of(name)], "weight_decay": decay}
            for is_of, decay in groups
        ],
        lr=1e-2,
    )


def test_groups_that_are_made_anew(zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Options belong to parameters: groups may be split, put together where theirs are the same, and change places."""

    def is_norm(name: str) -> bool:
        return "norm" in name

    def is_attention(name: str) -> bool:
        return "attn" in name

    model, _ = made(zoo_checkpoint("llama"))
    optimizer = in_groups(model, (lambda name: not is_norm(name), 0.3), (is_norm, 0.0))
    train_here(model, optimizer, range(2))
    save(model, tmp_path, optimizer)
    losses = train_here(model, optimizer, (2, 3))
    model, _ = made(zoo_checkpoint("llama"))
    rest = (lambda name: not is_norm(name) and not is_attention(name), 0.7)
    optimizer = in_groups(model, (is_norm, 0.5), (is_attention, 0.7), rest)
    load(model, tmp_path, optimizer)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.3, 0.3]
    assert train_here(model, optimizer, (2, 3)) == pytest.approx(losses, rel=1e-6)
    model, _ = made(zoo_checkpoint("llama"))
    with pytest.raises(ConfigError, match="group 0 .* parameters of several groups .* with other weight_decay"):
        load(model, tmp_path, in_groups(model, (lambda name: True, 0.3)))


# --------------------------------------------------------------------------------------------------------- the record

RECORDS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "deep": (lambda it: "[" * 100_000, "expected a JSON object"),
    "deep inside": (lambda it: '{"data":' + "[" * 100_000 + "]" * 100_000 + "}", "maximum recursion depth"),
    "no object": (lambda it: "[]", "expected a JSON object"),
    "a field twice": (lambda it: '{"version": 1, "version": 1}', "occurs twice"),
    "groups": (lambda it: it.update(groups="abc"), "entries are not those of a training state"),
    "options": (lambda it: it["groups"][0].update(options=3), r"groups\[0\].options"),
    "a rate": (lambda it: it["groups"][0]["options"].update(lr="fast"), "lr: expected something like 0.01"),
    "betas": (lambda it: it["groups"][0]["options"].update(betas=[1]), "betas: expected something like"),
    "parameters": (lambda it: it["groups"][0].update(parameters="abc"), r"groups\[0\].parameters"),
    "no forms": (lambda it: it.update(forms=3), "entries are not those of a training state"),
    "a form that is not there": (lambda it: it["groups"][0]["forms"].__setitem__(0, 9), r"groups\[0\].forms"),
    "too few forms": (lambda it: it["groups"][0].update(forms=[0]), r"groups\[0\].forms"),
    "no number": (lambda it: it["forms"][0]["small"].update(step="x"), "step: expected a number of steps"),
    "no tensor": (
        lambda it: it["forms"][0]["small"]["step"].update({"(tensor)": 3}),
        "expected a tensor of one element",
    ),
    "a huge number": (
        lambda it: it["forms"][0]["small"]["step"]["(tensor)"].update(value=10**400),
        "expected a tensor of one element",
    ),
    "a kind": (lambda it: it["forms"][0]["each"].update(exp_avg="float33"), r"forms\[0\]"),
    "a part": (lambda it: it.update(parts={"a": {"tensors": {"a": [3]}, "values": {}}}), r"parts\[a\]"),
    "own options": (lambda it: it["groups"][0].update(own=[3]), r"groups\[0\].own"),
    "shapes": (lambda it: it["groups"][0].update(shapes=[5]), r"groups\[0\].shapes"),
    "counters": (lambda it: it.update(counters={"global_steps": "x"}), "counters: expected what save_state writes"),
    "a scheduler": (lambda it: it.update(scheduler={"class": "StepLR", "state": 3}), "scheduler: expected"),
    "a scaler": (lambda it: it.update(scaler=3), "scaler: expected"),
    "a path": (lambda it: it.update(keys=["../../x"]), "keys: expected"),
    "a state twice": (lambda it: it.update(keys=it["keys"] * 2), "each once"),
    "ranks": (lambda it: it.update(world_size="2"), "world_size: expected"),
    "a batch": (lambda it: it.update(batch_size="2"), "batch_size: expected"),
    "pairs": (lambda it: it.update(data={"(key, value)": 3}), "expected dicts as save_state writes them"),
    "a tuple": (lambda it: it.update(data={"(tuple)": 3}), "expected dicts as save_state writes them"),
    "a tensor": (lambda it: it.update(data={"(dtype, shape, base64)": 3}), "expected dicts as save_state writes them"),
    "keys that are lists": (lambda it: it.update(data={"(key, value)": [[[1], 2]]}), "expected dicts as save_state"),
    "more": (lambda it: it.update(more=1), "unexpected keyword argument 'more'"),
}


@pytest.fixture(scope="module")
def small_state(zoo_checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Path]:
    """A model, its optimizer, and the folder of their state."""
    model, optimizer = made(zoo_checkpoint("llama"))
    train_here(model, optimizer, [0])
    folder = tmp_path_factory.mktemp("state")
    save(model, folder, optimizer, max_shard_size="20KB")
    return model, optimizer, folder


@pytest.mark.parametrize("name", RECORDS)
def test_records_from_anywhere(small_state: tuple[Any, Any, Path], name: str) -> None:
    """Whatever a record says, it is refused by an error of ours, before anything is read."""
    model, optimizer, folder = small_state
    path = folder / "global_step1" / "training_state.json"
    text, (change, expected) = path.read_text(), RECORDS[name]
    record = json.loads(text)
    changed = change(record)
    path.write_text(changed if isinstance(changed, str) else json.dumps(record))
    before = [param.clone() for param in model.parameters()]
    try:
        with pytest.raises(CheckpointError, match=expected):
            load(model, folder, optimizer)
    finally:
        path.write_text(text)
    assert all(map(torch.equal, model.parameters(), before))


@pytest.mark.parametrize("latest", ["", ".", "..", "a/b", "../state", "a\0b", "x" * 5000, "global_step9"])
def test_latest_from_anywhere(small_state: tuple[Any, Any, Path], latest: str) -> None:
    model, optimizer, folder = small_state
    (folder / "latest").write_text(latest)
    try:
        with pytest.raises(CheckpointError, match="expected the (name of a folder|record of a state)"):
            load(model, folder, optimizer)
    finally:
        (folder / "latest").write_text("global_step1")


FILES: dict[str, Callable[[Path], object]] = {
    "rng.safetensors": Path.unlink,
    "state.safetensors.index.json": lambda path: path.write_text("[" * 100_000),
    "state-00001-of-*.safetensors": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "state-00002-of-*.safetensors": Path.unlink,
}


@pytest.mark.parametrize("pattern", FILES)
def test_damaged_files(small_state: tuple[Any, Any, Path], pattern: str) -> None:
    model, optimizer, folder = small_state
    (path,) = (folder / "global_step1").glob(pattern)
    content = path.read_bytes()
    FILES[pattern](path)
    try:
        with pytest.raises(CheckpointError, match=path.name):
            load(model, folder, optimizer)
    finally:
        path.write_bytes(content)


def test_data_comes_back(small_state: tuple[Any, Any, Path], tmp_path: Path) -> None:
    model, optimizer, _ = small_state
    data = {"a": [1, 2.5], 3: {True: None}, "(key, value)": {"(key, value)": [1]}, "inf": float("inf"), "é": "\u20ac"}
    data |= {"pair": (1, ("a", [2])), "like one": {"(tuple)": [1]}, 4: ()}
    save(model, tmp_path, optimizer, data=data)
    assert load(model, tmp_path, optimizer).data == data
    for refused in ("\ud800", torch.nn.Parameter(torch.ones(1))):
        with pytest.raises(UnsupportedError, match="data: expected numbers, strings"):
            save(model, tmp_path, optimizer, data=[refused])


def test_data_of_ranks(small_state: tuple[Any, Any, Path], tmp_path: Path, said: list[str]) -> None:
    """They are those of the rank; one that was not there gets rank 0's, and fewer ranks are told."""
    model, optimizer, _ = small_state
    save(model, tmp_path, optimizer)
    path = next(tmp_path.glob("*/training_state.json"))
    record = replace(StateRecord.read(path), world_size=2)
    record = record.with_own_of([{**record.own, "data": data} for data in ({"(tuple)": [7]}, "mine")])
    assert [restored(record.for_rank(rank).data) for rank in range(3)] == [(7,), "mine", (7,)]
    path.write_text(record.to_json())
    assert load(model, tmp_path, optimizer).data == (7,)
    assert any("2 ranks saved different values of data (1 in all), and there are 1 now" in it for it in said), said
    assert record.with_own_of([record.own] * 2).of_ranks == {}


def test_normal_numbers_go_on(small_state: tuple[Any, Any, Path], tmp_path: Path) -> None:
    """Python and NumPy make two of them at once, and keep the second one."""
    model, optimizer, _ = small_state
    random.gauss(0, 1), np.random.randn(), torch.randn(1)
    save(model, tmp_path, optimizer)
    expected = random.gauss(0, 1), np.random.randn(), torch.randn(3).tolist()
    load(model, tmp_path, optimizer)
    assert (random.gauss(0, 1), np.random.randn(), torch.randn(3).tolist()) == expected
