"""Checkpoints of DeepSpeed's engine, of accelerate and of the Trainer inside ``streaming()``: any number of ranks."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers

import hf_zero_stream
from hf_zero_stream import StreamingConfig
from hf_zero_stream.checkpoint.deepspeed_names import entries_of_deepspeed, world_size_of
from hf_zero_stream.checkpoint.formats import UNFINISHED
from hf_zero_stream.errors import CheckpointError, ConfigError
from hf_zero_stream.state.callers import state_in
from tests.support.cluster import run_ranks
from tests.support.parity import ds_config
from tests.support.trainers import by_deepspeed, losses_of
from tests.support.training_state import all_in_one_group, engine_of, state_config, train
from tests.support.zoo import Checkpoint
from tests.zero.test_training import STEPS, make_trainer


def save_by_engine(folder: Path, target: Path, config: dict[str, Any]) -> list[float]:
    engine = engine_of(folder, config, all_in_one_group)
    train(engine, range(3))
    with hf_zero_stream.streaming():
        engine.save_checkpoint(str(target / "ours"), client_state={"epoch": 2})
        engine.save_checkpoint(str(target / "tagged"), tag="best")
    engine.save_checkpoint(str(target / "stock"))
    with hf_zero_stream.streaming(StreamingConfig(training_state=False)):
        engine.save_checkpoint(str(target / "off"))
    return train(engine, (3, 4))


def load_by_engine(folder: Path, source: Path, config: dict[str, Any]) -> tuple[list[float], Any]:
    """Two steps after a resume inside ``streaming()``, and what the caller had given."""
    engine = engine_of(folder, config, all_in_one_group)
    with hf_zero_stream.streaming():
        path, client_state = engine.load_checkpoint(str(source))
    assert path is not None
    return train(engine, (3, 4)), client_state.get("epoch")


@pytest.mark.slow
def test_engine(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder, config = zoo_checkpoint("llama"), state_config(3)
    continued = run_ranks(2, save_by_engine, folder, tmp_path, config)[0]
    names = {name: sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("ours", "off", "stock")}
    assert "model.safetensors" in names["ours"] and "model.safetensors" not in names["off"] == names["stock"]
    for name, epoch in (("ours", 2), ("tagged", None), ("stock", None)):
        assert run_ranks(2, load_by_engine, folder, tmp_path / name, config)[0] == (continued, epoch), name
    run_ranks(3, load_by_engine, folder, tmp_path / "ours", config)


class OwnSave(transformers.Trainer):
    """Saves in a way of its own, into the files that we would write."""

    def _save(self, output_dir: Any = None, state_dict: Any = None) -> None:
        if self.args.should_save:
            Path(output_dir).mkdir(parents=True, exist_ok=True)
            Path(output_dir, "model.safetensors").write_text("my own")


class OwnModel(OwnSave):
    """The same in place of ``save_model`` itself."""

    def save_model(self, output_dir: Any = None, _internal_call: bool = False) -> None:
        super()._save(output_dir)


class Rewriting(transformers.Trainer):
    """Puts something else in the place of what was saved."""

    def save_model(self, output_dir: Any = None, _internal_call: bool = False) -> None:
        super().save_model(output_dir, _internal_call)
        if self.args.should_save:
            Path(output_dir, "model.safetensors").write_text("my own")


def train_by_trainer(
    folder: Path, output: Path, resume_from: Path | None, cls: Any = None, ours: bool = True
) -> list[float]:
    with hf_zero_stream.streaming(StreamingConfig(training_state=ours)):
        trainer = make_trainer(folder, output, True, **STEPS)
        trainer.__class__ = cls or trainer.__class__
        trainer.train(resume_from_checkpoint=None if resume_from is None else str(resume_from))
    assert trainer.state.global_step == 4
    return losses_of(trainer)


@pytest.mark.slow
def test_trainer(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder, middle = zoo_checkpoint("llama"), tmp_path / "first" / "checkpoint-2"
    losses = run_ranks(2, train_by_trainer, folder, tmp_path / "first", None)
    record = middle / "global_step2" / "training_state.json"
    assert (middle / "model.safetensors").stat().st_mtime_ns < record.stat().st_mtime_ns, "the weights are saved once"
    assert run_ranks(2, train_by_trainer, folder, tmp_path / "second", middle) == losses
    others = run_ranks(3, train_by_trainer, folder, tmp_path / "third", middle)[0]
    assert others[:2] == losses[0][:2] and len(others) == 4
    for cls in (OwnSave, OwnModel, Rewriting):
        run_ranks(2, train_by_trainer, folder, tmp_path / cls.__name__, None, cls)
        own = tmp_path / cls.__name__ / "checkpoint-2"
        assert (own / "model.safetensors").read_text() == "my own"
        assert (own / "global_step2" / "training_state.json").exists()
        assert run_ranks(2, train_by_trainer, folder, tmp_path / "again", own) == losses


@pytest.mark.slow
def test_trainer_from_deepspeeds_own_folders(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """At the same number of ranks, where DeepSpeed loads them, and at another one, where it cannot."""
    folder, middles = zoo_checkpoint("llama"), {}
    for name, ours in (("ours", True), ("stock", False)):
        losses = run_ranks(2, train_by_trainer, folder, tmp_path / name, None, None, ours)
        middles[name] = tmp_path / name / "checkpoint-2"
    assert world_size_of(middles["stock"] / "global_step2") and not world_size_of(middles["ours"] / "global_step2")
    assert run_ranks(2, train_by_trainer, folder, tmp_path / "two", middles["stock"]) == losses
    three = [run_ranks(3, train_by_trainer, folder, tmp_path / f"3 {name}", middles[name]) for name in middles]
    assert three[0] == three[1]


def prepared(folder: Path, config: dict[str, Any]) -> tuple[Any, Any]:
    """An accelerator and its engine; called inside ``streaming()``."""
    accelerator = by_deepspeed(config)
    return accelerator, accelerator.prepare(hf_zero_stream.StreamingAutoModelForCausalLM.from_pretrained(folder))


def save_by_accelerate(folder: Path, target: Path, config: dict[str, Any]) -> dict[str, list[float]]:
    with hf_zero_stream.streaming():
        accelerator, engine = prepared(folder, config)
        train(engine, range(3))
        accelerator.save_state(str(target))
        with hf_zero_stream.streaming(StreamingConfig(training_state=False)):
            accelerator.save_state(str(target.with_name("stock")))
        continued = train(engine, (3, 4))
        accelerator.load_state(str(target))
        return {"continued": continued, "resumed": train(engine, (3, 4))}


def load_by_accelerate(folder: Path, target: Path, config: dict[str, Any]) -> list[float]:
    with hf_zero_stream.streaming():
        accelerator, engine = prepared(folder, config)
        accelerator.load_state(str(target))
        return train(engine, (3, 4))


@pytest.mark.plugin("pickled")
def test_accelerate(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    config = {**ds_config(torch.bfloat16), "gradient_accumulation_steps": 1}
    for found in run_ranks(2, save_by_accelerate, zoo_checkpoint("llama"), tmp_path / "state", config):
        assert found["resumed"] == found["continued"]
    assert (tmp_path / "state" / "pytorch_model" / "model.safetensors").exists()
    at_three = [
        run_ranks(3, load_by_accelerate, zoo_checkpoint("llama"), tmp_path / name, config)[0]
        for name in ("state", "stock")
    ]
    assert at_three[0] == at_three[1], "DeepSpeed's own folder, which it cannot load at another size"


def test_a_folder_with_nothing_but_a_dead_save(tmp_path: Path) -> None:
    """DeepSpeed takes it for one without a checkpoint, and accelerate would go on as if it had loaded one."""
    (tmp_path / "pytorch_model" / f"{UNFINISHED}x").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="pytorch_model: its save was interrupted, and nothing else is there"):
        state_in(tmp_path, "pytorch_model")
    (tmp_path / "pytorch_model" / "mp_rank_00_model_states.pt").write_bytes(b"")
    assert state_in(tmp_path, "pytorch_model") is None
    assert state_in(tmp_path) is None


def test_a_save_that_died_while_files_got_their_names(tmp_path: Path) -> None:
    """It has happened, and is finished before anybody looks for it."""
    place = tmp_path / "pytorch_model" / f"{UNFINISHED}x"
    (place / "global_step3").mkdir(parents=True)
    (place / "global_step3" / "training_state.json").write_text("{}")
    (place / "latest").write_text("global_step3")
    renames = {"renames": ["global_step3", "latest"], "removes": [], "removes_first": []}
    (place / "renames.json").write_text(json.dumps(renames))
    assert state_in(tmp_path, "pytorch_model") == (tmp_path / "pytorch_model", "global_step3")


def save_again(folder: Path, target: Path, config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """By each name the step of the last save under one tag, and that of what a load gave then."""
    engine = engine_of(folder, config, all_in_one_group)
    found = {}

    def load(name: str, tag: Any) -> tuple[int, int]:
        saved = engine.global_steps
        train(engine, [saved])
        assert engine.load_checkpoint(str(target / name), tag=tag)[0] is not None
        return saved, engine.global_steps

    refused = {"client_state": {"a set": {2}}}
    with hf_zero_stream.streaming():
        train(engine, [0])
        engine.save_checkpoint(str(target / "zero"))
        train(engine, [1])
        of_rank = {"of rank": dist.get_rank()}
        engine.save_checkpoint(str(target / "zero"), tag=0, client_state=of_rank)
        found["a tag that is false"] = load("zero", 0)
        for flags in ({}, {"load_module_only": True}):
            assert engine.load_checkpoint(str(target / "zero"), tag=0, **flags)[1] == of_rank
        for name, others in (("refused", refused), ("not the latest", {"save_latest": False})):
            engine.save_checkpoint(str(target / name), tag="best")
            train(engine, [2])
            engine.save_checkpoint(str(target / name), tag="best", **others)
            found[name] = load(name, "best")
        hf_zero_stream.load_state(engine, target / "refused" / "best")
        found["by load_state"] = found["refused"][0], engine.global_steps
        train(engine, [3])
        engine.save_checkpoint(str(target / "refused"), tag="best")
        found["ours again"] = load("refused", None)
        saved = engine.global_steps
        engine.save_checkpoint(str(target / "same step"))
        engine.save_checkpoint(str(target / "same step"), **refused)
        assert "a set" in engine.load_checkpoint(str(target / "same step"))[1]
        with pytest.raises(ConfigError, match=r"a checkpoint of DeepSpeed's own is in the folder.*keep_older=False"):
            hf_zero_stream.save_state(engine, target / "same step" / f"global_step{saved}")
    return found


@pytest.mark.slow
def test_a_place_that_deepspeed_has_saved_to_as_well(
    cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Whatever was saved last is what a load gives, whoever saved it; of older ones nothing is left for DeepSpeed."""
    for found in run_ranks(2, save_again, zoo_checkpoint("llama"), tmp_path, state_config(3)):
        for name, (saved, loaded) in found.items():
            assert saved == loaded, name
    assert (tmp_path / "zero" / "0" / "latest").exists()
    assert not entries_of_deepspeed(tmp_path / "refused" / "best")


def save_beside_a_model(folder: Path, target: Path) -> list[int]:
    """By the engine, twice into the folder of a model and once into one of a tag; the steps that loads give then."""
    engine = engine_of(folder, state_config(3), all_in_one_group)
    steps = []
    with hf_zero_stream.streaming():
        for step, tag in enumerate((None, None, "best")):
            train(engine, [step])
            engine.save_checkpoint(str(target), tag=tag)
        for tag in ("global_step1", "global_step2", None):
            assert engine.load_checkpoint(str(target), tag=tag)[0] is not None
            steps.append(engine.global_steps)
    return steps


def test_a_model_in_the_folder_stays(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """DeepSpeed's checkpoints have no such files: what lies there may be the model that the training came from."""
    theirs = {"config.json": "my own", "model.safetensors": "mine, too", "best/model.safetensors": "and mine"}
    (tmp_path / "best").mkdir()
    for name, text in theirs.items():
        (tmp_path / name).write_text(text)
    assert run_ranks(2, save_beside_a_model, zoo_checkpoint("llama"), tmp_path) == [[1, 2, 3]] * 2
    assert {name: (tmp_path / name).read_text() for name in theirs} == theirs
    assert (tmp_path / "global_step2" / "training_state.json").exists()
