"""transformers' own tests of the Trainer and of DeepSpeed's engine under ZeRO-3 hold for streamed models.

Docstrings name the test that each stands for; tests/support/upstream.py says in which files those are.
"""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from hf_zero_stream import streaming
from tests.support.checkpoint_files import differing
from tests.support.cluster import run_ranks
from tests.support.loading import assert_same, compare, load_with
from tests.support.parity import ds_config
from tests.support.trainers import arguments_of, join_as_launched, losses_of
from tests.support.upstream import is_partitioned
from tests.support.zoo import ZOO, Checkpoint


def make_trainer(folder: Path, output: Path, stream: bool, **arguments: Any) -> transformers.Trainer:
    join_as_launched()
    deepspeed = {
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
    }
    settings = {"deepspeed": deepspeed, "learning_rate": 1e-3, "lr_scheduler_type": "constant", "save_strategy": "no"}
    args = arguments_of(output, **{**settings, **arguments})
    with streaming() if stream else nullcontext():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert hasattr(model, "streaming_report") is stream
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(5, 300, (16, 9), generator=generator)
    data = [{"input_ids": row, "labels": row} for row in rows]
    return transformers.Trainer(model=model, args=args, train_dataset=data, eval_dataset=data[:4])


def train(folder: Path, output: Path, stream: bool) -> dict[str, Any]:
    trainer = make_trainer(folder, output, stream, max_steps=3)
    seen = [trainer.is_deepspeed_enabled, is_deepspeed_zero3_enabled()]
    stage = trainer.accelerator.state.deepspeed_plugin.zero_stage
    trainer.train()
    seen += [is_deepspeed_zero3_enabled(), is_partitioned(trainer.model)]
    return {"seen": seen, "stage": stage, "losses": losses_of(trainer)}


@pytest.mark.slow
def test_trainer_sees_zero3(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """`test_ds_config_object`, `test_training`: ZeRO-3 is on for the Trainer, which trains as with stock's model."""
    streamed, stock = (
        run_ranks(2, train, zoo_checkpoint("llama"), tmp_path / str(stream), stream) for stream in (True, False)
    )
    for found in streamed:
        assert found["seen"] == [True, True, True, True] and found["stage"] == 3
    assert [found["losses"] for found in streamed] == [found["losses"] for found in stock]
    assert len(set(streamed[0]["losses"])) == 3


STEPS = dict(max_steps=4, save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2)


def train_to_the_best(folder: Path, output: Path) -> dict[str, Any]:
    trainer = make_trainer(folder, output, True, load_best_model_at_end=True, **STEPS)
    trainer.train()
    found = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    return {"losses": losses_of(trainer), "evaluated": found, "best": trainer.evaluate()["eval_loss"]}


def resume(folder: Path, output: Path) -> list[float]:
    trainer = make_trainer(folder, output, True, **STEPS)
    trainer.train(resume_from_checkpoint=str(output / "checkpoint-2"))
    return losses_of(trainer)


@pytest.mark.slow
def test_resume_and_best_model(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """`test_can_resume_training_normal`, `test_load_best_model`: engine checkpoints of a streamed model load into one.

    The model that the Trainer saves beside them is a checkpoint like any other.
    """
    ranks = run_ranks(2, train_to_the_best, zoo_checkpoint("llama"), tmp_path)
    for found in ranks:
        assert len(found["losses"]) == 4 and len(found["evaluated"]) == 2
        assert found["best"] == min(found["evaluated"])
    assert run_ranks(2, resume, zoo_checkpoint("llama"), tmp_path) == [found["losses"] for found in ranks]
    assert_same(run_ranks(2, compare, "AutoModelForCausalLM", tmp_path / "checkpoint-4", {}))


def recover(name: str, folder: Path, output: Path) -> list[str]:
    """The names of the tensors that differ between the checkpoint of an engine, put together, and plain loading."""
    import deepspeed
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    plain = load_with("plain", ZOO[name].auto_class, folder, {}, {})
    model = load_with("streamed", ZOO[name].auto_class, folder, ds_config(), {})
    next(model.parameters()).requires_grad = False  # frozen parameters are kept apart in such a checkpoint
    engine, *_ = deepspeed.initialize(model=model, config=ds_config())
    engine.save_checkpoint(str(output))
    dist.barrier()
    return differing(get_fp32_state_dict_from_zero_checkpoint(str(output)), plain.state_dict())


@pytest.mark.parametrize("name", ["qwen3_moe", "t5"])
def test_zero_to_fp32(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, name: str) -> None:
    """`test_load_state_dict_from_zero_checkpoint`, `test_zero_to_fp32`: whole weights out of the ranks' partitions."""
    assert run_ranks(2, recover, name, zoo_checkpoint(name), tmp_path) == [[], []]
