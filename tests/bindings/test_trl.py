"""TRL calls `from_pretrained` itself: a trainer given a path streams it inside `streaming()`."""

import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

import hf_zero_stream
from tests.support.cluster import run_ranks
from tests.support.trainers import ZERO_3, arguments_of, join_as_launched, losses_of, make_tokenizer
from tests.support.zoo import Checkpoint


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
    streamed = hasattr(trainer.model, "streaming_report")
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
