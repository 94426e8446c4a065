"""Users' own code around a save: overridden methods of the Trainer and of model classes, callbacks, lazy values."""

import json
import os
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from transformers import LlamaForCausalLM, Qwen3MoeForCausalLM, Trainer, TrainerCallback

import hf_zero_stream
from hf_zero_stream.errors import UnsupportedError
from tests.support.checkpoint_files import tensors_of
from tests.support.cluster import run_ranks
from tests.support.messages import message_of
from tests.support.parity import ds_config
from tests.support.saving import SHARD_SIZE, different, gathers_counted
from tests.support.trainers import ZERO_3, arguments_of, join_as_launched, losses_of, trainer_arguments
from tests.support.zoo import Checkpoint


class WithMetadata(Qwen3MoeForCausalLM):
    """Adds to the file that was written."""

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        super().save_pretrained(save_directory, *args, **kwargs)
        if not kwargs.get("is_main_process", True) or dist.get_rank() > 0:
            return
        for path in sorted(Path(save_directory).glob("*.safetensors")):
            tensors = safetensors.torch.load_file(path)
            safetensors.torch.save_file(tensors, path, metadata={"licence": "ours"})
        shutil.copy(Path(save_directory) / "config.json", Path(save_directory) / "config.copy.json")


class Renaming(Qwen3MoeForCausalLM):
    """Leaves a tensor out."""

    def save_pretrained(self, save_directory: Any, *args: Any, state_dict: Any = None, **kwargs: Any) -> None:
        state_dict = dict(self.state_dict() if state_dict is None else state_dict)
        del state_dict["model.norm.weight"]
        super().save_pretrained(save_directory, *args, state_dict=state_dict, **kwargs)


class ReadingValues(Qwen3MoeForCausalLM):
    def save_pretrained(self, save_directory: Any, *args: Any, state_dict: Any = None, **kwargs: Any) -> None:
        state_dict["model.norm.weight"].sum().item()


class WithSaveFile(Trainer):
    """Saves the weights itself."""

    def _save(self, output_dir: Any = None, state_dict: Any = None) -> None:
        dist.barrier()  # stock calls this on all ranks
        if self.args.should_save:
            os.makedirs(output_dir, exist_ok=True)
            values = {name: value.contiguous() for name, value in state_dict.items() if "experts" not in name}
            safetensors.torch.save_file(values, os.path.join(output_dir, "own.safetensors"))
            torch.save(values, os.path.join(output_dir, "own.bin"))
        super()._save(output_dir, state_dict)


class SavingAPart(Trainer):
    """Cuts what was gathered down to the inner model, on all ranks, of which one was given values."""

    def _save(self, output_dir: Any = None, state_dict: Any = None) -> None:
        if state_dict is not None:
            inner = [name for name in state_dict if name.startswith("model.")]
            state_dict = {name.removeprefix("model."): state_dict[name] for name in inner}
        self.model.model.save_pretrained(output_dir, state_dict=state_dict)


class PassingOn(Trainer):
    """Saves the whole model with what was gathered, on all ranks."""

    def _save(self, output_dir: Any = None, state_dict: Any = None) -> None:
        self.model.save_pretrained(output_dir, state_dict=state_dict)


class WithOwnSaveModel(Trainer):
    """Never calls the Trainer's own."""

    def save_model(self, output_dir: Any = None, _internal_call: bool = False) -> None:
        state_dict = self.accelerator.get_state_dict(self.deepspeed)
        if self.args.should_save:
            os.makedirs(output_dir, exist_ok=True)
            torch.save({name: value.clone() for name, value in state_dict.items()}, Path(output_dir) / "own.bin")


class Afterwards(Trainer):
    """Finds what was saved, on every rank."""

    def save_model(self, output_dir: Any = None, _internal_call: bool = False) -> None:
        super().save_model(output_dir, _internal_call)
        if not dist.get_rank():
            assert safetensors.torch.load_file(Path(output_dir) / "model.safetensors")


class Looking(TrainerCallback):
    seen = 0

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            names = [path.name for path in folder.iterdir()]
            assert "config.json" in names and not any(name.startswith(".hf_zero_stream") for name in names), names
            type(self).seen += 1


