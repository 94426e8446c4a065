"""TRL's GRPO gives vLLM the same tensors as without streaming(), under the same names, and gathers nothing for it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import vllm_stand_in
from tests.cluster import run_ranks
from tests.fsdp2 import announce, force_fsdp_on_cpu
from tests.streams import counted_gathers, differing
from tests.test_trl import ON_A_CPU, make_tokenizer


STEPS = 3


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(number % 2) for number, _ in enumerate(completions)]


def train(folder: Path, output: Path, home: str, stream: bool, adapts: bool) -> dict[str, Any]:
    """Three steps with a sync before each; on rank 0 what the server got."""
    from contextlib import nullcontext

    vllm_stand_in.install(output / "stand-in")
    import peft
    import trl.generation.vllm_generation as generation
    from accelerate import PartialState
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    import hf_zero_stream

    generation.VLLMClient = vllm_stand_in.recorder([3], [4, 5, 6])
    options: dict[str, Any] = {}
    if home == "zero3":
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        options["deepspeed"] = {
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "bf16": {"enabled": "auto"},
            "zero_optimization": {"stage": 3},
            "zero_allow_untested_optimizer": True,
        }
    else:
        announce()
        force_fsdp_on_cpu()
        options |= {"fsdp": True, "fsdp_config": {"fsdp_version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}}
    if home == "zero3":
        PartialState(backend="gloo")
    args = GRPOConfig(
        output_dir=str(output / "out"),
        use_vllm=True,
        vllm_mode="server",
        max_completion_length=4,
        num_generations=2,
        max_steps=STEPS,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=1,
        learning_rate=1e-2,
        gradient_checkpointing=False,
        **ON_A_CPU,
        **options,
    )
    data = Dataset.from_dict({"prompt": ["a small model learns words"] * 16})
    torch.manual_seed(0)
    with hf_zero_stream.streaming() if stream else nullcontext():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")
        trainer = GRPOTrainer(
            model=model,
            args=args,
            train_dataset=data,
            reward_funcs=reward,
            peft_config=peft.LoraConfig(r=3, target_modules=["q_proj"]) if adapts else None,
        )
        gathers: list[str] = []
        own, sync = trainer.vllm_generation, trainer.vllm_generation.sync_weights

        def counted_sync() -> None:
            with counted_gathers() as noted:
                sync()
            gathers.extend(noted)

        own.sync_weights = counted_sync
        trainer.train()
    losses = [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "grad_norm" in entry]
    client = own.vllm_client if dist.get_rank() == 0 else None
    return {
        "losses": losses,
        "gathers": len(gathers),
        "syncs": [] if client is None else client.syncs,
        "calls": [] if client is None else client.calls,
    }


@pytest.mark.sample(1)
@pytest.mark.parametrize("adapts", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("home", ["zero3", "fsdp2"])
def test_grpo(cluster: None, zoo_checkpoint: Callable[..., Path], tmp_path: Path, home: str, adapts: bool) -> None:
    folder = shutil.copytree(zoo_checkpoint("qwen3_moe"), tmp_path / "model")
    make_tokenizer(folder)
    ours, *others = run_ranks(2, train, folder, tmp_path / "ours", home, True, adapts)
    stock, *_ = run_ranks(2, train, folder, tmp_path / "stock", home, False, adapts)
    assert len(ours["syncs"]) == len(stock["syncs"]) == STEPS
    for mine, theirs in zip(ours["syncs"], stock["syncs"], strict=True):
        assert differing(mine, theirs) == []
    assert differing(*ours["syncs"][:2]), "the steps change the weights"
    assert ours["losses"] == stock["losses"] and len(ours["losses"]) == STEPS
    assert ours["gathers"] == others[0]["gathers"] == 0 < stock["gathers"]
    calls = ["start_weight_update", "update_weights", "finish_weight_update", "reset_prefix_cache"]
    assert ours["calls"] == stock["calls"] == calls * STEPS
