"""Frameworks around a model, with DeepSpeed and without it.

- What frameworks around a model call, as they call it: checkpoints of Lightning, the save of sentence-transformers.
  `make ecosystem` runs the frameworks themselves.
- TRL calls `from_pretrained` itself: a trainer given a path streams it inside `streaming()`.
- What is not ZeRO works where DeepSpeed is not installed: FSDP2, training states, plans, conversions, the tools.
"""

import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_model

import hf_zero_stream
from hf_zero_stream.holdings.introspection import is_streamed
from tests.support.checkpoint_files import differing
from tests.support.cluster import ROOT, free_port, run_ranks
from tests.support.forks import Forks
from tests.support.fsdp2 import force_fsdp_on_cpu
from tests.support.parity import whole_values
from tests.support.saving import different
from tests.support.trainers import ZERO_3, arguments_of, join_as_launched, losses_of, make_tokenizer, trainer_arguments
from tests.support.training_state import all_in_one_group, different_states, state_config, train, values_in
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
    with hf_zero_stream.streaming(), pytest.raises(RuntimeError, match="hf-zero-stream convert"):
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


def fine_tune(folder: Path, output: Path, stream: bool) -> dict[str, Any]:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    join_as_launched()
    of_model = {"experts_implementation": "eager", "dtype": "float32"}
    args = arguments_of(output, SFTConfig, max_steps=3, save_strategy="no", model_init_kwargs=of_model, **ZERO_3)
    data = Dataset.from_dict({"text": ["a small model learns words"] * 8})
    torch.manual_seed(0)
    with hf_zero_stream.streaming() if stream else nullcontext():
        trainer = SFTTrainer(model=str(folder), args=args, train_dataset=data)
    streamed = is_streamed(trainer.model)
    trainer.train()
    return {"losses": losses_of(trainer), "streamed": streamed}


def test_sft_trainer(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = shutil.copytree(zoo_checkpoint("qwen3_moe"), tmp_path / "model")
    make_tokenizer(folder)
    ours = run_ranks(2, fine_tune, folder, tmp_path / "out", True)
    stock = run_ranks(2, fine_tune, folder, tmp_path / "out", False)
    assert all(result["streamed"] for result in ours)
    assert not any(result["streamed"] for result in stock)
    assert [result["losses"] for result in ours] == [result["losses"] for result in stock]
    assert len(set(ours[0]["losses"])) == 3


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    """Processes of a Python that has all packages that are installed here but DeepSpeed."""
    packages = tmp_path_factory.mktemp("packages")
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith(("deepspeed", "__editable__", "hf_zero_stream")):
            (packages / entry.name).symlink_to(entry)
    environment = {"PYTHONPATH": os.pathsep.join([str(packages), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    python = str(Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}")  # which sees no other packages
    with Forks("import torch, transformers.modeling_utils", [python], environment) as forks:
        yield forks


SHARDED = """\
import importlib.util, sys, torch
import torch.distributed as dist
import hf_zero_stream
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
assert importlib.util.find_spec("deepspeed") is None
folder, out = sys.argv[1:]
dist.init_process_group("gloo")
plain = dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
def train(model, optimizer):
    tokens = torch.arange(8)[None]
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()
with hf_zero_stream.streaming():
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(fsdp_size=2))
    assert all(torch.equal(param.full_tensor(), plain[name]) for name, param in model.named_parameters())
    assert model.streaming_report.into == "shards"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train(model, optimizer)
    hf_zero_stream.save_state(model, f"{out}/state", optimizer=optimizer)
    model.save_pretrained(f"{out}/saved")
    losses = [train(model, optimizer) for _ in range(2)]
    hf_zero_stream.load_state(model, f"{out}/state", optimizer=optimizer)
    assert [train(model, optimizer) for _ in range(2)] == losses
    whole = AutoModelForCausalLM.from_pretrained(f"{out}/saved")
    hf_zero_stream.load_into(whole, folder)
    assert all(torch.equal(param, plain[name]) for name, param in whole.named_parameters())
dist.destroy_process_group()
print("right")
"""


@pytest.mark.slow
def test_sharded_training(elsewhere: Forks, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    arguments = (str(zoo_checkpoint("llama")), str(tmp_path))
    ranks = [elsewhere.start(SHARDED, *arguments, **group, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(2)]
    assert [rank.printed().count("right") for rank in ranks] == [1, 1]


TOOL = """\
import importlib.util, runpy
assert importlib.util.find_spec("deepspeed") is None
runpy.run_module("hf_zero_stream", run_name="__main__", alter_sys=True)
"""


@pytest.mark.plugin("tools", "forecast", "pickled")
def test_tools(elsewhere: Forks, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = str(zoo_checkpoint("llama"))
    assert "sound" in elsewhere.run(TOOL, "verify", folder)
    elsewhere.run(TOOL, "convert", folder, str(tmp_path / "converted"), "--dtype", "bf16")
    assert (tmp_path / "converted" / "model.safetensors").is_file()
    planned = "hf_zero_stream.plan(sys.argv[1], world_size=2, rank=0, distributed_config={'fsdp_size': 2}).load"
    assert "reads" in elsewhere.run(f"import sys, hf_zero_stream; print('reads', len(list({planned})))", folder)
