"""accelerate's FSDP2: nothing is read before ``prepare`` but buffers, and then each rank reads its own shards.

accelerate has FSDP on accelerators only. What is not the CPU's own here is in ``tests/fsdp2.py::force_fsdp_on_cpu``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cluster import run_ranks
from tests.fsdp2 import Training


Checkpoint = Callable[..., Path]


def with_adapters(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"]))


def frozen_and_cast(model: Any) -> Any:
    model.to(torch.bfloat16).model.embed_tokens.requires_grad_(False)
    model.gradient_checkpointing_enable()
    return model


def resized(model: Any) -> Any:
    model.resize_token_embeddings(320)
    return model


TRAININGS = {
    "plain": Training("llama"),
    "tied": Training("qwen3"),
    "mixture": Training("qwen3_moe"),
    "mixed precision, activation checkpointing": Training(
        "llama", "bf16", {"activation_checkpointing": True}, {"dtype": torch.bfloat16}
    ),
    "frozen, cast, gradient checkpointing": Training("llama", change=frozen_and_cast),
    "resized": Training("llama", change=resized),
    # Stock gives the optimizers of all but rank 0 one of the missing parameters in place of each of them.
    "missing": Training("llama", kwargs={"num_hidden_layers": 3}, stock_is_efficient=False),
    # Stock raises: a buffer that is saved is no DTensor.
    "saved buffers": Training("deepseek_v3", stock_is_efficient=False),
    "adapters": Training("llama", change=with_adapters),
    "ignored": Training("llama", settings={"ignored_modules": r"model\.layers\.0"}),
}


def train_in_turn(folders: dict[str, Path], efficient: bool) -> dict[str, list[dict[str, Any]]]:
    """Ours and stock's results of each training."""
    return {
        title: [
            training.run(folders[training.name], streams=streams, efficient=efficient) for streams in (True, False)
        ]
        for title, training in TRAININGS.items()
    }


@pytest.mark.parametrize("efficient", [True, False])
def test_losses_equal_stock(cluster: None, zoo_checkpoint: Checkpoint, efficient: bool) -> None:
    folders = {training.name: zoo_checkpoint(training.name) for training in TRAININGS.values()}
    for found in run_ranks(2, train_in_turn, folders, efficient, timeout=240):
        for title, (ours, stock) in found.items():
            assert ours["losses"] == stock["losses"], title
            assert len(set(ours["losses"])) == 3, title
            assert ours["lazy"] and not ours["left"] and not stock["lazy"], title
            report = ours["report"]
            assert report.bytes_read <= 1.05 * report.bytes_needed, title
