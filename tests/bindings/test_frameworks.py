"""What frameworks around a model call, as they call it: checkpoints of Lightning, the save of sentence-transformers.

`make ecosystem` runs the frameworks themselves.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_model

import hf_zero_stream
from tests.support.checkpoint_files import differing
from tests.support.cluster import run_ranks
from tests.support.fsdp2 import force_fsdp_on_cpu
from tests.support.saving import different
from tests.support.trainers import join_as_launched, trainer_arguments
from tests.support.training_state import all_in_one_group, different_states, state_config, train, values_in
from tests.support.whole import whole_values
from tests.support.zoo import Checkpoint


class Around(torch.nn.Module):
    """Holds a transformers model, as a LightningModule does."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Any) -> Any:
        return self.model(**batch)


def client_state() -> dict[str, Any]:
    """Of the kinds that Lightning's Trainer and its callbacks have, and Fabric's users."""
    best = torch.tensor(0.5, dtype=torch.float64)
    return {
        "epoch": 0,
        "loops": {"fit_loop": {"state_dict": {}, "epoch_loop.batch_progress": {"total": {"ready": 3}}}},
        "callbacks": {
            "ModelCheckpoint{'monitor': 'loss'}": {"best_model_score": best, "best_k_models": {"a.ckpt": best}},
            "EarlyStopping{'mode': 'min'}": {"wait_count": 0, "best_score": torch.tensor(float("inf"))},
        },
        "lr_schedulers": [{"last_epoch": 3, "_last_lr": [0.1]}],
        "hyper_parameters": {"betas": (0.9, 0.95), "widths": {1: 2}},
        "generator": torch.arange(40, dtype=torch.uint8).reshape(5, 8).mT,
        "flags": torch.tensor([True, False]),
        "nothing": torch.empty(0, 3, dtype=torch.bfloat16),
    }


def engine_around(folder: Path, config: dict[str, Any]) -> Any:
    import deepspeed

    with hf_zero_stream.streaming():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, ds_config=config)
    around = Around(model)
    engine, *_ = deepspeed.initialize(model=around, config=config, model_parameters=all_in_one_group(around))
    return engine


def save_as_lightning(folder: Path, target: Path, stage: int) -> list[float]:
    engine = engine_around(folder, state_config(stage))
    train(engine, range(3))
    given = client_state()
    engine.save_checkpoint(str(target / "stock"), client_state={**given, "generator": given["generator"].contiguous()})
    with hf_zero_stream.streaming():
        engine.save_checkpoint(str(target / "ours"), tag="checkpoint", client_state=given)
    return train(engine, (3, 4))


def convert_as_lightning(folder: Path) -> dict[str, Any]:
    """As Lightning's own ``convert_zero_checkpoint_to_fp32_state_dict``: it opens DeepSpeed's files by itself too."""
    from deepspeed.utils.zero_to_fp32 import (
        get_fp32_state_dict_from_zero_checkpoint,
        get_model_state_file,
        get_optim_files,
    )

    values = get_fp32_state_dict_from_zero_checkpoint(folder)
    place = os.path.join(folder, (folder / "latest").read_text().strip())
    optimizer = torch.load(get_optim_files(place)[0], map_location="cpu", weights_only=False)
    file = get_model_state_file(place, optimizer["optimizer_state_dict"]["zero_stage"])
    return {**torch.load(file, map_location="cpu", weights_only=False), "state_dict": values}


def resume_as_lightning(folder: Path, source: Path, again: Path, stage: int) -> tuple[list[float], str]:
    """The losses of two steps, and the client state as text; what was loaded is saved `again`."""
    engine = engine_around(folder, state_config(stage))
    with hf_zero_stream.streaming():
        _, found = engine.load_checkpoint(str(source), load_lr_scheduler_states=False)
        engine.save_checkpoint(str(again), tag="checkpoint")
    return train(engine, (3, 4)), repr({name: found[name] for name in client_state()})


