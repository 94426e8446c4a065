"""States of quantised checkpoints, packed or dequantised.

- Training goes on where it stopped: states and checkpoints of adapters beside packed weights.
- States of models from quantised checkpoints, packed or dequantised, at another number of ranks, and back.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors import safe_open

import hf_zero_stream
from tests.support.checkpoint_files import differing
from tests.support.cluster import run_ranks
from tests.support.packed_training import adapter_engine, dequantised, inputs, load, packed_names, with_adapters
from tests.support.parity import ds_config, whole_values
from tests.support.quantised_checkpoints import bitsandbytes, fp8, mxfp4
from tests.support.trainers import ZERO_3, arguments_of
from tests.support.training_state import different_states
from tests.support.trainings import Training


MAKERS: dict[str, Callable[[Path], None]] = {
    "fp8": fp8,
    "nf4": lambda folder: bitsandbytes(folder, "double nf4", width=64),
}


def batch(number: int) -> dict[str, torch.Tensor]:
    return inputs()


def engine_of(folder: Path) -> Any:
    config = ds_config(torch.bfloat16)
    return adapter_engine(with_adapters(load(folder, config)), config)


def resumed(folder: Path, target: Path) -> dict[str, list[float]]:
    """Losses of two steps after a save, and after each way to resume from it."""
    engine = engine_of(folder)
    Training(engine, batch=batch).train(range(3))
    hf_zero_stream.save_state(engine, target / "ours")
    engine.save_checkpoint(str(target / "stock"))
    engine.save_checkpoint(str(target / "of adapters"), exclude_frozen_parameters=True)
    with hf_zero_stream.streaming():
        engine.save_checkpoint(str(target / "streaming"), exclude_frozen_parameters=True)
    found = {"continued": Training(engine, batch=batch).train(range(2))}
    for name in ("stock", "of adapters", "streaming"):
        engine = engine_of(folder)
        if name == "streaming":
            with hf_zero_stream.streaming():
                engine.load_checkpoint(str(target / name), load_module_strict=False)
        else:
            engine.load_checkpoint(str(target / name), load_module_strict=name == "stock")
        assert packed_names(engine.module)
        found[name] = Training(engine, batch=batch).train(range(2))
    return found


def resume_ours(folder: Path, source: Path) -> list[float]:
    engine = engine_of(folder)
    hf_zero_stream.load_state(engine, source)
    return Training(engine, batch=batch).train(range(2))


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKERS)
def test_resumed(cluster: None, tmp_path: Path, name: str) -> None:
    MAKERS[name](folder := tmp_path / "model")
    first, *others = run_ranks(2, resumed, folder, tmp_path, timeout=300)
    assert len({tuple(losses) for losses in first.values()}) == 1 and first["continued"][0] != first["continued"][1]
    assert others == [first]
    for world_size in (2, 3):
        for losses in run_ranks(world_size, resume_ours, folder, tmp_path / "ours", timeout=300):
            if world_size == 2:
                assert losses == first["continued"]
            assert losses == pytest.approx(first["continued"], rel=1e-3)
    for path in (tmp_path / "ours").rglob("*.safetensors"):
        with safe_open(path, "pt") as file:
            beside = [key for key in file.keys() if "lora" not in key]
        assert all(key[0].isdigit() for key in beside), "states of random numbers; the packed weights are not in it"


class Data(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, number: int) -> Any:
        tokens = inputs(seed=number)["input_ids"][0]
        return {"input_ids": tokens, "labels": tokens}


def train_by_trainer(folder: Path, target: Path, uses_hooks: bool) -> list[list[float]]:
    """Losses of steps 3 and 4: of a Trainer that went on, and of one that resumed."""
    found = []
    for resumes in (False, True):
        config = {**ZERO_3["deepspeed"], "zero_force_ds_cpu_optimizer": False}
        steps = {"max_steps": 4, "save_steps": 2, "per_device_train_batch_size": 2, "learning_rate": 1e-2}
        on_a_cpu = {"bf16": True, "use_cpu": True, "accelerator_config": None}
        arguments = arguments_of(target, deepspeed=config, **steps, **on_a_cpu)
        with hf_zero_stream.streaming(hf_zero_stream.StreamingConfig(progress=False)):
            model = with_adapters(transformers.AutoModelForCausalLM.from_pretrained(folder))
            assert packed_names(model)
            if uses_hooks:
                trainer = transformers.Trainer(model, arguments, train_dataset=Data())
                trainer.train(resume_from_checkpoint=str(target / "checkpoint-2") if resumes else None)
        if not uses_hooks:
            trainer = transformers.Trainer(model, arguments, train_dataset=Data())
            trainer.train(resume_from_checkpoint=str(target / "checkpoint-2") if resumes else None)
        losses = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
        found.append([losses[step] for step in (3, 4)])
    return found


@pytest.mark.parametrize("uses_hooks", [pytest.param(False, marks=pytest.mark.slow), True], ids=["stock", "streaming"])
def test_trainer(cluster: None, tmp_path: Path, uses_hooks: bool) -> None:
    fp8(folder := tmp_path / "model")
    for went_on, resumed_there in run_ranks(2, train_by_trainer, folder, tmp_path / "out", uses_hooks, timeout=300):
        assert went_on == resumed_there


FORMATS: dict[str, Callable[[Path], None]] = {"fp8": fp8, "mxfp4": mxfp4}


def training_of(folder: Path, home: str, is_packed: bool) -> Training:
    """Of adapters beside packed weights, or of all of a dequantised model; by a ZeRO-3 engine, or under FSDP2."""
    config = ds_config(torch.bfloat16)
    how = {"ds_config": config}
    if home == "fsdp2":
        how = {"distributed_config": {"fsdp_size": dist.get_world_size()}}
    if not is_packed:
        folder, wish = dequantised(folder)
        how |= wish
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **how)
    assert bool(packed_names(model)) == is_packed
    model = with_adapters(model) if is_packed else model
    trained = [param for param in model.parameters() if param.requires_grad]
    if home == "zero3":
        engine = deepspeed.initialize(model=model, config=config, model_parameters=trained)[0]
        return Training(engine, by="engine", batch=batch_of)
    return Training(model, torch.optim.AdamW(trained, lr=1e-3), batch=batch_of)


def batch_of(number: int) -> dict[str, torch.Tensor]:
    return inputs(seed=number)


def go_on(folder: Path, root: Path, home: str, is_packed: bool, first: int) -> tuple[list[float], list[float]]:
    """Load the state of step `first` and save it again; losses of two steps, after which it saves, and of two more."""
    with hf_zero_stream.streaming(hf_zero_stream.StreamingConfig(progress=False)):
        training = training_of(folder, home, is_packed)
        if first:
            training.load(root / f"{first}")
            training.save(root / f"{first} again")
            found = whole_values(training.trains)
            if dist.get_rank() == 0:
                assert differing(found, torch.load(root / f"{first}.pt")) == []
        losses = training.train((first, first + 1))
        training.save(root / f"{first + 2}")
        found = whole_values(training.trains)
        if dist.get_rank() == 0:
            torch.save(found, root / f"{first + 2}.pt")
        return losses, training.train((first + 2, first + 3))


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("home", ["zero3", "fsdp2"])
@pytest.mark.parametrize("is_packed", [True, False], ids=["packed", "dequantised"])
def test_resumed_elsewhere(cluster: None, tmp_path: Path, name: str, home: str, is_packed: bool) -> None:
    """Of 2 ranks on 3, and of 3 on 2: values, moments and steps are those that were saved; so are later losses."""
    FORMATS[name](folder := tmp_path / "model")
    on_two, on_three, on_two_again = (
        run_ranks(world_size, go_on, folder, tmp_path, home, is_packed, first)[0]
        for world_size, first in ((2, 0), (3, 2), (2, 4))
    )
    assert len({*on_two[0], *on_two[1]}) == 4, "each step must change the loss"
    assert on_three[0] == pytest.approx(on_two[1], rel=2e-3)  # in bf16
    assert on_two_again[0] == pytest.approx(on_three[1], rel=2e-3)
    for step in (2, 4):
        assert different_states(tmp_path / f"{step}", tmp_path / f"{step} again") == []
