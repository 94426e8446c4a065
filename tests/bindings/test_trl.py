"""TRL calls `from_pretrained` itself: a trainer given a path streams it inside `streaming()`."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import PreTrainedTokenizerFast

import hf_zero_stream
from tests.support.cluster import run_ranks


ON_A_CPU: dict[str, Any] = {
    "bf16": False,  # transformers wants a GPU for it
    "accelerator_config": {"use_configured_state": True},
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "optim": "adamw_torch",
    "dataloader_pin_memory": False,
    "disable_tqdm": True,
}
"""Arguments of TRL's trainers for a few steps whose losses are compared."""


def make_tokenizer(folder: Path) -> None:
    """A word-level tokenizer of a few words, so that nothing is downloaded."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "<eos>", "<unk>", "a", "small", "model", "learns", "words"]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder)


def fine_tune(folder: Path, output: Path, stream: bool) -> dict[str, Any]:
    from contextlib import nullcontext

    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(backend="gloo")
    deepspeed = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True,
    }
    args = SFTConfig(
        output_dir=str(output),
        deepspeed=deepspeed,
        max_steps=3,
        per_device_train_batch_size=1,
        **ON_A_CPU,
        model_init_kwargs={"experts_implementation": "eager", "dtype": "float32"},
    )
    data = Dataset.from_dict({"text": ["a small model learns words"] * 8})
    torch.manual_seed(0)
    with hf_zero_stream.streaming() if stream else nullcontext():
        trainer = SFTTrainer(model=str(folder), args=args, train_dataset=data)
    streamed = hasattr(trainer.model, "streaming_report")
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"losses": losses, "streamed": streamed}


def test_sft_trainer(cluster: None, zoo_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = shutil.copytree(zoo_checkpoint("qwen3_moe"), tmp_path / "model")
    make_tokenizer(folder)
    ours = run_ranks(2, fine_tune, folder, tmp_path / "out", True)
    stock = run_ranks(2, fine_tune, folder, tmp_path / "out", False)
    assert all(result["streamed"] for result in ours)
    assert not any(result["streamed"] for result in stock)
    assert [result["losses"] for result in ours] == [result["losses"] for result in stock]
    assert len(set(ours[0]["losses"])) == 3