@pytest.mark.slow
@pytest.mark.parametrize("stage", [3, 2])
@pytest.mark.parametrize("world_size", [1, 3])
def test_checkpoints_of_lightning(
    cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, world_size: int, stage: int
) -> None:
    """Sharded, and resumed at any number of ranks with the client state as it was; so are folders of DeepSpeed's.

    Its own converter says what a state of ours is.
    """
    folder = zoo_checkpoint("llama")
    [continued, _] = run_ranks(2, save_as_lightning, folder, tmp_path, stage)
    assert (tmp_path / "ours" / "checkpoint" / "global_step3" / "training_state.json").exists()
    stock = convert_as_lightning(tmp_path / "stock")
    assert repr({name: stock[name] for name in client_state()}) == repr(client_state())
    with hf_zero_stream.streaming(), pytest.raises(ModuleNotFoundError, match="hf-zero-stream convert"):
        convert_as_lightning(tmp_path / "ours")
    values = values_in(tmp_path / "ours" / "checkpoint" / "global_step3")
    assert differing(values, stock["state_dict"]) == []
    same = run_ranks(2, resume_as_lightning, folder, tmp_path / "ours", tmp_path / "same", stage)
    assert same == [(continued, repr(client_state()))] * 2
    for name in ("ours", "stock"):
        again = tmp_path / f"{name} again"
        for losses, found in run_ranks(world_size, resume_as_lightning, folder, tmp_path / name, again, stage):
            assert losses == pytest.approx(continued, rel=1e-2) and found == repr(client_state())
        assert different_states(again / "checkpoint", tmp_path / "same" / "checkpoint") == [], name


# ----------------------------------------------------------------------------------------------- sentence-transformers


class Sentences(torch.nn.Sequential):
    """As sentence_transformers.SentenceTransformer: the model is in a module of a module, and saves itself."""

    def forward(self, **batch: Any) -> Any:
        output = self[0](**batch, output_hidden_states=True)
        output.loss = output.loss + self[1](output.hidden_states[-1]).square().mean()
        return output

    def save_pretrained(self, path: str) -> None:
        os.makedirs(path, exist_ok=True)
        self[0].model.save_pretrained(os.path.join(path, ""), safe_serialization=True)
        for number, module in enumerate(self[1:], start=1):
            os.makedirs(os.path.join(path, f"{number}_Dense"), exist_ok=True)
            save_model(module, os.path.join(path, f"{number}_Dense", "model.safetensors"))


def save_as_sentence_transformers(checkpoint: Path, target: Path, home: str) -> dict[str, bytes]:
    """The values in memory after a step, by name; what the Trainer saves is in `target`, and what it is told to."""

    class SentenceTrainer(transformers.Trainer):
        def _save(self, output_dir: Any = None, state_dict: Any = None) -> None:
            self.model.save_pretrained(output_dir)

    settings: dict[str, Any] = {}
    if home == "fsdp2":
        force_fsdp_on_cpu()
        settings = {"deepspeed": None, "fsdp": True, "fsdp_config": {"version": 2}}
    else:
        join_as_launched()
    once = {"max_steps": 1, "save_steps": 1, "label_names": ["labels"], "remove_unused_columns": False}
    arguments = trainer_arguments(target / "run", **once, **settings)
    with hf_zero_stream.streaming():
        model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        ids = torch.arange(16) * 37 % 300
        data = [{"input_ids": ids, "labels": ids}] * 4
        # Of the Dense, ZeRO-3 partitions the weight, and keeps the bias whole, in the padded memory of its gather.
        dense = torch.nn.Linear(model.config.hidden_size, 4001)
        chain = Sentences(Around(model), dense)
        trainer = SentenceTrainer(model=chain, args=arguments, train_dataset=data)
        trainer.train()
        trainer.save_model(str(target / "final"))
        dist.barrier()
    return {name: value.numpy().tobytes() for name, value in whole_values(chain).items()}


@pytest.mark.slow
@pytest.mark.parametrize("home", ["zero3", "fsdp2"])
def test_the_save_of_sentence_transformers(
    cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, home: str
) -> None:
    """Its own ``_save`` gives what is in memory. Stock's file has no elements of what is sharded, without an error."""
    checkpoint = zoo_checkpoint("llama")
    [expected, _] = run_ranks(2, save_as_sentence_transformers, checkpoint, tmp_path, home)
    saved = {f"0.model.{name}": it for name, it in load_file(tmp_path / "final" / "model.safetensors").items()}
    own = load_file(tmp_path / "final" / "1_Dense" / "model.safetensors")
    saved |= {f"1.{name}": tensor for name, tensor in own.items()}
    assert {name: tensor.numpy().tobytes() for name, tensor in saved.items()} == expected
    assert load_file(tmp_path / "run" / "checkpoint-1" / "1_Dense" / "model.safetensors").keys() == own.keys()
    assert different(tmp_path / "final", tmp_path / "run" / "checkpoint-1") == ["trainer_state.json"]
