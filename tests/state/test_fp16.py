"""Training in fp16 with a dynamic loss scale goes on as if nothing had happened, steps that overflow and all.

DeepSpeed refuses fp16 on a CPU, which computes it all the same: here it is told that the CPU can.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import transformers

import hf_zero_stream
from tests.support.cluster import run_ranks
from tests.support.training_state import different_states, state_config, two_groups
from tests.support.zoo import VOCAB, Checkpoint


STAGES = (3, 2, 1, 0)


def engine_of(folder: Path, stage: int) -> Any:
    from deepspeed.accelerator import get_accelerator

    type(get_accelerator()).is_fp16_supported = lambda self: True  # type: ignore[method-assign]
    scale = {"enabled": True, "initial_scale_power": 14, "loss_scale_window": 2, "hysteresis": 2}
    config = {**state_config(stage, torch.float16), "fp16": scale}
    with hf_zero_stream.streaming():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float16, ds_config=config)
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=two_groups(model))
    return engine


def train(engine: Any, steps: Sequence[int], overflowing: Sequence[int]) -> list[tuple[Any, ...]]:
    """The loss, the loss scale, and the numbers of steps and of skipped steps, after each step."""
    engine.train()
    found = []
    for step in steps:
        tokens = torch.randint(5, VOCAB, (2, 9), generator=torch.Generator().manual_seed(step))
        loss = engine(input_ids=tokens, labels=tokens).loss * (1e6 if step in overflowing else 1)
        engine.backward(loss)
        engine.step()
        found.append((loss.item(), engine.optimizer.loss_scale, engine.global_steps, engine.skipped_steps))
    return found


def train_and_save(folder: Path, target: Path, stages: list[int]) -> dict[int, Any]:
    found = {}
    for stage in stages:
        engine = engine_of(folder, stage)
        train(engine, range(5), (1, 2, 3))
        hf_zero_stream.save_state(engine, target / f"ours {stage}")
        engine.save_checkpoint(str(target / f"stock {stage}"))
        found[stage] = train(engine, range(5, 11), (6,))
    return found


def resume(folder: Path, target: Path, stages: list[int]) -> list[Any]:
    """From ours by us, from DeepSpeed's by us and by itself."""
    found = []
    for stage in stages:
        for source, by_us in (("ours", True), ("stock", True), ("stock", False)):
            if source == "stock" and by_us and stage == 0:
                continue  # no ZeRO
            engine, place = engine_of(folder, stage), target / f"{source} {stage}"
            if by_us:
                hf_zero_stream.load_state(engine, place)
            else:
                engine.load_checkpoint(str(place))
            found.append((stage, source, by_us, train(engine, range(5, 11), (6,))))
    return found


def resume_and_save(folder: Path, target: Path, stages: list[int]) -> None:
    for stage in stages:
        engine = engine_of(folder, stage)
        hf_zero_stream.load_state(engine, target / f"ours {stage}")
        hf_zero_stream.save_state(engine, target / f"again {stage}")


@pytest.mark.slow
def test_overflows(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = zoo_checkpoint("llama")
    continued = run_ranks(2, train_and_save, folder, tmp_path, STAGES)[0]
    for steps in continued.values():
        assert len({scale for _, scale, _, _ in steps}) > 1 and steps[-1][2:] == (11, 4)
    for stage, source, by_us, steps in run_ranks(2, resume, folder, tmp_path, STAGES)[0]:
        assert steps == continued[stage], (stage, source, by_us)
    run_ranks(3, resume_and_save, folder, tmp_path, STAGES)
    for stage in STAGES:
        ours, again = tmp_path / f"ours {stage}", tmp_path / f"again {stage}"
        assert different_states(ours, again) == [], stage
        scalers = [json.loads(next(it.glob("*/training_state.json")).read_text())["scaler"] for it in (ours, again)]
        assert scalers[0] == scalers[1] is not None, stage
