"""What states cannot have is refused by name.

- What cannot be saved or loaded as a training state is refused by name, on all ranks, before anything is touched.
- What an engine trains or keeps and a state has no place for is named, and nothing is written.
- What neither we nor the checkpoints of DeepSpeed or accelerate bring back is an error, and no checkpoint.
"""

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.conversion_mapping import register_checkpoint_conversion_mapping

import hf_zero_stream
from hf_zero_stream.errors import HfZeroStreamError
from hf_zero_stream.state import foreign
from tests.saving.test_conversions import CONVERSIONS, OddConfig, OddModel
from tests.state.optimizers import parameters_of, training_in
from tests.support.cluster import run_ranks, run_ranks_expecting_errors
from tests.support.fsdp2 import announce, load, make_accelerator
from tests.support.parity import ds_config
from tests.support.training_state import (
    accelerated_steps,
    all_in_one_group,
    engine_of,
    frozen_embeddings,
    plain_training,
    state_config,
    train,
    train_plain,
)
from tests.support.zoo import Checkpoint


def message_of(work: Callable[[], Any]) -> str:
    """The class and the message of the error that `work` raises, of all ranks if they differ."""
    try:
        work()
    except HfZeroStreamError as error:
        mine = f"{type(error).__name__}: {error}"
    else:
        mine = "no error"
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return mine if len({text.partition(":")[0] for text in everyone}) == 1 else " | ".join(everyone)


def with_state(
    optimizer: torch.optim.Optimizer, key: Any, value: Callable[[torch.Tensor], Any], on: list[int]
) -> None:
    """Have the optimizer keep `value` too, of its first parameter, on some ranks only."""
    if dist.get_rank() in on:
        param = optimizer.param_groups[0]["params"][0]
        optimizer.state[param][key] = value(param)


class PackedBits(torch.Tensor):
    """As torchao's states of 8 bits: it says that it is as the parameter, and keeps codes and scales."""


def refused_saves(folder: Path, target: Path) -> dict[str, str]:
    found = {}
    cases: dict[str, tuple[Any, Callable[[torch.Tensor], Any], list[int]]] = {
        "another shape, sharded": ("rows", lambda param: torch.zeros_like(param)[:2], [0, 1]),
        "8 bit": ("state1", lambda param: torch.zeros(param.to_local().shape).as_subclass(PackedBits), [0, 1]),
        "sparse": ("mask", lambda param: torch.zeros(param.to_local().shape).to_sparse(), [0, 1]),
        "complex": ("phase", lambda param: torch.zeros_like(param, dtype=torch.complex64), [0, 1]),
        "columns first": ("rows", lambda param: torch.zeros(param.to_local().t().shape).t(), [0, 1]),
        "a name of ours": ("values", lambda param: torch.zeros_like(param), [0, 1]),
        "no name": (3, lambda param: torch.zeros_like(param), [0, 1]),
        "an object": ("projector", lambda param: object(), [0, 1]),
        "another kind of dict": ("counts", lambda param: Counter(a=1), [0, 1]),
        "lists": ("preconditioners", lambda param: [torch.eye(2)], [0, 1]),
        "steps of a rank": ("step", lambda param: torch.tensor(float(dist.get_rank())), [0, 1]),
    }
    model, optimizer, scheduler = plain_training(folder, {"fsdp_size": 2})
    train_plain(model, optimizer, scheduler, [0])
    for name, (key, value, ranks) in cases.items():
        with_state(optimizer, key, value, ranks)
        found[name] = message_of(lambda: hf_zero_stream.save_state(model, target, optimizer=optimizer))
        for state in optimizer.state.values():
            state.pop(key, None)
    optimizer.state[torch.nn.Parameter(torch.ones(2))] = {"step": 1}
    found["another tensor"] = message_of(lambda: hf_zero_stream.save_state(model, target, optimizer=optimizer))
    return found