def train(checkpoint: Path, folder: Path, model_class: Any, trainer_class: Any, name: str) -> dict[str, Any]:
    join_as_launched()
    with hf_zero_stream.streaming() if name == "ours" else nullcontext(), gathers_counted() as gathers:
        arguments = trainer_arguments(folder / name, max_steps=1, save_steps=1)
        model = model_class.from_pretrained(checkpoint, dtype=torch.float32)
        ids = torch.arange(16) * 37 % 300
        data = [{"input_ids": ids, "labels": ids}] * 4
        callbacks = [Looking()] if trainer_class is not WithOwnSaveModel else []
        trainer = trainer_class(model=model, args=arguments, train_dataset=data, callbacks=callbacks)
        if model_class is ReadingValues:
            kind = UnsupportedError if name == "ours" else TypeError
            with pytest.raises(kind) as caught:
                trainer.train()
            return {"error": str(caught.value)}
        trainer.train()
        trainer.save_model(str(folder / name / "final"))
        if trainer_class is Afterwards and name == "ours":
            with deepspeed.zero.GatheredParameters(list(model.parameters())):
                trainer.save_model(str(folder / name / "gathered"))
                if dist.get_rank() == 0:
                    trainer.save_model(str(folder / name / "gathered by one"))
        dist.barrier()
    return {"gathers": len(gathers)}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("model_class", "trainer_class", "gathers"),
    [
        (Qwen3MoeForCausalLM, WithSaveFile, 2),
        (Qwen3MoeForCausalLM, WithOwnSaveModel, 2),
        (Qwen3MoeForCausalLM, Afterwards, 0),
        (WithMetadata, Trainer, 0),
        (Renaming, Trainer, 0),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_overridden(
    cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, model_class: Any, trainer_class: Any, gathers: int
) -> None:
    for name in ("stock", "ours"):
        found = run_ranks(2, train, zoo_checkpoint("qwen3_moe"), tmp_path, model_class, trainer_class, name)
        assert found == [{"gathers": 2 if name == "stock" else gathers}] * 2
    for part in ("final", "checkpoint-1"):
        names = different(tmp_path / "ours" / part, tmp_path / "stock" / part)
        if trainer_class is Afterwards:
            for gathered in ("gathered", "gathered by one"):
                names += different(tmp_path / "ours" / gathered, tmp_path / "ours" / "final")
        assert set(names) <= {"training_args.bin", "trainer_state.json", "own.bin"}
        if "own.bin" in names:  # each has an identifier of its own
            ours, stock = (torch.load(tmp_path / name / part / "own.bin") for name in ("ours", "stock"))
            assert ours.keys() == stock.keys() and all(torch.equal(ours[name], stock[name]) for name in stock)


def train_with_parts(checkpoint: Path, folder: Path, name: str, stage: int) -> list[Any]:
    """The losses of two trainings of 4 steps, and what each gives when it goes on from its step 2."""
    losses = []
    for kind in (SavingAPart, PassingOn):
        for resume in (None, folder / kind.__name__ / "checkpoint-2"):
            join_as_launched()
            with hf_zero_stream.streaming() if name == "ours" else nullcontext():
                config = {**ZERO_3["deepspeed"], "zero_optimization": {"stage": stage}}
                if stage == 3:
                    config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
                settings = {"deepspeed": config, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
                arguments = arguments_of(folder / kind.__name__, **settings)
                model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
                data = [{"input_ids": (ids := torch.arange(16) * (37 + n) % 300), "labels": ids} for n in range(16)]
                trainer = kind(model=model, args=arguments, train_dataset=data)
                trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
            losses.append(losses_of(trainer)[-2:])
    return losses


@pytest.mark.parametrize("stage", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_parts_of_gathered_values(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, stage: int) -> None:
    """One rank was given values, and the others save with None: it is one save of one rank for all of them."""
    checkpoint = zoo_checkpoint("llama")
    stock, ours = (
        run_ranks(2, train_with_parts, checkpoint, tmp_path / name, name, stage, timeout=120)
        for name in ("stock", "ours")
    )
    assert ours == stock and ours[0][:2] == [ours[0][1]] * 2
    for part in ("SavingAPart/checkpoint-4", "PassingOn/checkpoint-4"):
        for file in ("config.json", "model.safetensors"):
            assert (tmp_path / "ours" / part / file).read_bytes() == (tmp_path / "stock" / part / file).read_bytes()


def test_values_are_asked_for(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """By a model class, on rank 0 alone: all ranks say so at once."""
    found = run_ranks(2, train, zoo_checkpoint("qwen3_moe"), tmp_path, ReadingValues, Trainer, "ours")
    assert all("GatheredParameters" in of_rank["error"] for of_rank in found)


def save_with_metadata(checkpoint: Path, folder: Path, stage: int) -> None:
    if stage == 3:
        with hf_zero_stream.streaming():
            model = WithMetadata.from_pretrained(checkpoint, ds_config=ds_config())
            model.save_pretrained(folder / "streaming", max_shard_size=SHARD_SIZE)
            dist.barrier()
    else:
        model = WithMetadata.from_pretrained(checkpoint, dtype=torch.float32)
        if dist.get_rank() == 0:
            model.save_pretrained(folder / "stock", max_shard_size=SHARD_SIZE)
    report = hf_zero_stream.save_pretrained(model, folder / f"explicit {stage}", max_shard_size=SHARD_SIZE)
    assert len(report.ranks) == 2 and all(rank.bytes_written for rank in report.ranks)


class Failing(Qwen3MoeForCausalLM):
    """Asks for what cannot be saved, and would go on."""

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        try:
            super().save_pretrained(save_directory, *args, **{**kwargs, "max_shard_size": "no size"})
        except ValueError:  # as in the Trainer
            dist.barrier()


def save_by_own_code(checkpoint: Path, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with hf_zero_stream.streaming():
        model = Renaming.from_pretrained(checkpoint, ds_config=ds_config())
        failing = Failing.from_pretrained(checkpoint, ds_config=ds_config())
    hf_zero_stream.save_pretrained(model, folder / "left out")
    hf_zero_stream.save_pretrained(model, folder / "left out, fp32", dtype=torch.float32)
    found["fails"] = message_of(lambda: hf_zero_stream.save_pretrained(failing, folder / "fails"))
    model.save_pretrained = lambda folder, **_: hf_zero_stream.save_pretrained(model.model, folder)
    try:
        hf_zero_stream.save_pretrained(model, folder / "a part")
    finally:
        del model.save_pretrained
    state_dict = {name: value.detach() for name, value in model.state_dict().items()}
    try:
        hf_zero_stream.save_pretrained(model, folder / "empty", state_dict=state_dict)
    except hf_zero_stream.errors.SaveError as error:
        found["empty"] = str(error)
    return found


def test_own_code_in_an_explicit_save(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """It is given a lazy state dict; an error in it is everyone's, whatever it does about it; a part may be saved."""
    checkpoint = zoo_checkpoint("qwen3_moe")
    found = run_ranks(2, save_by_own_code, checkpoint, tmp_path)
    whole = tensors_of(checkpoint)
    for name in ("left out", "left out, fp32"):
        saved = safetensors.torch.load_file(tmp_path / name / "model.safetensors")
        assert whole.keys() - saved.keys() == {"model.norm.weight"}
        assert all(torch.equal(value, whole[key]) for key, value in saved.items())
    part = safetensors.torch.load_file(tmp_path / "a part" / "model.safetensors")
    assert part and all(torch.equal(value, whole[f"model.{key}"]) for key, value in part.items())
    assert all("no size" in of_rank["fails"] for of_rank in found)
    assert all("got none" in of_rank["empty"] for of_rank in found)


def test_a_model_class_that_opens_the_files(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    for stage in (0, 3):
        run_ranks(2, save_with_metadata, zoo_checkpoint("qwen3_moe"), tmp_path, stage)
    for name in ("streaming", "explicit 3", "explicit 0"):
        assert different(tmp_path / name, tmp_path / "stock") == [], name
    assert json.loads((tmp_path / "stock" / "config.copy.json").read_text())


def each_node(checkpoint: Path, folder: Path, stage: int) -> str:
    """Two nodes of one rank each, both of which are to save."""
    os.environ["LOCAL_RANK"] = "0"
    join_as_launched()
    config = ds_config(torch.float32, stage=stage, stage3_gather_16bit_weights_on_model_save=True)
    del config["optimizer"]
    with hf_zero_stream.streaming():
        settings = {"deepspeed": config, "max_steps": 1, "save_strategy": "no", "save_on_each_node": True}
        arguments = arguments_of(folder / str(dist.get_rank()), **settings)
        model = Qwen3MoeForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        ids = torch.arange(16) * 37 % 300
        trainer = Trainer(model=model, args=arguments, train_dataset=[{"input_ids": ids, "labels": ids}] * 4)
        trainer.train()
        try:
            trainer.save_model()
        except UnsupportedError as error:
            return str(error)
    return ""


@pytest.mark.slow
def test_save_on_each_node(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    assert run_ranks(2, each_node, zoo_checkpoint("qwen3_moe"), tmp_path, 2) == ["", ""]
    assert safetensors.torch.load_file(tmp_path / "0" / "model.safetensors")
    errors = run_ranks(2, each_node, zoo_checkpoint("qwen3_moe"), tmp_path, 3)
    assert all("save_on_each_node=True" in error and "2 ranks" in error for error in errors)