def computed_weights(checkpoint: Path, target: Path) -> tuple[str, bool]:
    """Of a model whose weights transformers scales and sorts to save them: an error, and whether masters come back."""
    register_checkpoint_conversion_mapping("odd_to_save", CONVERSIONS, overwrite=True)
    if dist.get_rank() == 0:
        OddModel(OddConfig()).save_pretrained(checkpoint)
    dist.barrier()
    config = state_config(3)
    with hf_zero_stream.streaming():
        model = OddModel.from_pretrained(checkpoint, dtype=torch.bfloat16, ds_config=config)
    engine, *_ = deepspeed.initialize(model=model, config=config)
    message = message_of(lambda: hf_zero_stream.save_state(engine, target))
    masters = engine.optimizer.fp32_partitioned_groups_flat
    saved = [master.clone() for master in masters]
    for master in masters:
        master.data.zero_()
    hf_zero_stream.load_state(engine, target)
    return message, all(map(torch.equal, masters, saved))


def test_masters_of_computed_weights(cluster: None, tmp_path: Path) -> None:
    """States lie as the parameters do, whatever becomes of the weights beside them."""
    assert run_ranks(2, computed_weights, tmp_path / "odd", tmp_path / "state") == [("no error", True)] * 2


def test_saves(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    expected = {
        "another shape, sharded": r"UnsupportedError: The optimizer keeps rows, .*, for model.*, a DTensor of shape",
        "8 bit": "UnsupportedError: The optimizer keeps state1, .*It is a PackedBits",
        "sparse": "UnsupportedError: The optimizer keeps mask, .*It is sparse",
        "complex": "UnsupportedError: The optimizer keeps phase, .*complex",
        "columns first": "UnsupportedError: The optimizer keeps rows, .*row-major order",
        "a name of ours": "UnsupportedError: The optimizer keeps 'values' for model",
        "no name": "UnsupportedError: The optimizer keeps 3 for model",
        "an object": "UnsupportedError: the optimizer's projector of model.*: expected numbers",
        "another kind of dict": "UnsupportedError: the optimizer's counts of .* would not come back as it is",
        "lists": "UnsupportedError: the optimizer's preconditioners of .*, a list, has tensors in it",
        "another tensor": "UnsupportedError: AdamW keeps a state of a tensor of shape .*in none of its groups",
        "steps of a rank": "UnsupportedError: The ranks have not made the same number of steps",
    }
    for found in run_ranks(2, refused_saves, zoo_checkpoint("llama"), tmp_path / "state"):
        for name, pattern in expected.items():
            assert re.match(pattern, found[name]), (name, found[name])
    assert not (tmp_path / "state").exists()


def fall_back(folder: Path, target: Path) -> dict[str, str]:
    """A state that was saved; what a hook saves in the middle of accumulation; and what then cannot be loaded."""
    said: list[str] = []
    foreign.logger.warning_once = said.append  # type: ignore[method-assign]
    config = {**state_config(3), "gradient_accumulation_steps": 2}
    engine = engine_of(folder, config, all_in_one_group)
    train(engine, range(2))
    hf_zero_stream.save_state(engine, target / "state")
    train(engine, [2])
    with hf_zero_stream.streaming():
        engine.save_checkpoint(str(target / "theirs"))
    found: dict[str, str] = {}
    load = hf_zero_stream.load_state
    found["in the middle"] = message_of(lambda: load(engine, target / "state"))
    found["saving in the middle"] = message_of(lambda: hf_zero_stream.save_state(engine, target / "middle"))
    train(engine, [3])
    before = [value.clone() for value in trained_values(engine)]
    place = target / "state" / "global_step1"
    (shard,) = place.glob("state*.safetensors")
    dist.barrier()

    def without(path: Path, change: Callable[[], Any]) -> str:
        kept = path.with_suffix(".kept")
        if dist.get_rank() == 0:
            shutil.copy(path, kept)
            change()
        dist.barrier()
        message = message_of(lambda: load(engine, target / "state"))
        if dist.get_rank() == 0:
            shutil.move(kept, path)
        dist.barrier()
        return message

    def with_other_shape() -> None:
        record = json.loads((place / "training_state.json").read_text())
        record["groups"][0]["shapes"][0][0] += 1
        (place / "training_state.json").write_text(json.dumps(record))

    found["a shard is gone"] = without(shard, shard.unlink)
    found["other shapes"] = without(place / "training_state.json", with_other_shape)
    found["masters are gone"] = without(shard, lambda: drop_a_tensor(place))
    found["nothing was read"] = str(all(map(torch.equal, before, trained_values(engine))))
    other = engine_of(folder, config, frozen_embeddings)
    found["other parameters"] = message_of(lambda: load(other, target / "state"))
    shared = torch.ones(4)
    for layer in other.module.model.layers:  # transformers alone would not save these
        layer.register_buffer("scale", shared)
    with hf_zero_stream.streaming():
        other.save_checkpoint(str(target / "shared"))
    found["shared buffers"] = str([*(target / "shared").glob("*/training_state.json")])
    found["said"] = " | ".join(said)
    return found


def trained_values(engine: Any) -> list[torch.Tensor]:
    """Masters and moments of this rank."""
    masters = engine.optimizer.fp32_partitioned_groups_flat
    moments = [engine.optimizer.optimizer.state[flat]["exp_avg"] for flat in masters]
    return [*masters, *moments]


def drop_a_tensor(place: Path) -> None:
    (path,) = place.glob("state*.safetensors")
    tensors = load_file(path)
    del tensors["values/model.norm.weight"]
    save_file(tensors, path, metadata={"format": "pt"})


def test_loads_and_what_falls_back(
    cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    expected = {
        "in the middle": "UnsupportedError: load_state: gradients are being accumulated",
        "saving in the middle": "UnsupportedError: save_state: gradients are being accumulated",
        "a shard is gone": "CheckpointError: .*state.*this file of the training state is gone",
        "other shapes": "CheckpointError: .* had shape .* when the state was saved",
        "masters are gone": "LoadError: .*values of 1 parameters that are trained are not there: model.norm.weight",
        "other parameters": "ConfigError: .*the optimizer trained 21 parameters, and trains 20 now",
        "nothing was read": "True",
        "shared buffers": ".*training_state.json",
    }
    found = run_ranks(2, fall_back, zoo_checkpoint("llama"), tmp_path)
    for of_rank in found:
        for name, pattern in expected.items():
            assert re.match(pattern, of_rank[name]), (name, of_rank[name])
    assert "saved by DeepSpeed, in its own format: save_state: gradients" in found[0]["said"]
    assert found[1]["said"] == ""
    assert list((tmp_path / "theirs").glob("*/zero_pp_rank_*")) and not (tmp_path / "middle").exists()
    assert "LOAD REPORT" not in capfd.readouterr().err


def small_engine(stage: int, dtype: torch.dtype, *more: nn.Parameter) -> Any:
    from deepspeed.accelerator import get_accelerator

    type(get_accelerator()).is_fp16_supported = lambda self: True  # type: ignore[method-assign]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    config = ds_config(dtype)
    config["zero_optimization"] = {"stage": stage}
    config["fp16"] = {"enabled": dtype == torch.float16}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=[*model.parameters(), *more], config=config)
    return engine


def save_moved(folder: Path) -> None:
    """Code has given a parameter other memory than the engine's."""
    engine = small_engine(1, torch.bfloat16)
    engine.module[1].weight.data = engine.module[1].weight.data.clone()
    hf_zero_stream.save_state(engine, folder)


def save_unregistered(folder: Path, stage: int) -> None:
    """The engine trains a parameter that the model does not know."""
    hf_zero_stream.save_state(small_engine(stage, torch.bfloat16, nn.Parameter(torch.ones(3))), folder)


def save_scaler(folder: Path) -> None:
    """Code has put a tensor into the loss scaler."""
    engine = small_engine(1, torch.float16)
    engine.optimizer.loss_scaler.cur_scale = torch.tensor(2.0)
    hf_zero_stream.save_state(engine, folder)


@pytest.mark.parametrize(
    ("save", "arguments", "message"),
    [
        (save_moved, (), r"1\.weight: expected parameters that lie in the engine's flat buffers"),
        (save_unregistered, (0,), r"a parameter of shape \(3,\) that is none of the model's"),
        (save_scaler, (), r"cur_scale: expected a number in a loss scaler; found a Tensor"),
    ],
)
def test_refused(cluster: None, tmp_path: Path, save: Any, arguments: Any, message: str) -> None:
    outcomes = run_ranks_expecting_errors(2, save, tmp_path, *arguments)
    assert [outcome.error_type for outcome in outcomes] == ["UnsupportedError"] * 2
    for outcome in outcomes:
        assert re.search(message, str(outcome.error_message)), outcome.error_message
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


class KeepsText(torch.optim.SGD):
    """Keeps a string, and tensors in a list, which no state of ours has."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for param in self.param_groups[0]["params"]:
            self.state[param] |= {"norms": [torch.ones(3)], "mode": ("warm", 1)}


class KeepsByTensors(torch.optim.SGD):
    """Keeps what belongs to parameters in their group, as grokadamw does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        group = self.param_groups[0]
        for param in group["params"]:
            group.setdefault("state", {}).setdefault(param, {"steps": 0})["steps"] += 1


KINDS = {KeepsText: "mode (a string", KeepsByTensors: "state of group 0 (kept by tensors"}


def by_engines(folder: Path, target: Path, homes: list[str]) -> list[Any]:
    """By kind and home: the error inside ``streaming()``; and what stock's checkpoint has made of what is kept."""
    found = []
    for kind in KINDS:
        for home in homes:
            training = training_in(home, folder, lambda model, kind=kind: kind(parameters_of(model), lr=1e-2))
            training.train(range(2))
            with hf_zero_stream.streaming():
                message = message_of(lambda: training.trains.save_checkpoint(str(target / f"ours {kind} {home}")))
            training.trains.save_checkpoint(str(target / f"stock {kind} {home}"))
            training = training_in(home, folder, lambda model, kind=kind: kind(parameters_of(model), lr=1e-2))
            training.trains.load_checkpoint(str(target / f"stock {kind} {home}"))
            modes = [entries["mode"][0] for entries in training.inner.state.values() if "mode" in entries]
            training.train([2])
            kept = training.inner.param_groups[0].get("state", {})
            found.append((kind, message, modes[:1], [entries["steps"] for entries in kept.values()]))
    return found


def by_accelerate(folder: Path, target: Path) -> list[Any]:
    found = []
    for kind in KINDS:
        announce(cpu_ram_efficient_loading=True, state_dict_type="SHARDED_STATE_DICT")
        accelerator = make_accelerator()
        with hf_zero_stream.streaming():
            model = load("llama", folder)
            model, optimizer = accelerator.prepare(model, kind(parameters_of(model), lr=1e-2))
            accelerated_steps(accelerator, model, optimizer, range(2))
            if kind is KeepsText and dist.get_rank() == 1:  # one rank alone cannot save
                for entries in optimizer.state.values():
                    entries.pop("mode")
            found.append((kind, message_of(lambda: accelerator.save_state(str(target / f"{kind}")))))
    return found


def test_by_engines(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    homes = ["ZeRO-3", "ZeRO-2"]
    for of_rank in run_ranks(2, by_engines, zoo_checkpoint("llama"), tmp_path, homes):
        for kind, message, modes, steps in of_rank:
            assert "A checkpoint of DeepSpeed's own is no way out here" in message and KINDS[kind] in message, message
            assert (kind is KeepsText) == bool(modes) and "warm" not in modes, modes
            assert 3 not in steps, steps  # it begins anew
    assert not [*tmp_path.glob("ours*/**/*.pt")]


def test_by_accelerate(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    for of_rank in run_ranks(2, by_accelerate, zoo_checkpoint("llama"), tmp_path):
        for kind, message in of_rank:
            assert "A checkpoint of accelerate's own is no way out here" in message and KINDS[kind] in message, message
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
